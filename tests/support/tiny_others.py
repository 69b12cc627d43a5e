"""Tiny random checkpoints of causal LMs that are none of our families, written by transformers itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.tiny_checkpoint import write_tiny_tokenizer

VOCAB_SIZE = 320
_TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_PLAIN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_SLIDING = {"sliding_window": 8}

SERVED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neox": _PLAIN,
    "starcoder2": {**_GROUPED, **_SLIDING},
    "granite": {**_GROUPED, "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "olmo": _GROUPED,
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "stablelm": _GROUPED,
    "cohere": _GROUPED,
    "cohere2": {**_GROUPED, **_SLIDING, "num_hidden_layers": 4},
    "phi": _PLAIN,
    "opt": {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "glm": {**_GROUPED, "head_dim": 8},
}
"""Model types whose definitions follow the attention interface."""

REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "falcon": (_PLAIN, "does not follow transformers' attention interface"),
    "gpt_neo": (
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "does not follow transformers' attention interface",
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "does not take the positions"),
    "gpt_oss": (
        {**_GROUPED, **_SLIDING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gives attention s_aux",
    ),
    "stablelm": (
        {**_GROUPED, "partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "depend on the batch",
    ),
}
"""Model types that are not served, and why."""


def make_tiny_other(folder: Path, model_type: str, overrides: Mapping[str, Any], dtype: str = "float32") -> Path:
    """Writes a checkpoint of `model_type` into `folder` and returns it. Equal arguments give equal weights."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**_TOKENS, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # As drawn for training, attention hardly matters yet, and nor do biases and norms.
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tiny_tokenizer(folder, VOCAB_SIZE)
    return folder
