"""The runtime as the service uses it: phase after phase, on a tiny model and on the demo model."""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.shares import RankPlace
from loader.tokenizer import load_tokenizer
from tests.support.runtime_settings import Settings
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.runtime import memory
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.memory import HostMemory
from worker_service.runtime.report import Phase
from worker_service.runtime.step import NewSequence, Sampling, StateMismatch, StepInput
from worker_service.runtime.worker import WorkerRuntime

CACHE = Path(os.environ.get("STEPWIRE_CACHE", "~/.cache/stepwire")).expanduser()
DEMO = CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def ignore(*_: object) -> None:
    return None


def never() -> bool:
    return False


def loaded(path: Path, settings: Settings | None = None) -> WorkerRuntime:
    runtime = WorkerRuntime(settings or Settings())
    runtime.init_device(RankPlace())
    runtime.load_model(path, "float32", ignore, never)
    return runtime


def first_step(prompt: list[int], blocks: range = range(2)) -> StepInput:
    new = NewSequence(1, "r", prompt, len(prompt), Sampling(), blocks)
    return StepInput(1, [new], [1], [len(prompt)], [0], [0], [], [], [])


def test_phase_after_phase(tiny_path: Path) -> None:
    runtime = WorkerRuntime(Settings())
    info = runtime.init_device(RankPlace())
    assert info.device == "cpu" and 0 < info.free_memory_bytes <= info.total_memory_bytes
    assert info.device_id == "cpu" and 0 < info.memory_limit_bytes < info.total_memory_bytes
    assert torch.get_num_threads() == 1
    seen: list[tuple[str, int, int]] = []
    summary = runtime.load_model(tiny_path, "auto", lambda *progress: seen.append(progress), never)
    names = [phase.name for phase in summary.phases]
    assert names == list(dict.fromkeys(name for name, _, _ in seen)) == ["inspect", "read", "pack", "attach"]
    assert sum(phase.duration_ns for phase in summary.phases) == summary.duration_ns
    assert seen[-1][1] == seen[-1][2] == summary.weight_bytes
    assert summary.dtype == "float32" and summary.architecture == "LlamaForCausalLM"
    assert summary.vocab_size == 320 and summary.max_position_count == 512
    assert summary.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert not summary.already_loaded and summary.duration_ns > 0
    report = runtime.determine_available_memory(64, 8)
    assert 0 < report.available_bytes < report.limit_bytes and report.activation_bytes > 0
    assert runtime.initialize_cache(40, 4, 64) == runtime.cache_bytes == 40 * 4 * summary.kv_bytes_per_token
    done: list[tuple[int, int]] = []
    runtime.warm_up(64, 8, lambda *progress: done.append(progress))
    assert [number for number, _ in done] == list(range(done[-1][1] + 1)) and done[-1][1] >= 4
    assert runtime.num_sequences == 0
    output = runtime.execute(first_step([1, 2, 3, 4, 5]))
    assert output.sequence_ids == [1] and runtime.num_sequences == 1


def test_the_same_model_is_not_loaded_twice(tiny_path: Path) -> None:
    runtime = loaded(tiny_path)
    runtime.initialize_cache(8, 4, 32)
    again = runtime.load_model(tiny_path, "float32", ignore, never)
    assert again.already_loaded and runtime.cache_bytes > 0
    other = runtime.load_model(tiny_path, "bfloat16", ignore, never)
    assert not other.already_loaded and other.dtype == "bfloat16" and runtime.cache_bytes == 0


def test_a_reset_goes_back_exactly_so_far(tiny_path: Path) -> None:
    runtime = loaded(tiny_path)
    runtime.initialize_cache(8, 4, 32)
    expected = runtime.execute(first_step([1, 2, 3])).token_ids
    runtime.reset(Phase.CACHED)
    assert runtime.num_sequences == 0 and runtime.cache_bytes > 0
    assert runtime.execute(first_step([1, 2, 3])).token_ids == expected
    runtime.reset(Phase.LOADED)
    assert runtime.cache_bytes == runtime.num_sequences == 0
    with pytest.raises(RuntimeFailure, match="InitializeCache"):
        runtime.execute(first_step([1]))
    runtime.initialize_cache(8, 4, 32)
    assert runtime.execute(first_step([1, 2, 3])).token_ids == expected
    runtime.reset(Phase.INITIALISED)
    with pytest.raises(RuntimeFailure, match="LoadModel"):
        runtime.initialize_cache(8, 4, 32)
    assert not runtime.load_model(tiny_path, "float32", ignore, never).already_loaded
    runtime.reset(Phase.STARTING)
    with pytest.raises(RuntimeFailure, match="InitDevice"):
        runtime.load_model(tiny_path, "float32", ignore, never)


def test_a_step_that_disagrees_is_refused(tiny_path: Path) -> None:
    runtime = loaded(tiny_path)
    runtime.initialize_cache(8, 4, 32)
    with pytest.raises(StateMismatch):
        runtime.execute(first_step([1, 2, 3], range(7, 9)))


def test_a_broken_checkpoint_leaves_no_model(tiny_path: Path, tmp_path: Path) -> None:
    runtime = loaded(tiny_path)
    with pytest.raises(CheckpointError):
        runtime.load_model(tmp_path / "nowhere", "float32", ignore, never)
    folder = make_tiny_llama(tmp_path / "model", config_overrides={"hidden_act": "softsign"})
    with pytest.raises(CheckpointError, match="softsign"):
        runtime.load_model(folder, "float32", ignore, never)
    with pytest.raises(RuntimeFailure, match="int5"):
        runtime.load_model(tiny_path, "int5", ignore, never)


def test_a_load_can_be_cancelled(tiny_path: Path) -> None:
    runtime = WorkerRuntime(Settings())
    runtime.init_device(RankPlace())
    with pytest.raises(LoadCancelled):
        runtime.load_model(tiny_path, "float32", ignore, lambda: True)
    assert not runtime.load_model(tiny_path, "float32", ignore, never).already_loaded


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((0, 4, 32), "block_count"),
        ((8, 0, 32), "block_size"),
        ((8, 4, 0), "max_model_len"),
        ((2**40, 4, 8), "block_count"),
    ],
)
def test_absurd_cache_sizes_are_refused(tiny_path: Path, numbers: tuple[int, int, int], name: str) -> None:
    with pytest.raises(RuntimeFailure, match=name) as failed:
        loaded(tiny_path).initialize_cache(*numbers)
    assert failed.value.code == "invalid"


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (2**30, 1), (1, -1)])
def test_absurd_step_sizes_are_refused(tiny_path: Path, numbers: tuple[int, int]) -> None:
    runtime = loaded(tiny_path)
    runtime.initialize_cache(8, 4, 32)
    for call in (runtime.determine_available_memory, lambda *numbers: runtime.warm_up(*numbers, ignore)):
        with pytest.raises(RuntimeFailure, match="_count") as failed:
            call(*numbers)
        assert failed.value.code == "invalid"


def test_too_large_a_cache_says_what_is_free(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = loaded(tiny_path)
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(2**20, 2**20))
    with pytest.raises(RuntimeFailure, match=r"1\.0 MiB free; .*; lower num_kv_blocks") as failed:
        runtime.initialize_cache(10_000, 16, 64)
    assert failed.value.code == "out_of_memory"
    assert failed.value.metadata["needed_bytes"] == str(10_000 * 16 * 512)


def test_too_little_memory_for_any_cache(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = loaded(tiny_path, Settings(kv_cache_bytes=2**40))
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(2**31, 2**30))
    with pytest.raises(RuntimeFailure, match=r"kv_cache_bytes asks for 1024\.00 GiB"):
        runtime.determine_available_memory(64, 8)


def test_a_warm_up_makes_do_with_a_small_cache(tiny_path: Path) -> None:
    runtime = loaded(tiny_path)
    runtime.initialize_cache(2, 4, 8)
    done: list[tuple[int, int]] = []
    runtime.warm_up(512, 64, lambda *progress: done.append(progress))
    assert done[-1][0] == done[-1][1] >= 1


@pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in the cache")
def test_the_demo_model_knows_the_capital_of_france() -> None:
    runtime = WorkerRuntime(Settings(threads=2, kv_cache_bytes=2**24))
    runtime.init_device(RankPlace())
    runtime.load_model(DEMO, "auto", ignore, never)
    runtime.initialize_cache(16, 16, 128)
    tokenizer: Tokenizer = load_tokenizer(open_checkpoint(DEMO)).tokenizer
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    output = runtime.execute(first_step(prompt))
    assert tokenizer.decode(output.token_ids) == " Paris"


@pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in the cache")
@pytest.mark.parametrize(("dtype", "native"), [("bfloat16", False), ("bfloat16", True), ("float16", True)])
def test_the_demo_model_chats_in_sixteen_bits(dtype: str, *, native: bool) -> None:
    runtime = WorkerRuntime(Settings(threads=2, kv_cache_bytes=2**24, native_kernels=native))
    runtime.init_device(RankPlace())
    runtime.load_model(DEMO, dtype, ignore, never)
    runtime.initialize_cache(16, 16, 128)
    tokenizer: Tokenizer = load_tokenizer(open_checkpoint(DEMO)).tokenizer
    prompt = tokenizer.encode(CHAT, add_special_tokens=False).ids
    token_ids = list(runtime.execute(first_step(prompt, range(8))).token_ids)
    for number in range(2, 9):
        step = StepInput(number, [], [1], [1], [len(prompt) + len(token_ids) - 1], [0], [], [], [])
        token_ids += runtime.execute(step).token_ids
    assert tokenizer.decode(token_ids).startswith("The capital of France is Paris.")
