"""Caches of eight bits through the runtime: what they take, and how far the demo model's answers move."""

import os
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.inspection import Wish, inspect_checkpoint
from loader.shares import RankPlace
from loader.tokenizer import load_tokenizer
from tests.support.runtime_settings import Settings
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import Phase
from worker_service.runtime.step import NewSequence, PromptLogprobs, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime

CACHE = Path(os.environ.get("STEPWIRE_CACHE") or Path.home() / ".cache" / "stepwire")
DEMO = CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
NUM_OUTPUTS = 48


def load(path: Path, kv_cache_dtype: str, *, native: bool = True, threads: int = 1) -> tuple[WorkerRuntime, int]:
    """A runtime with a cache, and the bytes that one token takes of it."""
    runtime = WorkerRuntime(Settings(native_kernels=native, threads=threads, kv_cache_bytes=2**26))
    runtime.init_device(RankPlace())
    summary = runtime.load_model(path, "bfloat16", lambda *_: None, lambda: False, "none", kv_cache_dtype)
    assert runtime.initialize_cache(16, 16, 256) == 16 * 16 * summary.kv_bytes_per_token
    return runtime, summary.kv_bytes_per_token


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_cache_takes_what_the_check_says(tiny_path: Path, kv_cache_dtype: str, *, native: bool) -> None:
    (rank,) = inspect_checkpoint(
        open_checkpoint(tiny_path), Wish(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    ).ranks
    runtime, kv_bytes_per_token = load(tiny_path, kv_cache_dtype, native=native)
    assert kv_bytes_per_token == rank.kv_bytes_per_token
    again = runtime.load_model(tiny_path, "bfloat16", lambda *_: None, lambda: False, "none", kv_cache_dtype)
    assert again.already_loaded
    other = "int8" if kv_cache_dtype == "auto" else "auto"
    changed = runtime.load_model(tiny_path, "bfloat16", lambda *_: None, lambda: False, "none", other)
    assert not changed.already_loaded and changed.kv_bytes_per_token != kv_bytes_per_token


def test_an_unknown_type_is_refused(tiny_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="one of auto, int8, fp8") as failed:
        load(tiny_path, "int4")
    assert failed.value.metadata["kv_cache_dtype"] == "int4"


def follow(runtime: WorkerRuntime, tokens: list[int], num_known: int) -> float:
    """The share of the tokens from `num_known` on that are the likeliest after those before, read from the cache."""
    parts: list[PromptLogprobs] = []
    sampling = Sampling(prompt_logprobs=1)
    new = NewSequence(1, "r", tokens, len(tokens), sampling, range(16), prompt_logprob_start=num_known)
    for computed in range(0, len(tokens), 16):
        count = min(16, len(tokens) - computed)
        step = StepInput(computed // 16 + 1, [] if computed else [new], [1], [count], [computed], [0], [], [], [])
        parts += [part for _, part in runtime.execute(step).prompt_logprobs]
    found = [token == top for part in parts for token, top in zip(part.token_ids, part.top_token_ids, strict=True)]
    assert len(found) == len(tokens) - num_known
    return sum(found) / len(found)


@pytest.mark.full
@pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in the cache")
@pytest.mark.parametrize(("kv_cache_dtype", "least"), [("auto", 0.97), ("int8", 0.9), ("fp8", 0.85)])
def test_the_demo_model_says_nearly_the_same(kv_cache_dtype: str, least: float) -> None:
    prompt = load_tokenizer(open_checkpoint(DEMO)).tokenizer.encode(QUESTION, add_special_tokens=False).ids
    whole, whole_bytes = load(DEMO, "auto", threads=2)
    new = NewSequence(1, "r", prompt, len(prompt), Sampling(), range(16))
    tokens = prompt + whole.execute(StepInput(1, [new], [1], [len(prompt)], [0], [0], [], [], [])).token_ids
    for number in range(1, NUM_OUTPUTS):
        step = StepInput(number + 1, [], [1], [1], [len(tokens) - 1], [0], [], [], [])
        tokens += whole.execute(step).token_ids
    whole.reset(Phase.INITIALISED)
    rounded, rounded_bytes = load(DEMO, kv_cache_dtype, threads=2)
    assert rounded_bytes == (whole_bytes if kv_cache_dtype == "auto" else whole_bytes // 128 * 68)
    assert follow(rounded, tokens, len(prompt)) >= least
