"""Blocks of a GGUF that stay packed against the reference implementation's values."""

import gguf
import pytest
import torch

from loader.quantised.blocks import pack_blocks
from loader.quantised.schemes import BLOCK_FORMS, FORM_BYTES, BlockScheme
from loader.shares import Share, whole_share
from tests.support.gguf_blocks import block_bytes, random_blocks

ROWS, COLUMNS = 5, 512


@pytest.mark.parametrize("share", [(0, 512), (256, 512), (32, 352), (24, 300)])
@pytest.mark.parametrize("name", BLOCK_FORMS)
def test_they_stand_for_the_same_values(name: str, share: tuple[int, int]) -> None:
    scheme, inputs = BlockScheme(name), Share(COLUMNS, *share)
    blocks = random_blocks(name, ROWS * COLUMNS // scheme.block_size)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    expected = torch.from_numpy(values.copy()).view(ROWS, -1)
    wide = scheme.whole_blocks(inputs)
    assert wide.start <= inputs.start and inputs.stop <= wide.stop and len(wide) % scheme.block_size == 0
    first, last = (place // scheme.block_size * block_bytes(name) for place in (wide.start, wide.stop))
    stored = torch.from_numpy(blocks).view(ROWS, -1)[:, first:last].contiguous()
    packed = pack_blocks(stored, scheme, inputs)
    whole = packed.dequantise()
    assert torch.equal(whole, expected[:, slice(*share)].float())
    assert torch.equal(packed.dequantise(1, 3), whole[1:3])
    assert torch.equal(packed.rows(torch.tensor([4, 0, 4])), whole[[4, 0, 4]])
    kept = (packed.words, packed.scales, packed.minima, packed.factors, packed.minimum_factors)
    num_bytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
    assert scheme.resident_bytes(whole_share(ROWS), inputs) == num_bytes + FORM_BYTES


def test_many_rows_are_taken_apart_some_at_a_time() -> None:
    scheme, inputs = BlockScheme("Q4_K"), whole_share(256)
    blocks = torch.from_numpy(random_blocks("Q4_K", 9000))
    packed = pack_blocks(blocks, scheme, inputs)
    for first in (0, 4095, 8990):
        alone = pack_blocks(blocks[first : first + 10], scheme, inputs)
        assert torch.equal(packed.dequantise(first, first + 10), alone.dequantise())
