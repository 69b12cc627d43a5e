"""A runtime gives its memory back, takes it again, and computes what it did before."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import LoadCancelled
from loader.shares import RankPlace
from tests.support.runtime_settings import Settings
from tests.support.tiny_adapter import make_tiny_adapter
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_others import SERVED, make_tiny_other
from worker_service.kernels import native
from worker_service.runtime import worker as worker_module
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.held_tensors import replace_tensors
from worker_service.runtime.memory import own_bytes
from worker_service.runtime.report import LoadSummary, Phase, SleepLevel
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.sleep import give_back
from worker_service.runtime.step import NewSequence, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime

CPU = torch.device("cpu")
LEVELS = [SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS]
PROMPT = [5, 6, 7, 8, 9]


def never() -> bool:
    return False


SIZES = (16, 16, 256)


@pytest.fixture(params=["torch", "compiled"])
def settings(request: pytest.FixtureRequest) -> Settings:
    if request.param == "compiled" and native.load() is None:
        pytest.skip("the kernels cannot be compiled here")
    return Settings(native_kernels=request.param == "compiled")


def started(path: Path, settings: Settings, sizes: tuple[int, int, int] = SIZES) -> WorkerRuntime:
    runtime = WorkerRuntime(settings)
    runtime.init_device(RankPlace())
    runtime.load_model(path, "float32", lambda *_: None, lambda: False)
    runtime.initialize_cache(*sizes)
    return runtime


def logprobs(runtime: WorkerRuntime, adapter: str = "") -> list[tuple[int, float]]:
    """The most likely tokens after a prompt; the sequence ends with the step after it."""
    new = NewSequence(1, "r", PROMPT, len(PROMPT), Sampling(logprobs=20), range(1))
    new = replace(new, adapter=adapter) if adapter else new
    output = runtime.execute(StepInput(1, [new], [1], [len(PROMPT)], [0], [0], [], [], []))
    runtime.execute(StepInput(2, [], [], [], [], [], [], [1], []))
    assert not output.errors
    return list(output.logprobs[1].top)


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_computes_is_the_same(tiny_path: Path, settings: Settings, level: SleepLevel) -> None:
    runtime = started(tiny_path, settings)
    before = logprobs(runtime)
    for _ in range(2):
        runtime.sleep(level)
        assert runtime.cache_bytes == 0
        with pytest.raises(RuntimeFailure, match="InitializeCache"):
            logprobs(runtime)
        runtime.wake_up(never)
        assert runtime.cache_bytes > 0
        assert logprobs(runtime) == before
    runtime.wake_up(never)
    assert logprobs(runtime) == before


# One scale a group; blocks with factors, several types in one product; what is also the head.
GGUFS: dict[str, dict[str, Any]] = {
    "Q4_0": {"quantisation": "Q4_0"},
    "Q4_1": {"quantisation": "Q4_1", "types": {"token_embd": "Q8_0"}, "tie": True},
    "Q4_K_M": {
        "quantisation": "Q4_K",
        "types": {"attn_v": "Q6_K"},
        "sizes": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512},
    },
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", GGUFS)
def test_blocks_of_a_gguf_that_stay_packed(tmp_path: Path, settings: Settings, level: SleepLevel, name: str) -> None:
    path = make_tiny_gguf(tmp_path / "model.gguf", **GGUFS[name])
    runtime = started(path, settings)
    before, loaded = logprobs(runtime), runtime._loaded
    assert loaded is not None and loaded.job.is_quantised
    for _ in range(2):
        runtime.sleep(level)
        runtime.wake_up(never)
        assert logprobs(runtime) == before


def grammar(pattern: str) -> tuple[bytes, str]:
    """The key and text of a regular expression."""
    text = json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})
    return hashlib.sha256(text.encode()).digest(), text


def _touch(runtime: WorkerRuntime) -> int:
    """Occupies the whole cache; answers its bytes."""
    executor: Any = runtime._executor
    cache = executor._decoder._cache if hasattr(executor, "_decoder") else executor._cache._data
    cache.zero_()
    return runtime.cache_bytes


@pytest.fixture(scope="module")
def large_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("large"), num_layers=2, hidden_size=1024, intermediate_size=2048, max_position_count=64
    )


@pytest.mark.parametrize("level", LEVELS)
def test_memory_is_given_back(large_path: Path, settings: Settings, level: SleepLevel) -> None:
    path = large_path
    runtime = started(path, settings, (4096, 16, 64))
    cache_bytes, weight_bytes = _touch(runtime), sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert min(cache_bytes, weight_bytes) > 60 << 20
    logprobs(runtime)
    # What tests before this one have left would count as given back, too.
    give_back(CPU)
    held = own_bytes(CPU)
    runtime.sleep(level)
    freed = held - own_bytes(CPU)
    expected = cache_bytes + (weight_bytes if level is SleepLevel.DROP_WEIGHTS else 0)
    assert 0.9 * expected < freed < 1.3 * expected
    runtime.wake_up(never)
    assert logprobs(runtime)


def test_a_deeper_sleep_gives_back_more(tiny_path: Path, settings: Settings) -> None:
    runtime = started(tiny_path, settings)
    before = logprobs(runtime)
    runtime.sleep(SleepLevel.KEEP_WEIGHTS)
    runtime.sleep(SleepLevel.DROP_WEIGHTS)
    runtime.wake_up(never)
    assert logprobs(runtime) == before


def test_adapters_stay_with_the_weights(tiny_path: Path, tmp_path: Path, settings: Settings) -> None:
    settings = replace(settings, adapter_slots=2)
    folder = make_tiny_adapter(tmp_path / "adapter", open_checkpoint(tiny_path).config)
    runtime = started(tiny_path, settings)
    adapters = runtime.adapters()
    fingerprint = adapters.table.add(adapters.reader().read(folder)).fingerprint
    before = logprobs(runtime, fingerprint)
    assert before != logprobs(runtime)
    runtime.sleep(SleepLevel.KEEP_WEIGHTS)
    assert [report.is_resident for report in adapters.table.reports()] == [False]
    runtime.wake_up(never)
    assert logprobs(runtime, fingerprint) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("phase", [Phase.CACHED, Phase.LOADED, Phase.INITIALISED])
def test_a_reset_ends_a_sleep(tiny_path: Path, settings: Settings, level: SleepLevel, phase: Phase) -> None:
    runtime = started(tiny_path, settings)
    before = logprobs(runtime)
    runtime.sleep(level)
    runtime.reset(phase)
    runtime.wake_up(never)  # There is nothing to wake up to.
    runtime.load_model(tiny_path, "float32", lambda *_: None, lambda: False)
    runtime.initialize_cache(*SIZES)
    assert logprobs(runtime) == before


@pytest.mark.parametrize("level", LEVELS)
def test_it_sleeps_on_when_there_is_no_room(
    tiny_path: Path, settings: Settings, level: SleepLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = started(tiny_path, settings)
    before = logprobs(runtime)
    runtime.sleep(level)

    def no_room(*_: object) -> None:
        raise RuntimeFailure("out_of_memory", "others hold it")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "check_cache_fits", no_room)
        for _ in range(2):
            with pytest.raises(RuntimeFailure, match="others hold it"):
                runtime.wake_up(never)
            assert runtime.cache_bytes == 0
    runtime.wake_up(never)
    assert logprobs(runtime) == before


def test_another_checkpoint_is_not_woken_up_to(tmp_path: Path, settings: Settings) -> None:
    path = make_tiny_llama(tmp_path / "m")
    runtime = started(path, settings)
    before = logprobs(runtime)
    runtime.sleep(SleepLevel.DROP_WEIGHTS)
    shutil.move(path, tmp_path / "kept")
    make_tiny_llama(path, seed=1)
    for _ in range(2):
        with pytest.raises(RuntimeFailure, match="another checkpoint"):
            runtime.wake_up(never)
    shutil.rmtree(path)
    shutil.move(tmp_path / "kept", path)
    runtime.wake_up(never)
    assert logprobs(runtime) == before


# Where weights are, and in what: closures, packed values, modules of transformers, experts.
MODELS = ["llama", "qwen3", "gemma2", "mixtral", "gpt2", *GGUFS]


@pytest.fixture(params=MODELS)
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "gpt2":
        yield make_tiny_other(tmp_path / "m", "gpt2", SERVED["gpt2"])
    elif request.param in GGUFS:
        yield make_tiny_gguf(tmp_path / "m.gguf", **GGUFS[request.param])
    else:
        yield make_tiny_llama(tmp_path / "m", config_overrides=TINY_FAMILIES[request.param])


def test_every_tensor_of_a_model_is_moved(model_path: Path) -> None:
    """As to another device: copies in place of all tensors, whatever holds them, and the same results."""
    runtime = started(model_path, Settings())
    before = logprobs(runtime)
    engine: Any = runtime._loaded.engine  # type: ignore[union-attr]
    originals: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # A packed one of oneDNN, which is on a CPU alone.
        # A module changes its parameters in place: the alias keeps what was.
        originals.append(tensor.detach())
        return tensor.clone()

    replace_tensors(engine._model, copied)
    assert len(originals) > 4
    assert logprobs(runtime) == before
    # What was in use before is in use no more: spoiling it changes nothing.
    for tensor in originals:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    assert logprobs(runtime) == before


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_grammars_stay_and_may_be_added_meanwhile(tiny_path: Path, level: SleepLevel) -> None:
    runtime = started(tiny_path, Settings())
    runtime.prepare_grammar(*grammar("[ab]+"), (), 1)
    runtime.sleep(level)
    runtime.prepare_grammar(*grammar("[cd]+"), (), 2)
    runtime.wake_up(never)
    assert all(runtime.prepare_grammar(*grammar(text), (), 3).already_held for text in ("[ab]+", "[cd]+"))
    runtime.sleep(level)
    runtime.reset(Phase.INITIALISED)


def test_a_wake_up_that_is_cancelled_sleeps_on(tiny_path: Path, settings: Settings) -> None:
    runtime = started(tiny_path, settings)
    before = logprobs(runtime)
    runtime.sleep(SleepLevel.DROP_WEIGHTS)
    with pytest.raises(LoadCancelled):
        runtime.wake_up(lambda: True)
    runtime.wake_up(never)
    assert logprobs(runtime) == before


def test_shared_tensors_stay_shared() -> None:
    tensor = torch.ones(3)
    held = {"a": [tensor, (tensor, 1)], "b": tensor}
    replace_tensors(held, torch.clone)
    first = held["b"]
    assert first is not tensor
    assert held["a"][0] is first and held["a"][1][0] is first  # type: ignore[index]


def test_weights_that_were_dropped_come_from_the_restart_store(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = WorkerRuntime(Settings(), RestartStore(tmp_path / "store", None, is_set=True))
    runtime.init_device(RankPlace())
    runtime.load_model(tiny_path, "float32", lambda *_: None, lambda: False)
    runtime.initialize_cache(*SIZES)
    before = logprobs(runtime)
    runtime.sleep(SleepLevel.DROP_WEIGHTS)
    phases: list[str] = []
    load_model = runtime.load_model

    def watched(*arguments: Any, **keywords: Any) -> LoadSummary:
        summary = load_model(*arguments, **keywords)
        phases.extend(phase.name for phase in summary.phases)
        return summary

    monkeypatch.setattr(runtime, "load_model", watched)
    runtime.wake_up(never)
    assert "map" in phases and "read" not in phases
    assert logprobs(runtime) == before
