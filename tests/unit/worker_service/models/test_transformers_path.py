"""Other causal LMs, by transformers' definitions with our attention, against those definitions with their own."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.shares import RankPlace
from tests.support.mixture import greedy_tokens, mixed_prompts, run_mixture
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_others import REFUSED, SERVED, VOCAB_SIZE, make_tiny_other
from tests.support.tiny_runner import load_tiny, make_runner
from worker_service.models.model import Model
from worker_service.models.registry import build_model
from worker_service.models.transformers_path import TransformersModel
from worker_service.runtime.attention import AttentionPlanner, PagedAttention
from worker_service.runtime.kv_cache import CacheShape, KvCache

EDITED: dict[str, dict[str, Any]] = {
    "MadeUpForCausalLM": {"architectures": ["MadeUpForCausalLM"]},
    "model type 'made_up'": {"model_type": "made_up"},
    "that class": {"architectures": ["OPTForCausalLM"]},
    "does not take its config.json": {"n_head": 4, "activation_function": 5},
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.parametrize("model_type", SERVED)
def test_greedy_tokens_equal_transformers(tmp_path: Path, model_type: str) -> None:
    make_tiny_other(tmp_path, model_type, SERVED[model_type])
    prompts = mixed_prompts(VOCAB_SIZE)
    model = load_tiny(tmp_path)
    assert isinstance(model, TransformersModel)
    outputs = run_mixture(*make_runner(model), prompts)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    for prompt, output in zip([*prompts, prompts[-1]], outputs, strict=True):
        assert output == greedy_tokens(theirs, prompt, output)


@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "granite", "cohere", "opt", "glm"])
def test_bfloat16_errs_as_little_as_transformers(tmp_path: Path, model_type: str) -> None:
    make_tiny_other(tmp_path, model_type, SERVED[model_type])
    tokens = torch.tensor(mixed_prompts(VOCAB_SIZE)[3])
    exact, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")(tokens[None]).logits[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = load_tiny(tmp_path, torch.bfloat16)
    with torch.inference_mode():
        attention = one_sequence_attention(model, len(tokens), torch.bfloat16)
        ours = model.logits(model.forward(tokens, torch.arange(len(tokens)), attention))
    assert (ours.float() - exact).norm() <= 1.1 * (theirs.float() - exact).norm()


def one_sequence_attention(model: Model, count: int, dtype: torch.dtype) -> PagedAttention:
    shape = CacheShape(len(model.layers), model.num_kv_heads, model.config.head_dim, dtype)
    cache, cpu = KvCache(shape, 16, 4, torch.device("cpu")), torch.device("cpu")
    planner = AttentionPlanner(cache, cpu, model.windows, model.scores)
    slots = np.arange(count)
    return PagedAttention(cache, planner, planner.plan(slots, np.array([count]), np.array([0]), np.arange(16)[None]))


def test_what_layers_ask_of_attention_is_taken_over(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_other(tmp_path / "c", "cohere2", SERVED["cohere2"]))
    assert model.windows == [8, 8, 8, None]
    model = load_tiny(make_tiny_other(tmp_path / "g", "granite", SERVED["granite"]))
    assert [scores.scale for scores in model.scores] == [0.3, 0.3]
    assert (model.num_kv_heads, model.config.head_dim, len(model.layers)) == (2, 8, 2)
    model = load_tiny(make_tiny_other(tmp_path / "b", "gpt_bigcode", SERVED["gpt_bigcode"]))
    assert model.num_kv_heads == 1


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_definition_that_cannot_be_served_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    overrides, reason = REFUSED[model_type]
    make_tiny_other(tmp_path, model_type, overrides)
    with pytest.raises(CheckpointError, match=reason) as refused:
        load_tiny(tmp_path)
    assert refused.value.code == "unsupported"
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in refused.value.message


@pytest.mark.parametrize("reason", EDITED)
def test_a_class_that_transformers_does_not_know_is_refused(tmp_path: Path, reason: str) -> None:
    make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"])
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **EDITED[reason]}))
    with pytest.raises(CheckpointError, match=reason) as refused:
        load_tiny(tmp_path)
    assert refused.value.code == "unsupported"


def test_sizes_that_transformers_reads_otherwise_are_refused(tmp_path: Path) -> None:
    make_tiny_other(tmp_path, "gpt_neox", SERVED["gpt_neox"])
    content = json.loads((tmp_path / "config.json").read_text())
    content["n_layers"] = content.pop("num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="its num_hidden_layers is 44, and its config"):
        load_tiny(tmp_path)


def test_code_that_comes_with_a_checkpoint_is_never_looked_at(tmp_path: Path) -> None:
    make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"])
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "_attn_implementation": "evil"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')")
    assert load_tiny(tmp_path).num_kv_heads == 4


def test_tensors_that_do_not_fit_the_definition_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"]))
    assert checkpoint.config.other is not None
    model = build_model(checkpoint.config, RankPlace(), None)
    tensors = {name: torch.zeros(shape) for name, shape in checkpoint.config.other.tensors.items()}
    del tensors["transformer.h.1.attn.c_attn.bias"]
    with pytest.raises(CheckpointError, match=r"1 missing keys: transformer\.h\.1\.attn\.c_attn\.bias"):
        model.place_weights(tensors)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_want_of_memory_is_no_fault_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: object) -> None:
        raise error

    make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"])
    monkeypatch.setattr(TransformersModel, "_load", load)
    with pytest.raises(type(error)) as raised:
        load_tiny(tmp_path)
    assert raised.value is error


def test_it_counts_its_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"], "bfloat16"))
    assert checkpoint.config.other is not None
    with pytest.raises(ValueError, match="no plan that splits"):
        build_model(checkpoint.config, RankPlace(0, 2), None)
    model = build_model(checkpoint.config, RankPlace(), None)
    tensors = {name: torch.rand(shape).bfloat16() for name, shape in checkpoint.config.other.tensors.items()}
    expected = sum(tensor.nbytes for tensor in tensors.values())
    assert expected <= model.place_weights(tensors) <= 1.1 * expected
    assert not tensors
    with pytest.raises(ValueError, match="one of our own"):
        TransformersModel(replace(open_checkpoint(make_tiny_llama(tmp_path / "own")).config), RankPlace(), None)


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_checkpoint(make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"])).config
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "worker_service.models.transformers_path")
    with pytest.raises(CheckpointError) as refused:
        build_model(config, RankPlace(), None)
    assert refused.value.code == "unsupported"
    assert "stepwire[transformers]" in refused.value.remedy
