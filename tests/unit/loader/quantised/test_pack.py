"""Packed weights against what the formats' definitions say they stand for, whole and cut for ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from loader.errors import CheckpointError
from loader.quantised.activations import Activation
from loader.quantised.pack import StoredWeight, pack
from loader.quantised.packed import Packed, ScaledGrid, flatten, take_packed
from loader.quantised.schemes import AwqScheme, GptqScheme, GridScheme, PackScheme, Scheme
from loader.shares import Share, whole_share
from loader.tensors import WeightSlice
from tests.support.tiny_quantised import (
    QuantisedWeight,
    Shape,
    Tensor,
    awq_weight,
    gptq_weight,
    grid_weight,
    packed_weight,
)

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}
GROUP_SIZES = (32, 64, 128, -1, 48)


def as_torch(tensor: Tensor) -> torch.Tensor:
    if tensor.dtype == "F8_E4M3":
        return torch.from_numpy(tensor.array.astype(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(tensor.array)).to(TORCH_DTYPES[tensor.dtype])


def cut(weight: QuantisedWeight, want: WeightSlice) -> torch.Tensor:
    """A wanted part, taken from the whole tensor by the definition of a slice."""
    stored = weight.tensors[want.name.removeprefix("w.")]
    assert tuple(stored.array.shape) == want.shape, want
    assert stored.dtype in want.dtypes
    assert want.as_stored
    whole = as_torch(stored)
    return whole if want.dim is None else whole.narrow(want.dim, want.start, want.stop - want.start).clone()


def packed_share(weight: QuantisedWeight, scheme: Scheme, outputs: Share, inputs: Share) -> Packed:
    tensors = {want.name.removeprefix("w."): cut(weight, want) for want in scheme.parts("w", outputs, inputs)}
    packed = pack(StoredWeight("w", outputs, inputs, tensors, Path("file")), scheme)
    assert packed.shape == (len(outputs), len(inputs))
    kept = flatten("w", packed)
    again = take_packed("w", kept)
    assert not kept
    assert again is not None
    return again


def num_bytes(packed: Packed) -> int:
    return sum(tensor.nbytes for tensor in flatten("w", packed).values())


def check(weight: QuantisedWeight, scheme: Scheme, ranks: tuple[int, ...] = (1, 2, 4), *, exact: bool = True) -> None:
    """The whole weight, and each share of it by rows and by columns, is what it stands for, to the last bit.

    Its bytes are those that the scheme tells ahead, or fewer where the content shows what the config did not say.
    """
    rows, columns = weight.dense.shape
    told = scheme.resident_bytes(whole_share(rows), whole_share(columns))
    taken = num_bytes(packed_share(weight, scheme, whole_share(rows), whole_share(columns)))
    assert taken == told if exact else taken < told
    for size in ranks:
        for rank in range(size):
            outputs = Share(rows, rows * rank // size, rows * (rank + 1) // size)
            inputs = Share(columns, columns * rank // size, columns * (rank + 1) // size)
            by_rows = packed_share(weight, scheme, outputs, whole_share(columns)).dequantise()
            np.testing.assert_array_equal(by_rows.numpy(), weight.dense[outputs.start : outputs.stop])
            by_columns = packed_share(weight, scheme, whole_share(rows), inputs).dequantise()
            np.testing.assert_array_equal(by_columns.numpy(), weight.dense[:, inputs.start : inputs.stop])


def gptq_scheme(shape: Shape, version: int = 1, *, has_g_idx: bool = True) -> GptqScheme:
    group_size = max(shape.group_size, 0)
    return GptqScheme(shape.bits, group_size, shape.symmetric, shape.act_order, 2 - version, has_g_idx)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(bits: int, group_size: int, symmetric: bool, version: int) -> None:
    shape = Shape(32, 224, bits, group_size, symmetric)
    weight = gptq_weight(np.random.default_rng(bits), shape, version=version)
    check(weight, gptq_scheme(shape, version))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 48])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_in_an_order_of_its_own(bits: int, group_size: int, symmetric: bool) -> None:
    """vllm #7374: with an order, a share of the inputs needs the scales of all groups."""
    shape = Shape(32, 160, bits, group_size, symmetric, act_order=True)
    check(gptq_weight(np.random.default_rng(bits), shape), gptq_scheme(shape))


def test_gptq_without_an_index_or_with_a_trivial_one() -> None:
    shape = Shape(16, 128)
    weight = gptq_weight(np.random.default_rng(0), shape, has_g_idx=False)
    check(weight, gptq_scheme(shape, has_g_idx=False))
    # An old way to say that there is no order; one config says that there is one all the same.
    weight.tensors["g_idx"] = Tensor("I32", np.zeros(128))
    ordered = GptqScheme(4, 32, True, True, 1)
    check(weight, ordered, exact=False)
    check(weight, gptq_scheme(shape))


@pytest.mark.parametrize(("stored", "claimed"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_whose_config_names_the_other_version(stored: int, claimed: int, bits: int) -> None:
    """vllm PR #38966: symmetric weights tell by their zero points which version they are stored in."""
    shape = Shape(32, 64, bits)
    check(gptq_weight(np.random.default_rng(1), shape, version=stored), gptq_scheme(shape, claimed), (1, 2))


def test_symmetric_gptq_whose_zero_points_are_not_is_read_as_its_config_says() -> None:
    shape = Shape(32, 64, symmetric=False)
    weight = gptq_weight(np.random.default_rng(1), shape, version=2)
    packed = packed_share(weight, GptqScheme(4, 32, True, False, 0), whole_share(32), whole_share(64))
    np.testing.assert_array_equal(packed.dequantise().numpy(), weight.dense)


def test_gptq_zero_points_wrap() -> None:
    """A zero point of 0 is stored as the highest value by the first version."""
    shape = Shape(8, 32, symmetric=False)
    weight = gptq_weight(np.random.default_rng(1), shape)
    weight.tensors["qzeros"] = Tensor("I32", np.full((1, 1), -1))
    packed = packed_share(weight, gptq_scheme(shape), whole_share(8), whole_share(32))
    assert packed.dequantise().min() >= 0


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 192), (8, 57), (296, 20)])
def test_awq(group_size: int, rows: int, columns: int) -> None:
    shape = Shape(rows, columns, 4, group_size, symmetric=False)
    check(awq_weight(np.random.default_rng(rows), shape), AwqScheme(max(group_size, 0)))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(12, 192), (7, 75)])
def test_packed(bits: int, group_size: int, symmetric: bool, rows: int, columns: int) -> None:
    shape = Shape(rows, columns, bits, group_size, symmetric)
    scheme = PackScheme(bits, max(group_size, 0), symmetric, act_order=False)
    check(packed_weight(np.random.default_rng(bits), shape), scheme)


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_in_an_order_of_its_own(symmetric: bool) -> None:
    shape = Shape(12, 100, 4, 32, symmetric, act_order=True)
    check(packed_weight(np.random.default_rng(5), shape), PackScheme(4, 32, symmetric, act_order=True))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_packed_with_one_scale(rank: int) -> None:
    weight = packed_weight(np.random.default_rng(5), Shape(1, 40, 8, -1))
    scale = weight.tensors["weight_scale"].array.reshape((1,) * rank)
    stored = {**weight.tensors, "weight_scale": Tensor("F16", scale)}
    check(QuantisedWeight(stored, weight.dense), PackScheme(8, 0, True, act_order=False, scale_rank=rank), (1,))


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 24), (16, 16), (8, 24)])
@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (37, 50)])
def test_grids(dtype: str, block: tuple[int, int], rows: int, columns: int) -> None:
    """sglang #3345, vllm #52997: a share that ends inside a block takes that block's scale."""
    shape = Shape(rows, columns, scale_dtype="F32")
    check(grid_weight(np.random.default_rng(rows), shape, dtype=dtype, block=block), GridScheme(dtype, *block))


@pytest.mark.parametrize(("block", "scale_shape"), [((0, 0), ()), ((0, 0), (1,)), ((1, 0), (40,)), ((1, 0), (40, 1))])
def test_scales_are_stored_in_several_shapes(block: tuple[int, int], scale_shape: tuple[int, ...]) -> None:
    shape = Shape(40, 24, scale_dtype="F16")
    weight = grid_weight(np.random.default_rng(3), shape, dtype="F8_E4M3", block=block, scale_shape=scale_shape)
    check(weight, GridScheme("F8_E4M3", *block, scale_rank=len(scale_shape), scale_bytes=2))


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (16, 16)])
def test_a_share_knows_where_groups_of_inputs_begin(block: tuple[int, int]) -> None:
    weight = grid_weight(np.random.default_rng(3), Shape(32, 96, scale_dtype="F32"), dtype="F8_E4M3", block=block)
    scheme = GridScheme("F8_E4M3", *block, Activation("fp8", group_size=16))
    packed = packed_share(weight, scheme, whole_share(32), Share(96, 40, 80))
    assert isinstance(packed, ScaledGrid)
    assert packed.first_column % 16 == 8
    assert packed.activation == scheme.activation


def test_a_static_scale_comes_with_the_weight() -> None:
    weight = grid_weight(np.random.default_rng(3), Shape(8, 8, scale_dtype="F32"), dtype="I8", block=(1, 0))
    weight.tensors["input_scale"] = Tensor("F32", np.array([0.25]))
    scheme = GridScheme("I8", 1, 0, Activation("int8", is_static=True), input_scale_rank=1)
    packed = packed_share(weight, scheme, whole_share(8), whole_share(8))
    assert isinstance(packed, ScaledGrid)
    assert packed.input_scale is not None
    assert (packed.input_scale.item(), packed.input_scale.shape) == (0.25, ())
    weight.tensors["input_scale"] = Tensor("F32", np.array([0.0]))
    assert refused(weight, scheme).tensor == "w.input_scale"


def refused(weight: QuantisedWeight, scheme: Scheme, *, inputs: Share | None = None) -> CheckpointError:
    rows, columns = weight.dense.shape
    with pytest.raises(CheckpointError) as caught:
        packed_share(weight, scheme, whole_share(rows), inputs or whole_share(columns))
    return caught.value


def test_refuses_a_scale_that_is_no_number() -> None:
    """Such as one that nobody wrote: vllm PR #57108."""
    weight = gptq_weight(np.random.default_rng(1), Shape(8, 64))
    weight.tensors["scales"].array[1, 3] = np.nan
    assert refused(weight, gptq_scheme(Shape(8, 64))).tensor == "w.scales"
    grid = grid_weight(np.random.default_rng(1), Shape(8, 64, scale_dtype="F32"), dtype="I8", block=(1, 0))
    grid.tensors["weight_scale"].array[2] = np.inf
    assert refused(grid, GridScheme("I8", 1, 0)).tensor == "w.weight_scale"


@pytest.mark.parametrize("group", [-1, 2])
def test_refuses_an_index_outside_the_groups(group: int) -> None:
    weight = gptq_weight(np.random.default_rng(1), Shape(8, 64, act_order=True))
    weight.tensors["g_idx"].array[7] = group
    assert refused(weight, gptq_scheme(Shape(8, 64, act_order=True))).tensor == "w.g_idx"


def test_refuses_a_share_of_an_order_that_the_config_denies() -> None:
    weight = gptq_weight(np.random.default_rng(1), Shape(8, 64, act_order=True))
    scheme = gptq_scheme(Shape(8, 64))
    packed = packed_share(weight, scheme, whole_share(8), whole_share(64))
    np.testing.assert_array_equal(packed.dequantise().numpy(), weight.dense)
    error = refused(weight, scheme, inputs=Share(64, 0, 32))
    assert "desc_act" in error.remedy


def test_refuses_another_shape_than_is_stated() -> None:
    weight = packed_weight(np.random.default_rng(1), Shape(8, 64))
    weight.tensors["weight_shape"] = Tensor("I64", np.array([8, 63]))
    assert refused(weight, PackScheme(4, 32, True, act_order=False)).tensor == "w.weight_shape"
