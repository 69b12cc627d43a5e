"""The runtime through all phases, on models of every kind: from a checkpoint to a token, and from the restart store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from loader.errors import CheckpointError
from loader.shares import RankPlace
from tests.support.mixture import greedy_tokens, mixed_prompts
from tests.support.runtime_settings import Settings
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_others import REFUSED, SERVED, make_tiny_other
from worker_service.runtime.report import LoadSummary
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.step import NewSequence, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime

OTHERS = ("gpt2", "gpt_bigcode", "cohere2")
# Layers times key-value heads times the size of a head.
KV_VALUES = {"gpt2": 2 * 32, "gpt_bigcode": 2 * 8, "cohere2": 4 * 16}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def make(folder: Path, name: str) -> Path:
    if name in OTHERS:
        return make_tiny_other(folder, name, SERVED[name])
    return make_tiny_llama(folder, config_overrides=TINY_FAMILIES[name])


def load(path: Path, store: RestartStore | None = None) -> tuple[WorkerRuntime, LoadSummary]:
    runtime = WorkerRuntime(Settings(), store)
    runtime.init_device(RankPlace())
    return runtime, runtime.load_model(path, "float32", lambda *_: None, lambda: False)


def first_token(runtime: WorkerRuntime, prompt: list[int]) -> int:
    runtime.initialize_cache(16, 8, 64)
    runtime.warm_up(64, 4, lambda *_: None)
    new = NewSequence(1, "r", prompt, len(prompt), Sampling(), range(3))
    return runtime.execute(StepInput(1, [new], [1], [len(prompt)], [0], [0], [], [], [])).token_ids[0]


@pytest.mark.parametrize("name", [*TINY_FAMILIES, *OTHERS])
def test_from_checkpoint_to_token(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    runtime, summary = load(tmp_path)
    assert runtime.determine_available_memory(64, 4).activation_bytes > 0
    prompt = mixed_prompts(320)[3]
    token = first_token(runtime, prompt)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert [token] == greedy_tokens(theirs, prompt, [token])
    kv_values = KV_VALUES.get(name, 2 * 2 * int(TINY_FAMILIES.get(name, {}).get("head_dim", 16)))
    assert summary.kv_bytes_per_token == 2 * kv_values * 4


@pytest.mark.parametrize("name", ["mixtral", "gemma3", "phi3", *OTHERS])
def test_from_the_restart_store_to_the_same_token(tmp_path: Path, name: str) -> None:
    path, store = make(tmp_path / "model", name), RestartStore(tmp_path / "store", None, is_set=True)
    prompt = mixed_prompts(320)[3]
    first, summary = load(path, store)
    assert "read" in [phase.name for phase in summary.phases]
    again, summary = load(path, store)
    assert "read" not in [phase.name for phase in summary.phases]
    assert first_token(first, prompt) == first_token(again, prompt)


def test_a_definition_that_is_refused_leaves_the_runtime_usable(tmp_path: Path) -> None:
    overrides, reason = REFUSED["falcon"]
    make_tiny_other(tmp_path / "falcon", "falcon", overrides)
    runtime, _ = load(make(tmp_path / "llama", "llama"))
    with pytest.raises(CheckpointError, match=reason):
        runtime.load_model(tmp_path / "falcon", "float32", lambda *_: None, lambda: False)
    runtime.load_model(tmp_path / "llama", "float32", lambda *_: None, lambda: False)
    assert first_token(runtime, [3, 4, 5]) >= 0
