"""A group of ranks in this process, each a runtime on a thread of its own, connected as processes are."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from loader.shares import RankPlace
from worker_service.runtime.report import Meeting
from worker_service.runtime.step import StepInput, StepOutput
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings

T = TypeVar("T")
TIMEOUT_S = 60.0


def rank_settings(**changes: Any) -> WorkerSettings:
    """Settings of one rank of a tiny model."""
    return WorkerSettings(**{"threads": 1, "native_kernels": False, "collective_timeout": 20.0, **changes})


class RankThreads:
    """The runtimes of a group. What a test does on all of them at once is done in the same order by each."""

    def __init__(self, tp: int, pp: int = 1, settings: WorkerSettings | None = None) -> None:
        self.places = [RankPlace(rank, tp, stage, pp) for stage, rank in itertools.product(range(pp), range(tp))]
        self.runtimes = [WorkerRuntime(settings or rank_settings()) for _ in self.places]
        self._threads = [ThreadPoolExecutor(1) for _ in self.places]
        self.num_blocks = self.block_size = 0
        self.epoch = 0

    def begin(self, rank: int, call: Callable[[WorkerRuntime], T]) -> "Future[T]":
        """Lets one rank do something."""
        return self._threads[rank].submit(call, self.runtimes[rank])

    def each(self, call: Callable[[WorkerRuntime], T]) -> list[T]:
        """Lets all ranks do something, and waits for them; raises what the first of them raised."""
        futures = [self.begin(rank, call) for rank in range(len(self.places))]
        return [future.result(TIMEOUT_S) for future in futures]

    def meet(self) -> str:
        """A new epoch: all have their devices and rank 0 says where, then all meet there. Answers where."""
        self.epoch += 1
        address = self._init_devices(Meeting(self.epoch))
        if len(self.places) > 1:
            self._init_devices(Meeting(self.epoch, address))
        return address

    def _init_devices(self, meeting: Meeting) -> str:
        """Answers what rank 0 says."""
        futures = [
            self.begin(rank, lambda r, place=place: r.init_device(place, meeting))  # type: ignore[misc]
            for rank, place in enumerate(self.places)
        ]
        first, *others = (future.result(TIMEOUT_S).rendezvous for future in futures)
        assert all(other == meeting.address for other in others)
        return first

    def start(self, path: Path, *, dtype: str = "float32", num_blocks: int = 256, block_size: int = 4) -> None:
        """Meets, loads the model and makes caches for contexts of up to 256 tokens."""
        self.meet()
        for rank in range(len(self.places)):
            # One after the other: transformers' loader changes torch for the whole process while it works.
            self.begin(rank, lambda r: r.load_model(path, dtype, lambda *_: None, lambda: False)).result(TIMEOUT_S)
        self.each(lambda r: r.initialize_cache(num_blocks, block_size, 256))
        self.num_blocks, self.block_size = num_blocks, block_size

    def execute(self, step: StepInput) -> StepOutput:
        """Runs a step on all ranks; answers what the output rank does."""
        outputs = self.each(lambda r: r.execute(step))
        return outputs[-self.places[0].tensor_parallel_size]

    def close(self) -> None:
        """Ends the threads."""
        for rank in range(len(self.places)):
            self.begin(rank, lambda r: r.leave_group())
        for thread in self._threads:
            thread.shutdown()


@contextmanager
def rank_threads(tp: int, pp: int = 1, settings: WorkerSettings | None = None) -> Iterator[RankThreads]:
    """A group that is gone afterwards."""
    ranks = RankThreads(tp, pp, settings)
    try:
        yield ranks
    finally:
        ranks.close()
