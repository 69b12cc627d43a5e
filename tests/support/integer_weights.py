"""Random quantised weights in both forms of `loader.quantised.packed`, with every option."""

from dataclasses import replace

import torch

from loader.quantised.activations import Activation
from loader.quantised.bits import pack_rows
from loader.quantised.blocks import pack_blocks
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.quantised.schemes import BLOCK_FORMS, BlockScheme
from loader.shares import Share, whole_share
from tests.support.gguf_blocks import block_bytes, random_blocks

OUT, IN = 70, 96


def grouped(
    bits: int = 4,
    group_size: int = 32,
    *,
    zeros: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
    num_inputs: int = IN,
    num_outputs: int = OUT,
    seed: int = 0,
) -> GroupedInts:
    """Integers in groups; with `ordered` the inputs of a group are those that a permutation names."""
    draws = torch.Generator().manual_seed(seed)
    groups, high = -(-num_inputs // group_size), 1 << bits
    values = torch.randint(0, high, (num_outputs, num_inputs), generator=draws, dtype=torch.uint8)
    group_of = None
    if ordered:
        # The same for all weights of one input, as GPTQ makes it.
        shuffled = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(9))
        group_of = (shuffled // group_size).int()
    return GroupedInts(
        words=pack_rows(values, bits),
        scales=(torch.rand(num_outputs, groups, generator=draws) / high + 1e-3).to(dtype),
        zeros=torch.randint(0, high, (num_outputs, groups), generator=draws, dtype=torch.uint8) if zeros else None,
        group_of=group_of,
        bits=bits,
        num_inputs=num_inputs,
        group_size=group_size,
    )


def grid(
    block_rows: int = 1,
    block_columns: int = IN,
    *,
    activation: Activation | None = None,
    num_inputs: int = IN,
    num_outputs: int = OUT,
    seed: int = 0,
) -> ScaledGrid:
    """int8 on a grid of scales."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (num_outputs, num_inputs), generator=draws, dtype=torch.int8)
    shape = (-(-num_outputs // block_rows), -(-num_inputs // block_columns))
    scales = torch.rand(shape, generator=draws) / 200 + 1e-3
    return ScaledGrid(values, scales, None, block_rows, block_columns, activation=activation)


def blocks(
    name: str, *, num_inputs: int = 256, share: Share | None = None, num_outputs: int = OUT, seed: int = 0
) -> GroupedInts:
    """A weight in blocks of a GGUF type, or the columns of it that are a share."""
    scheme, inputs = BlockScheme(name), share or whole_share(num_inputs)
    stored = torch.from_numpy(random_blocks(name, num_outputs * inputs.size // scheme.block_size, seed=seed, size=0.02))
    wide = scheme.whole_blocks(inputs)
    by_row = stored.view(num_outputs, -1)
    first, last = (place // scheme.block_size * block_bytes(name) for place in (wide.start, wide.stop))
    return pack_blocks(by_row[:, first:last].contiguous(), scheme, inputs)


WEIGHTS: dict[str, Packed] = {
    "int4": grouped(),
    "int4_zeros": grouped(zeros=True),
    "int4_bf16": grouped(zeros=True, dtype=torch.bfloat16),
    "int4_f32": grouped(dtype=torch.float32),
    "int4_one_group": grouped(group_size=IN),
    "int4_last_group_short": grouped(group_size=64),
    "int4_small_groups": grouped(group_size=16, zeros=True),
    "int4_groups_of_any_size": grouped(group_size=24),
    "int4_ordered": grouped(ordered=True, zeros=True),
    "int4_part_of_a_group": replace(grouped(group_size=32, num_inputs=80), first=8),
    "int2": grouped(2, zeros=True),
    "int3": grouped(3, num_inputs=IN),
    "int8_zeros": grouped(8, zeros=True),
    "int8_groups": grouped(8, 32),
    "int8_ordered": grouped(8, ordered=True),
    "rows": grid(),
    "tensor": grid(OUT, IN),
    "blocks": grid(16, 32),
    "blocks_of_any_size": grid(7, 24),
    "odd_depth": grid(num_inputs=80, block_columns=80),
    **{name: blocks(name) for name in BLOCK_FORMS},
    "Q4_1_part": blocks("Q4_1", share=Share(256, 40, 200)),
    "Q4_K_part": blocks("Q4_K", share=Share(512, 128, 448)),
    "Q6_K_part_of_a_group": blocks("Q6_K", share=Share(512, 24, 300)),
}
"""Those whose products round no inputs, [70, 96] or fewer inputs."""
