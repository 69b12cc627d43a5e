"""Reading on several threads, in the order of the files, as far ahead as memory allows."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, Thread
from types import TracebackType

import torch

from loader.reading.decode import place
from loader.reading.extents import PAGE_BYTES, Extent, Fragment, extents, least_room
from loader.reading.files import DataFile, Memory, Straight
from loader.reading.report import LoadReport
from loader.reading.results import Allocate, Result
from loader.reading.staging import Staging, staging_for
from loader.reading.tuning import MAX_THREADS, READ_BUFFER_BYTES, Method, Tuner

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """What was read meanwhile: bytes that were wanted, and the results that are complete, in the order of the files."""

    num_bytes: int
    complete: Sequence[Result]


class Reader:
    """Reads `results`, which are in the order of the files, while `steps` is iterated over.

    `allocate` is called on reading threads, one call at a time. Where results are to be delivered (`is_delivered`), at
    most the largest of them and `READ_BUFFER_BYTES` are read ahead of what `release` was called for.
    """

    def __init__(
        self, results: Sequence[Result], allocate: Allocate, report: LoadReport, *, is_delivered: bool
    ) -> None:
        self._results = results
        self._allocate = allocate
        self._report = report
        self._least_room = least_room(results)
        self._files = _files_of(results)
        self._pace = next((file.storage.disk for file in self._files.values()), None)
        self._extents = extents(results, self._room)
        self._upcoming = next(self._extents, None)
        largest = max((result.num_bytes for result in results), default=0)
        self._max_ahead = largest + max(READ_BUFFER_BYTES, MAX_THREADS * self._least_room) if is_delivered else None
        self._ahead = 0
        self._done: set[str] = set()
        self._num_delivered = 0
        self._events: deque[int] = deque()
        self._failures: list[tuple[int, BaseException]] = []
        self._threads: list[Thread] = []
        self._is_stopped = False
        self._limit = 0
        self._lock = Lock()
        self._news = Condition(self._lock)  # for the caller
        self._way_free = Condition(self._lock)  # for reading threads

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        for file in self._files.values():
            file.close()

    def steps(self) -> Iterator[Step]:
        """Reads on; yields for each extent that was read, and several times a second while none is.

        Raises what a read raised: the first in the order of the files, where several did.
        """
        unread = sum(result.file_bytes for result in self._results)
        while unread:
            self._start_threads()
            with self._lock:
                if not self._events and not self._failures:
                    self._news.wait(_POLL_SECONDS)
                num_bytes = self._events.popleft() if self._events else 0
                has_failed = bool(self._failures)
            if has_failed:
                self._stop()
                raise min(self._failures, key=lambda failure: failure[0])[1]
            unread -= num_bytes
            yield Step(num_bytes, self._complete())
        if self._num_delivered < len(self._results):
            yield Step(0, self._complete())

    def release(self, result: Result) -> None:
        """Takes note that a result was delivered: its memory is the receiver's."""
        result.tensor = None
        with self._lock:
            self._ahead -= result.num_bytes
            self._way_free.notify_all()

    def _room(self) -> int:
        assert self._pace is not None
        return max(self._pace.setting.read_bytes, self._least_room)

    def _complete(self) -> list[Result]:
        """The results that follow those delivered and are complete."""
        found = []
        with self._lock:
            for result in self._results[self._num_delivered :]:
                if not result.sources:
                    result.open(self._allocate)
                    self._ahead += result.num_bytes
                elif result.want.name not in self._done:
                    break
                found.append(result)
            self._num_delivered += len(found)
        return found

    def _start_threads(self) -> None:
        while self._pace is not None and len(self._threads) < self._pace.setting.threads:
            number = len(self._threads)
            thread = Thread(target=self._work, args=(number,), name=f"load-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._way_free.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        # Torch's own threads, woken for each small piece, cost more than they give.
        torch.set_num_threads(1)
        lane = _Lane()
        position = -1
        try:
            while (extent := self._take(number)) is not None:
                position = extent.number
                self._read(extent, lane)
        except BaseException as error:
            with self._lock:
                self._failures.append((position, error))
                self._is_stopped = True
                self._news.notify()
                self._way_free.notify_all()
        with self._lock:
            self._report.buffer_bytes += lane.num_bytes

    def _take(self, number: int) -> Extent | None:
        """The next extent, its results' memory taken; None at the end. Waits while thread `number` is not needed."""
        with self._lock:
            while not self._is_stopped and self._upcoming is not None:
                extent = self._upcoming
                assert self._pace is not None
                num_bytes = sum(map(_result_bytes, extent.fragments))
                has_room = self._max_ahead is None or self._ahead + num_bytes <= self._max_ahead
                if number < self._pace.setting.threads and has_room:
                    for fragment in extent.fragments:
                        if fragment.result.tensor is None:
                            fragment.result.open(self._allocate)
                    self._upcoming = next(self._extents, None)
                    self._ahead += num_bytes
                    if self._upcoming is None:
                        self._way_free.notify_all()
                    return extent
                self._way_free.wait()
            return None

    def _read(self, extent: Extent, lane: "_Lane") -> None:
        file = self._files[extent.file]
        method = file.choose(extent)
        pace = file.storage.cache if method == "cached" else file.storage.disk
        staging, slot = lane.way_to(_device(extent), max(extent.buffer_bytes, pace.setting.read_bytes))
        straight = [_straight(fragment) for fragment in extent.fragments if _is_straight(fragment)]
        start = time.perf_counter()
        pace.begin(start)
        num_converted = 0
        try:
            method = file.read(extent, straight, slot, method)
            read = time.perf_counter()
            with staging.copies():
                for fragment in extent.fragments:
                    if not _is_straight(fragment):
                        _place(fragment, extent, slot)
                        num_converted += 1
        finally:
            stop = time.perf_counter()
            pace.end(extent.stop - extent.start, stop)
        file.done(extent.wanted_bytes)
        self._account(extent, method, pace, read - start, stop - read if num_converted else 0.0)

    def _account(self, extent: Extent, method: Method, pace: Tuner, read_s: float, convert_s: float) -> None:
        with self._lock:
            whole = []
            for fragment in extent.fragments:
                fragment.result.unread_bytes -= fragment.wanted_bytes
                if fragment.result.unread_bytes == 0:
                    whole.append(fragment.result)
        for result in whole:
            result.close()
        report = self._report
        with self._lock:
            self._done.update(result.want.name for result in whole)
            self._pace = pace
            if method == "cached":
                report.cached_bytes += extent.stop - extent.start
            else:
                report.disk_bytes += extent.stop - extent.start
                report.method = pace.setting.method
            report.threads = pace.setting.threads
            report.read_s += read_s
            report.convert_s += convert_s
            self._events.append(extent.wanted_bytes)
            self._news.notify()
            if self._limit != pace.setting.threads:
                self._limit = pace.setting.threads
                self._way_free.notify_all()


class _Lane:
    """A reading thread's buffers."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, tuple[Staging, Memory]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(slot.bytes) for _, slot in self._ways.values())

    def way_to(self, device: torch.device, num_bytes: int) -> tuple[Staging, Memory]:
        """A buffer of at least `num_bytes` for what is bound for `device`."""
        way = self._ways.pop(device, None)
        if way is None or len(way[1].bytes) < num_bytes:
            staging = staging_for(device) if way is None else way[0]
            del way  # the smaller buffer, before the larger is taken
            way = staging, Memory(staging.buffer(num_bytes))
        self._ways[device] = way
        return way


def _files_of(results: Sequence[Result]) -> Mapping[Path, DataFile]:
    """Every file that is needed, none of them open. Raises CheckpointError for one that is gone or too short."""
    needs: dict[Path, tuple[int, int]] = {}
    for result in results:
        for source in result.sources:
            runs = source.rows.runs
            size, num_bytes = needs.get(runs.file, (0, 0))
            end = runs.offset + (runs.count - 1) * runs.stride_bytes + runs.run_bytes
            needs[runs.file] = max(size, end), num_bytes + runs.num_bytes
    return {path: DataFile(path, size, num_bytes) for path, (size, num_bytes) in needs.items()}


def _device(extent: Extent) -> torch.device:
    assert extent.fragments[0].result.tensor is not None
    return extent.fragments[0].result.tensor.device


def _is_straight(fragment: Fragment) -> bool:
    """Whether the bytes go to where they belong without a copy, as far as the storage allows."""
    target = fragment.result.target(fragment.source)
    return fragment.source.is_same and not fragment.is_rows and target.device.type == "cpu"


def _straight(fragment: Fragment) -> Straight:
    target = fragment.result.target(fragment.source)
    low = (fragment.row * target.shape[1] + fragment.low) * target.dtype.itemsize
    return Straight(fragment, Memory(target), low, low + fragment.stop - fragment.start)


def _place(fragment: Fragment, extent: Extent, slot: Memory) -> None:
    base = extent.start - extent.start % PAGE_BYTES
    raw = slot.bytes[fragment.start - base : fragment.stop - base]
    place(fragment, raw, fragment.result.target(fragment.source))


def _result_bytes(fragment: Fragment) -> int:
    """What a fragment adds to its result. Of a result's whole, exactly."""
    result = fragment.result
    return result.num_bytes * fragment.wanted_bytes // max(1, result.file_bytes)
