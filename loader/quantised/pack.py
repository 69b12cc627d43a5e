"""From the tensors that a checkpoint stores for a quantised weight to the form in which it is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor

from loader.errors import CheckpointError
from loader.quantised.bits import pack_rows, row_bytes, rows_of_words, values_of_words
from loader.quantised.blocks import pack_blocks
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.quantised.schemes import (
    AwqScheme,
    BlockScheme,
    GptqScheme,
    GridScheme,
    PackScheme,
    Scheme,
    unit_of,
)
from loader.shares import Share

_log = structlog.stdlib.get_logger(__name__)
# Which nibble of a word holds each of its eight columns.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# Words of AWQ that are taken apart at once, so that little is unpacked at any time.
_TILE_WORDS = 32


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The stored tensors of one weight, or a rank's parts of them, by the last part of their names.

    `outputs` and `inputs` tell which rows and columns of the weight they stand for; `file` is for errors.
    """

    name: str
    outputs: Share
    inputs: Share
    tensors: Mapping[str, Tensor]
    file: Path

    def error(self, part: str, what: str, remedy: str = "download the checkpoint again") -> CheckpointError:
        """An error about one of the tensors."""
        tensor = f"{self.name}.{part}"
        return CheckpointError("invalid", f"{self.file}: tensor {tensor!r} {what}", remedy, self.file, tensor)


def pack(stored: StoredWeight, scheme: Scheme) -> Packed:
    """The weight, kept quantised.

    Raises CheckpointError "invalid" for scales that are not finite, for an index outside the groups, and for contents
    that contradict the config in a way that leaves open what is meant.
    """
    if isinstance(scheme, GridScheme):
        return _pack_grid(stored, scheme)
    if isinstance(scheme, AwqScheme):
        return _pack_awq(stored, scheme)
    if isinstance(scheme, PackScheme):
        return _pack_packed(stored, scheme)
    if isinstance(scheme, BlockScheme):
        return _pack_blocks(stored, scheme)
    return _pack_gptq(stored, scheme)


def _pack_gptq(stored: StoredWeight, scheme: GptqScheme) -> GroupedInts:
    outputs, inputs, unit = stored.outputs, stored.inputs, unit_of(scheme.bits)
    words = stored.tensors["qweight"].t().contiguous()
    zeros = values_of_words(stored.tensors["qzeros"], scheme.bits, outputs.start % unit, len(outputs))
    return _grouped(
        stored,
        scheme,
        words=rows_of_words(words, scheme.bits, inputs.start % unit, len(inputs)),
        scales=stored.tensors["scales"].t(),
        zeros=_gptq_zeros(stored, scheme, zeros),
        g_idx="g_idx",
    )


def _gptq_zeros(stored: StoredWeight, scheme: GptqScheme, zeros: Tensor) -> Tensor | None:
    """The zero points [out, groups] that the stored ones [groups, out] stand for; None where all are the middle.

    Symmetric weights tell by their content how zero points are stored, which is to be trusted more than a config.
    """
    middle, highest = 1 << (scheme.bits - 1), (1 << scheme.bits) - 1
    offset = scheme.zero_offset
    if scheme.symmetric:
        for found in (0, 1):
            if bool((zeros == middle - found).all()):
                if found != offset:
                    _log.warning("gptq_version_by_content", tensor=f"{stored.name}.qzeros", version=2 - found)
                return None
    return ((zeros + offset) & highest).t().contiguous()


def _pack_awq(stored: StoredWeight, scheme: AwqScheme) -> GroupedInts:
    outputs, inputs = stored.outputs, stored.inputs
    skip, qweight = outputs.start % 8, stored.tensors["qweight"]
    words = torch.empty((qweight.shape[1] * 8, row_bytes(len(inputs), 4)), dtype=torch.uint8, device=qweight.device)
    for start in range(0, qweight.shape[1], _TILE_WORDS):
        values = _awq_values(qweight[:, start : start + _TILE_WORDS])
        words[start * 8 : start * 8 + values.shape[1]] = pack_rows(values.t().contiguous(), 4)
    zeros = _awq_values(stored.tensors["qzeros"])[:, skip : skip + len(outputs)]
    return _grouped(
        stored,
        scheme,
        words=words[skip : skip + len(outputs)].contiguous(),
        scales=stored.tensors["scales"].t(),
        zeros=zeros.t().contiguous(),
    )


def _awq_values(words: Tensor) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, 8 · words], columns in their order."""
    nibbles = [((words >> (4 * nibble)) & 0xF).to(torch.uint8) for nibble in _AWQ_NIBBLES]
    return torch.stack(nibbles, dim=-1).view(words.shape[0], -1)


def _pack_packed(stored: StoredWeight, scheme: PackScheme) -> GroupedInts:
    outputs, inputs, unit = stored.outputs, stored.inputs, unit_of(scheme.bits)
    if scheme.has_shape:
        shape = stored.tensors["weight_shape"].tolist()
        if shape != [outputs.size, inputs.size]:
            raise stored.error("weight_shape", f"says {shape}, expected {[outputs.size, inputs.size]}")
    scales = stored.tensors["weight_scale"]
    if scheme.scale_rank is not None:
        scales = scales.reshape(1, 1).expand(len(outputs), 1)
    zeros = None
    if not scheme.symmetric:
        packed = stored.tensors["weight_zero_point"].t()
        zeros = values_of_words(packed, scheme.bits, outputs.start % unit, len(outputs)).t().contiguous()
    return _grouped(
        stored,
        scheme,
        words=rows_of_words(stored.tensors["weight_packed"], scheme.bits, inputs.start % unit, len(inputs)),
        scales=scales,
        zeros=zeros,
        g_idx="weight_g_idx",
    )


def _grouped(
    stored: StoredWeight,
    scheme: GptqScheme | AwqScheme | PackScheme,
    *,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: str = "",
) -> GroupedInts:
    """Settles which group each input belongs to. `scales` and `zeros` are [out, groups]."""
    _check_scales(stored, scales)
    inputs = stored.inputs
    group_size = scheme.group_size or inputs.size
    first = inputs.start // group_size
    group_of = stored.tensors.get(g_idx)
    if group_of is not None:
        group_of = _irregular(stored, scheme, g_idx, group_of)
    if group_of is None and scheme.act_order:
        # No order after all: of the scales of all groups this rank needs those of its own.
        last = (inputs.stop - 1) // group_size + 1
        scales = scales[:, first:last]
        zeros = None if zeros is None else zeros[:, first:last].contiguous()
    return GroupedInts(
        words=words,
        scales=scales.contiguous(),
        zeros=zeros,
        group_of=group_of,
        bits=scheme.bits,
        num_inputs=len(inputs),
        group_size=group_size,
        first=inputs.start - first * group_size,
    )


def _irregular(
    stored: StoredWeight, scheme: GptqScheme | AwqScheme | PackScheme, part: str, group_of: Tensor
) -> Tensor | None:
    """This share of `group_of` [all inputs] where that tells something: it does neither when all are zero, an old way
    to say so, nor when one group comes after the other."""
    inputs, group_size = stored.inputs, scheme.group_size or stored.inputs.size
    groups = -(-inputs.size // group_size)
    lowest, highest = int(group_of.min()), int(group_of.max())
    if lowest < 0 or highest >= groups:
        raise stored.error(part, f"names group {lowest if lowest < 0 else highest} of {groups}")
    regular = torch.arange(inputs.size, dtype=group_of.dtype, device=group_of.device) // group_size
    if highest == 0 or torch.equal(group_of, regular):
        return None
    if not scheme.act_order and not inputs.is_whole:
        raise stored.error(
            part, "orders the inputs, and the config says that nothing does", "set desc_act to true in the config"
        )
    return group_of[inputs.start : inputs.stop].clone()


def _pack_grid(stored: StoredWeight, scheme: GridScheme) -> ScaledGrid:
    scales = stored.tensors[scheme.scale_name]
    _check_scales(stored, scales, scheme.scale_name)
    rows = 1 if scheme.block_rows == 0 else scales.shape[0]
    input_scale = None
    if scheme.activation is not None and scheme.activation.is_static:
        input_scale = stored.tensors["input_scale"].float().reshape(())
        _check_scales(stored, input_scale, "input_scale")
        if float(input_scale) <= 0:
            raise stored.error("input_scale", f"is {float(input_scale):g}, and a scale must be above 0")
    return ScaledGrid(
        values=stored.tensors["weight"],
        scales=scales.reshape(rows, -1).contiguous(),
        input_scale=input_scale,
        block_rows=scheme.block_rows or stored.outputs.size,
        block_columns=scheme.block_columns or stored.inputs.size,
        first_row=stored.outputs.start % (scheme.block_rows or stored.outputs.size),
        # Also groups of inputs that are rounded together begin where those of the whole weight do.
        first_column=stored.inputs.start % (scheme.block_columns or stored.inputs.size),
        activation=scheme.activation,
    )


def _pack_blocks(stored: StoredWeight, scheme: BlockScheme) -> GroupedInts:
    packed = pack_blocks(stored.tensors["weight"], scheme, stored.inputs)
    for scales in (packed.scales, packed.minima):
        if scales is not None:
            _check_scales(stored, scales, "weight")
    return packed


def _check_scales(stored: StoredWeight, scales: Tensor, part: str = "") -> None:
    if not bool(torch.isfinite(scales.float()).all()):
        name = part or next(name for name in ("scales", "weight_scale") if name in stored.tensors)
        raise stored.error(name, "holds a scale that is no finite number")
