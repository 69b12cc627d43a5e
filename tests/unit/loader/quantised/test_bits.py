"""Values of few bits in bytes, against Python's integers."""

import pytest
import torch

from loader.quantised.bits import pack_rows, row_bytes, rows_of_words, unpack_rows, values_of_words
from tests.support.tiny_quantised import words_of


def draw(bits: int, count: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(count)).to(torch.uint8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
def test_rows_are_streams_of_bits(bits: int, count: int) -> None:
    values = draw(bits, count)
    packed = pack_rows(values, bits)
    assert packed.shape == (3, row_bytes(count, bits))
    for row, data in zip(values.tolist(), packed.tolist(), strict=True):
        number = sum(value << (bits * i) for i, value in enumerate(row))
        assert bytes(data) == number.to_bytes(row_bytes(count, bits), "little")
    assert torch.equal(unpack_rows(packed, bits, count), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("skip", [0, 1, 5, 31])
def test_words_hold_the_same_bits(bits: int, skip: int) -> None:
    values = draw(bits, 64)
    words = torch.tensor([words_of(row, bits) for row in values.tolist()], dtype=torch.int32)
    assert torch.equal(values_of_words(words, bits, skip, 20), values[:, skip : skip + 20])
    packed = rows_of_words(words, bits, skip, 20)
    assert packed.shape == (3, row_bytes(20, bits))
    assert torch.equal(unpack_rows(packed, bits, 20), values[:, skip : skip + 20])


def test_whole_rows_of_words_are_not_copied() -> None:
    words = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert rows_of_words(words, 4, 0, 32).data_ptr() == words.data_ptr()
