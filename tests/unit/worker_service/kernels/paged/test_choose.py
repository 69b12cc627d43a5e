"""The reference against one softmax at a time, and the choice of a kernel."""

import pytest
import torch

from worker_service.kernels.kv_rounding import KV_DTYPES, restore_heads, round_heads
from worker_service.kernels.paged.choose import Trial, choose_kernel, largest_error
from worker_service.kernels.paged.problem import PagedBatch, Pages, Rule
from worker_service.kernels.paged.reference import ReferenceKernel
from worker_service.models.scores import Scores

CPU = torch.device("cpu")


def trial(dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None, block_size: int = 16) -> Trial:
    rules = (Rule(Scores(0.25)), Rule(Scores(0.2, 5.0), 9))
    return Trial(6, 2, 32, block_size, dtype, CPU, stored, rules)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_the_reference_is_one_softmax_after_the_other(window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 11, 2, 8, generator=generator)
    query = torch.randn(3, 4, 8, generator=generator)
    data = torch.zeros(5, 2, 2, 4, 8)
    pages, reference = Pages(data[:, 0], data[:, 1]), ReferenceKernel()
    tables = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    places = torch.arange(11)
    reference.store(key, value, tables[0].long()[places // 4] * 4 + places % 4, pages)
    batch = PagedBatch(torch.tensor([0, 3]).int(), torch.tensor([11]).int(), tables, 3, 11)
    got = reference.attend(query, pages, batch, Rule(Scores(0.3, softcap), window))
    for token, position in enumerate((8, 9, 10)):
        seen = slice(max(0, position + 1 - (window or 11)), position + 1)
        for head in range(4):
            scores = key[seen, head // 2] @ query[token, head] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            torch.testing.assert_close(got[token, head], scores.softmax(0) @ value[seen, head // 2])


@pytest.mark.parametrize(("stored", "error"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)])
def test_rounding_is_as_close_as_its_type_allows(stored: torch.dtype, error: float) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(2))
    x[7, 1] = 0.0
    x[8, 2] *= 1e4
    codes, scales = round_heads(x, stored)
    assert codes.dtype == stored and scales.shape == (50, 3)
    restored = restore_heads(codes, scales, torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    bound = error * (largest if stored == torch.int8 else x.abs() + largest / 448)
    assert bool(((restored - x).abs() <= bound * 1.001).all())
    assert not bool(restored[7, 1].any())


def test_a_kernel_is_held_against_the_reference() -> None:
    class Wrong(ReferenceKernel):
        def attend(self, query: torch.Tensor, pages: Pages, batch: PagedBatch, rule: Rule) -> torch.Tensor:
            return super().attend(query, pages, batch, Rule(rule.scores))  # without its window

    for stored in (None, *KV_DTYPES.values()):
        assert largest_error(ReferenceKernel(), trial(stored=stored)) == 0.0
    assert largest_error(Wrong(), trial()) > 0.1


def test_a_device_without_kernels_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's flash attention nor Triton works on a CPU; that is an answer, and no error."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_kernel(trial(torch.bfloat16)) is None
