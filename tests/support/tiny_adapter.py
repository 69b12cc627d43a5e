"""Tiny random LoRA adapters as PEFT saves them. Needs neither PEFT nor torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.config import ModelConfig
from loader.layout import expected_tensors
from tests.support.tiny_checkpoint import write_safetensors

PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens"
ADAPTER_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "lora_alpha": 8,
    "r": 4,
    "target_modules": ["q_proj", "down_proj"],
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "loftq_config": {},
    "peft_version": "0.21.2",
}


def layer_modules(base: ModelConfig, *kinds: str) -> list[str]:
    """The modules of all layers that end in one of `kinds`, such as "q_proj"."""
    names = (name.removesuffix(".weight") for name in expected_tensors(base))
    return [name for name in names if name.endswith(kinds)]


def adapter_tensors(base: ModelConfig, ranks: Mapping[str, int], *, seed: int = 1) -> dict[str, NDArray[np.float32]]:
    """Random factors of each rank for the modules, under the names that PEFT gives them."""
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(base)
    tensors = {}
    for module, rank in ranks.items():
        weight = f"{EMBEDDING}.weight" if module == "lm_head" and base.tie_word_embeddings else f"{module}.weight"
        outputs, inputs = shapes[weight]
        a, b = "lora_A.weight", "lora_B.weight"
        if module == EMBEDDING:
            a, b = "lora_embedding_A", "lora_embedding_B"
            outputs, inputs = inputs, outputs
        tensors[f"{PREFIX}{module}.{a}"] = rng.standard_normal((rank, inputs)).astype(np.float32)
        tensors[f"{PREFIX}{module}.{b}"] = 0.1 * rng.standard_normal((outputs, rank)).astype(np.float32)
    return tensors


def write_adapter(
    folder: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: str = "float32", **changes: Any
) -> Path:
    """Writes an adapter of `tensors`; `changes` are laid over its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **changes}))
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype=dtype)
    return folder


def make_tiny_adapter(
    folder: Path, base: ModelConfig, *, dtype: str = "float32", seed: int = 1, rank: int = 4, **changes: Any
) -> Path:
    """Writes an adapter of the query and down projections of all layers."""
    ranks = dict.fromkeys(layer_modules(base, "q_proj", "down_proj"), rank)
    return write_adapter(folder, adapter_tensors(base, ranks, seed=seed), dtype=dtype, **{"r": rank, **changes})
