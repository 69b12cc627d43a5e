"""Rounding while weights are read: each value is as near as its scale allows, whatever the shape."""

from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import parameters
from loader.needs import rank_needs
from loader.quantised.load import load_rank
from loader.quantised.packed import GroupedInts, ScaledGrid, take_packed
from loader.quantised.rounding import rounded_weight
from loader.quantised.roundings import ROUNDINGS, Rounding, rounding_of
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_quantised_models import gptq, make_tiny_quantised

SHAPES = [(5, 32), (3, 7), (64, 100), (1, 1), (4100, 300)]


def draw(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) * 10
    weight[0] = 0
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_within_half_a_step_of_each_row(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    packed = rounded_weight(weight, "int8")
    assert isinstance(packed, ScaledGrid)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((packed.dequantise() - weight).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_within_half_a_step_of_each_value(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    packed = rounded_weight(weight, "fp8")
    assert isinstance(packed, ScaledGrid)
    # 3 bits of mantissa, and a smallest step of 2^-9 of what 448 stands for.
    largest = weight.abs().amax(dim=1, keepdim=True)
    bound = torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10)
    assert ((packed.dequantise() - weight).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_within_a_step_of_each_group(shape: tuple[int, int]) -> None:
    rows, columns = shape
    weight = draw(rows, columns)
    packed = rounded_weight(weight, "int4")
    assert isinstance(packed, GroupedInts)
    error = (packed.dequantise() - weight).abs()
    for start in range(0, columns, 32):
        group = weight[:, start : start + 32]
        low, high = group.amin(dim=1).clamp(max=0), group.amax(dim=1).clamp(min=0)
        # Half a step for the value and half for the zero point; the scale itself has 8 bits.
        bound = (high - low) / 15 * (1 + 2**-8 * 15)
        assert (error[:, start : start + 32] <= bound[:, None] * 1.01 + 1e-9).all()
    assert (packed.dequantise()[0] == 0).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("place", [RankPlace(), RankPlace(1, 2)])
def test_a_rank_rounds_its_projections_and_nothing_else(tmp_path: Path, rounding: Rounding, place: RankPlace) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))

    def load(chosen: Rounding | None) -> dict[str, torch.Tensor]:
        return load_rank(
            checkpoint,
            place,
            dtype=torch.float32,
            rounding=chosen,
            progress=lambda _: None,
            cancelled=lambda: False,
        )

    plain, tensors = load(None), load(rounding)
    told = rank_needs(checkpoint, place, "float32", rounding=rounding)
    assert told.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for part in parameters(checkpoint.config, place):
        packed = take_packed(part.name, tensors)
        weight = plain[f"{part.name}.weight"]
        chosen = rounding_of(part, rounding, is_tied=checkpoint.config.tie_word_embeddings)
        if chosen is not None:
            assert packed is not None
            assert torch.equal(packed.dequantise(), rounded_weight(weight, chosen).dequantise())
        else:
            assert packed is None
            assert torch.equal(tensors.pop(f"{part.name}.weight"), weight)
    assert not tensors


def test_four_bits_take_a_third_of_sixteen(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, hidden_size=256, intermediate_size=512))
    tensors = load_rank(
        checkpoint,
        RankPlace(),
        dtype=torch.bfloat16,
        rounding="int4",
        progress=lambda _: None,
        cancelled=lambda: False,
    )
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj." in name)
    whole = sum(2 * info.num_bytes // 4 for name, info in checkpoint.tensors.items() if "_proj." in name)
    assert taken / whole <= 0.35


def test_what_is_quantised_already_is_not_rounded_again(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_quantised(tmp_path, gptq()))
    with pytest.raises(CheckpointError) as caught:
        load_rank(
            checkpoint,
            RankPlace(),
            dtype=torch.float32,
            rounding="int8",
            progress=lambda _: None,
            cancelled=lambda: False,
        )
    assert (caught.value.code, caught.value.found) == ("unsupported", "gptq")
