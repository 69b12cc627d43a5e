"""Quantised checkpoints generate what the unquantised ones generate that they stand for."""

from pathlib import Path

import pytest

from tests.support.tiny_quantised_models import (
    Format,
    awq,
    float_quantized,
    fp8_blocks,
    gptq,
    int8,
    make_tiny_quantised,
    pack_quantized,
)
from tests.support.tiny_runner import Driver, load_tiny, make_runner, one_thread

PROMPTS = ([5, 9, 200, 31], [7] * 11, [300, 4, 18, 77, 120, 66])

# The formats that say nothing of inputs: their products are those of the weights.
WEIGHT_ONLY = {
    "gptq": gptq(),
    "gptq_2_bit": gptq(2),
    "gptq_3_bit": gptq(3),
    "gptq_8_bit": gptq(8),
    "gptq_asymmetric": gptq(symmetric=False),
    "gptq_v2": gptq(version=2, symmetric=False),
    "gptq_ordered": gptq(act_order=True),
    "gptq_one_group": gptq(group_size=-1),
    "awq": awq(),
    "packed": pack_quantized(),
    "packed_8_bit": pack_quantized(8, -1),
    "packed_asymmetric": pack_quantized(symmetric=False),
    "packed_ordered": pack_quantized(act_order=True),
    "int8_weights": int8(),
    "fp8_weights": float_quantized(),
    "fp8_weights_in_blocks": float_quantized("block"),
}


def greedy(folder: Path) -> list[list[int]]:
    with one_thread():
        runner, cache = make_runner(load_tiny(folder))
        driver = Driver(runner, cache)
        driven = [driver.add(number, prompt) for number, prompt in enumerate(PROMPTS, 1)]
        driver.run(12)
    return [sequence.output for sequence in driven]


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_generates_what_the_unquantised_model_does(tmp_path: Path, name: str) -> None:
    dense = tmp_path / "dense"
    folder = make_tiny_quantised(tmp_path / "quantised", WEIGHT_ONLY[name], dense=dense)
    tokens = greedy(folder)
    assert tokens == greedy(dense)
    assert len({token for output in tokens for token in output}) > 3


def test_fp8_blocks_load(tmp_path: Path) -> None:
    form: Format = fp8_blocks()
    assert greedy(make_tiny_quantised(tmp_path, form))
