"""Damaged settings of a quantisation, and damaged headers of its tensors, are refused or harmless."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.needs import rank_needs
from loader.quantised.load import load_rank
from loader.shares import RankPlace
from tests.support.mutations import damaged_bytes, damaged_json
from tests.support.tiny_quantised_models import (
    Format,
    awq,
    float_quantized,
    fp8_blocks,
    fp8_tensor,
    gptq,
    int8,
    make_tiny_quantised,
    pack_quantized,
)

NUM_CASES = 4000 if os.environ.get("STEPWIRE_TEST_FULL") else 120
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, Format] = {
    "gptq": gptq(act_order=True, symmetric=False),
    "awq": awq(),
    "packed": pack_quantized(symmetric=False),
    "w8a8": int8(BY_TOKEN),
    "fp8_blocks": fp8_blocks(),
    "fp8_static": fp8_tensor(input_scale=0.5),
    "fp8_channel": float_quantized(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    folder = make_tiny_quantised(tmp_path, form, num_layers=1, intermediate_size=64)
    config, weights = folder / "config.json", folder / "model.safetensors"
    whole, data = json.loads(config.read_text()), weights.read_bytes()
    settings = json.dumps(whole.pop("quantization_config")).encode()
    header_end = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(name)
    num_loaded = 0
    for case in range(NUM_CASES):
        damaged, file = settings, data
        if case % 3:
            damaged = damaged_json(rng, settings)
        else:
            file = damaged_bytes(rng, data[:header_end]) + data[header_end:]
        config.write_bytes(json.dumps(whole).encode()[:-1] + b', "quantization_config": ' + damaged + b"}")
        weights.write_bytes(file)
        num_loaded += _opens_and_loads(folder)
    assert 0 < num_loaded < NUM_CASES


def _opens_and_loads(folder: Path) -> bool:
    """Whether it loads; what it takes is what was told before, or less where contents show more than settings."""
    try:
        checkpoint = open_checkpoint(folder)
        for place in (RankPlace(), RankPlace(1, 2)):
            told = rank_needs(checkpoint, place, "float32").weight_bytes
            tensors = load_rank(
                checkpoint, place, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False
            )
            symmetric = "zeros" not in {part.rpartition(".")[2] for part in tensors}
            assert sum(tensor.nbytes for tensor in tensors.values()) <= told or not symmetric
    except CheckpointError as error:
        assert error.remedy
        return False
    return True
