"""Collectives over shared memory: what they make, and what becomes of ranks that wait for one that does not come."""

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

from worker_service.kernels.native import load
from worker_service.kernels.shared import PART_BYTES, SharedCollectives, SharedFile

pytestmark = pytest.mark.skipif(load() is None, reason="no compiled kernels here")
# Around a vector, and around one part and several of float32.
COUNTS = (1, 15, 16, 33, PART_BYTES // 4, 3 * PART_BYTES // 4 + 5)
Call = Callable[[SharedCollectives, int], object]


def library() -> ctypes.CDLL:
    found = load()
    assert found is not None
    return found


class Ranks:
    """Ranks of one process, each on a thread of its own."""

    def __init__(self, ends: list[SharedCollectives], pool: ThreadPoolExecutor) -> None:
        self.ends = ends
        self._pool = pool

    def begin(self, rank: int, call: Call) -> "Future[object]":
        return self._pool.submit(call, self.ends[rank], rank)

    def each(self, call: Call) -> list[object]:
        return [future.result(30) for future in [self.begin(rank, call) for rank in range(len(self.ends))]]


@contextmanager
def ranks(size: int, *, timeout_s: float = 20.0, pids: list[int] | None = None) -> Iterator[Ranks]:
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        file = SharedFile(library(), size)
        ends = []
        for rank in range(size):
            end = SharedCollectives(library(), file.word, rank, pids or [os.getpid()] * size, timeout_s)
            stack.callback(end.close)
            ends.append(end)
        file.close()
        yield Ranks(ends, pool)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_any_length(size: int) -> None:
    with ranks(size) as group:
        for count in COUNTS:
            whole = torch.arange(count, dtype=torch.float32)

            def sums(end: SharedCollectives, rank: int, whole: torch.Tensor = whole) -> torch.Tensor:
                mine = whole * (rank + 1)
                end.all_reduce(mine)
                return mine

            def gathered(end: SharedCollectives, rank: int, whole: torch.Tensor = whole) -> torch.Tensor:
                parts = whole.new_empty(size, len(whole))
                end.all_gather(whole + rank, parts)
                return parts

            def told(end: SharedCollectives, rank: int, count: int = count) -> torch.Tensor:
                values = torch.full((count,), rank + 5)
                end.broadcast(values)
                return values

            expected = whole * (size * (size + 1) // 2)
            assert all(torch.equal(made, expected) for made in group.each(sums))  # type: ignore[arg-type]
            expected = torch.stack([whole + rank for rank in range(size)])
            assert all(torch.equal(made, expected) for made in group.each(gathered))  # type: ignore[arg-type]
            assert all((made == 5).all() for made in group.each(told))  # type: ignore[attr-defined]


# Numbers of which 1 is half of the last place.
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_sums_are_made_in_the_order_of_ranks_and_rounded_once(dtype: torch.dtype, most: float) -> None:
    parts = [1e8, 3.0, -1e8]
    halves = [most, 1.0, 1.0]

    def both(end: SharedCollectives, rank: int) -> tuple[float, float]:
        exact, half = torch.full((40,), parts[rank]), torch.full((40,), halves[rank], dtype=dtype)
        end.all_reduce(exact)
        end.all_reduce(half)
        return exact[39].item(), half[39].item()

    in_order = (torch.tensor(parts[0]) + parts[1] + parts[2]).item()
    with ranks(3) as group:
        assert group.each(both) == [(in_order, most + 2)] * 3
    assert in_order != 3.0


def add_one(end: SharedCollectives, _rank: int = 0) -> float:
    values = torch.ones(3)
    end.all_reduce(values)
    return values[0].item()


def test_who_waits_for_a_rank_that_leaves_is_let_go() -> None:
    with ranks(2) as group:
        waiting = group.begin(0, add_one)
        time.sleep(0.05)  # long enough for it to sleep, and right without
        group.ends[1].close()
        with pytest.raises(RuntimeError, match="has left"):
            waiting.result(5)


def test_what_a_rank_gave_before_it_left_counts() -> None:
    with ranks(2) as group:
        gone = group.begin(1, lambda end, _rank: (add_one(end), end.close()))
        assert add_one(group.ends[0]) == 2.0
        gone.result(5)
        with pytest.raises(RuntimeError, match="has left"):
            add_one(group.ends[0])


def test_who_waits_for_a_process_that_is_killed_is_let_go() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        with ranks(2, pids=[os.getpid(), other.pid]) as group:
            waiting = group.begin(0, add_one)
            other.kill()  # and not waited for: a process that has ended is told from one that is there
            with pytest.raises(RuntimeError, match="process has ended"):
                waiting.result(5)
    finally:
        other.kill()
        other.wait()


def test_a_rank_that_does_not_come_in_time_is_told_of() -> None:
    with ranks(2, timeout_s=0.05) as group, pytest.raises(RuntimeError, match="in time"):
        add_one(group.ends[0])


def test_a_word_that_means_something_else_is_refused() -> None:
    file = SharedFile(library(), 2)
    pid, number, _nonce = file.word.split()
    with pytest.raises(ValueError, match="another file"):
        SharedCollectives(library(), f"{pid} {number} {'00' * 16}", 0, [os.getpid()] * 2, 1.0)
    with pytest.raises(FileNotFoundError):
        SharedCollectives(library(), f"{2**22 + 1} {number} {'00' * 16}", 0, [os.getpid()] * 2, 1.0)
    with pytest.raises(ProcessLookupError):
        SharedCollectives(library(), file.word, 0, [os.getpid(), 2**22 + 1], 1.0)
    file.close()
