"""How ranks come to share memory, and that none does where one of them cannot."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from worker_service.kernels.native import load
from worker_service.kernels.shared import SharedCollectives
from worker_service.runtime import shared_memory
from worker_service.runtime.shared_memory import share_memory


def meet() -> list[SharedCollectives | None]:
    library, store = load(), HashStore()
    assert library is not None
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: share_memory(library, store, rank, 2, 5.0), range(2)))


@pytest.mark.skipif(load() is None, reason="no compiled kernels here")
def test_all_share_memory_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = meet()
    assert first is not None
    assert second is not None
    values = torch.ones(2, 3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.all_reduce, torch.ones(2, 3))
        first.all_reduce(values)
        other.result(5)
    assert (values == 2).all()
    first.close()
    second.close()

    opened = shared_memory._open
    monkeypatch.setattr(shared_memory, "_open", lambda *args: None if args[2] == 1 else opened(*args))
    assert meet() == [None, None]
    monkeypatch.setattr(shared_memory, "_open", opened)

    def refused(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(shared_memory, "SharedFile", refused)
    assert meet() == [None, None]
