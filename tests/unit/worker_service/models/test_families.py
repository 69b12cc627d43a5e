"""Every family against transformers: what a checkpoint of it holds, and what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.families import FAMILIES
from loader.layout import expected_tensors
from tests.support.mixture import greedy_tokens, mixed_prompts, run_mixture
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf_families import FAMILY_CONFIGS, make_family_gguf
from tests.support.tiny_runner import load_tiny, make_runner

LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5] * 3, "long_factor": [2.0, 9.0] * 3}
WINDOWED, SLIDING = {"use_sliding_window": True, "sliding_window": 20}, "sliding_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    **{family: dict(overrides) for family, overrides in TINY_FAMILIES.items()},
    "mistral-window": {**TINY_FAMILIES["mistral"], "sliding_window": 8},
    "qwen2-window": {**TINY_FAMILIES["qwen2"], **WINDOWED, "max_window_layers": 1},
    "qwen3-window": {**TINY_FAMILIES["qwen3"], **WINDOWED, "layer_types": [SLIDING, "full_attention", SLIDING]},
    "gemma2-alone": {**TINY_FAMILIES["gemma2"], "final_logit_softcapping": None, "tie_word_embeddings": False},
    "phi3-longrope": {**TINY_FAMILIES["phi3"], "rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
    "phi3-window": {**TINY_FAMILIES["phi3"], "partial_rotary_factor": None, "sliding_window": 9},
    "mixtral-window": {**TINY_FAMILIES["mixtral"], "sliding_window": 9},
    "qwen3_moe-every-second": {
        **TINY_FAMILIES["qwen3_moe"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
    },
}


def test_every_family_is_tested() -> None:
    assert {family.name for family in FAMILIES.values()} == TINY_FAMILIES.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    make_tiny_llama(tmp_path, num_layers=3, config_overrides=CONFIGS[name])
    prompts = mixed_prompts(320)
    outputs = run_mixture(*make_runner(load_tiny(tmp_path)), prompts)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for prompt, output in zip([*prompts, prompts[-1]], outputs, strict=True):
        assert output == greedy_tokens(theirs, prompt, output)
    assert len({tuple(output) for output in outputs}) == len(prompts)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_a_gguf_says_the_same(tmp_path: Path, family: str) -> None:
    make_tiny_llama(tmp_path / "hf", head_dim=16, config_overrides=FAMILY_CONFIGS[family])
    make_family_gguf(tmp_path / "m.gguf", family)
    prompts = mixed_prompts(320, (3, 40))
    expected = run_mixture(*make_runner(load_tiny(tmp_path / "hf")), prompts)
    assert run_mixture(*make_runner(load_tiny(tmp_path / "m.gguf")), prompts) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_is_what_is_expected(tmp_path: Path, name: str) -> None:
    """Its config.json of today too, which names much that older ones leave unsaid, and differently."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_tiny_llama(old, num_layers=3, config_overrides=CONFIGS[name])
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(old), dtype=torch.float32)
    theirs.save_pretrained(new)
    checkpoint = open_checkpoint(new)
    assert checkpoint.config == open_checkpoint(old).config
    held = {tensor: info.shape for tensor, info in checkpoint.tensors.items()}
    assert held == expected_tensors(checkpoint.config)
    prompt = mixed_prompts(320)[3]
    outputs = run_mixture(*make_runner(load_tiny(new)), [prompt])
    assert outputs[0] == greedy_tokens(theirs, prompt, outputs[0])
