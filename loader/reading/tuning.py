"""How a storage is best read: found by trying while a load runs, one step at a time, on what it has to read anyway."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Lock
from typing import Literal

Method = Literal["direct", "buffered", "cached"]

MAX_THREADS = 16
_WINDOW_BYTES = 96 << 20
_WINDOW_SECONDS = 0.02
# Storages have moods, and more threads take more memory: another setting must win by this.
_CLEAR_GAIN = 0.1
# What is in flight at once stays about the same: few threads read large pieces, many read small ones.
_IN_FLIGHT_BYTES = 32 << 20
_MAX_READ_BYTES = 16 << 20
# 2^18 float32 values stay in a core's cache. A decoder has four such tensors at a time at most.
DECODE_VALUES = 1 << 18
_DECODE_BYTES = 4 * 4 * DECODE_VALUES


@dataclass(frozen=True, slots=True)
class Setting:
    """How to read, and on how many threads."""

    method: Method
    threads: int

    @property
    def read_bytes(self) -> int:
        """The most that one read asks for."""
        return min(_MAX_READ_BYTES, (_IN_FLIGHT_BYTES // self.threads) >> 20 << 20)


def most_buffer_bytes() -> int:
    """What the buffers of all threads have at most, when each has grown to the largest reads that it made."""
    return sum(Setting("direct", number + 1).read_bytes for number in range(MAX_THREADS))


# The read buffers of all threads, and what they decode with: what the reads of a load may take.
READ_BUFFER_BYTES = most_buffer_bytes() + MAX_THREADS * _DECODE_BYTES


class Tuner:
    """Finds the setting with which most bytes a second are in their place, over windows of about 100 MiB.

    The number of threads is doubled while that clearly helps; then, with that many, the other methods are tried. Two
    are the fewest: one would leave the storage idle while it puts bytes in their place.
    """

    def __init__(self, methods: tuple[Method, ...], threads: int) -> None:
        self.setting = Setting(methods[0], threads)
        self.is_settled = False
        self._others = methods[1:]
        self._lock = Lock()
        self._bytes = 0
        self._busy = 0.0
        self._since = 0.0
        self._active = 0
        self._from_before = 0
        self._start_search()

    def exclude(self, method: Method) -> None:
        """Never uses `method` again: the storage refused it."""
        with self._lock:
            if self.setting.method == method and self._others:
                self.setting = replace(self.setting, method=self._others[0])
                self._others = self._others[1:]
                self._start_search()
                self._open_window()

    def begin(self, now: float) -> None:
        """Takes note that a read began at the time `now`, in seconds."""
        with self._lock:
            if self._active == 0:
                self._since = now
            self._active += 1

    def end(self, num_bytes: int, now: float) -> None:
        """Takes note that a read ended, and its bytes are in their place. Time in which nothing is read counts for
        nothing: then something else than the storage decides the pace."""
        with self._lock:
            self._busy += now - self._since
            self._since = now
            self._active -= 1
            if self._from_before > 0:
                self._from_before -= 1
                self._bytes, self._busy = 0, 0.0
                return
            self._bytes += num_bytes
            if not self.is_settled and self._bytes >= _WINDOW_BYTES and self._busy >= _WINDOW_SECONDS:
                self._next_setting(self._bytes / self._busy)

    def _next_setting(self, rate: float) -> None:
        try:
            self._search.send(rate)
        except StopIteration:
            self.is_settled = True
        self._open_window()

    def _open_window(self) -> None:
        self._bytes, self._busy = 0, 0.0
        self._from_before = self._active

    def _start_search(self) -> None:
        self._search = self._try_all()
        next(self._search)

    def _try_all(self) -> Generator[None, float, None]:
        """Sets one setting after the other, and is sent the rate of each; leaves the best."""
        best, rate = self.setting, (yield)
        while best.threads < MAX_THREADS:
            found = yield from self._compare(replace(best, threads=best.threads * 2), best, rate)
            if found is None:
                break
            best, rate = self.setting, found
        for method in self._others:
            found = yield from self._compare(replace(best, method=method), best, rate)
            if found is not None:
                best, rate = self.setting, found
        self.setting = best

    def _compare(self, other: Setting, best: Setting, rate: float) -> Generator[None, float, float | None]:
        """The rate of `other` where it clearly beats `best`, also when `best` is tried once more."""
        self.setting = other
        found = yield
        if found < rate * (1 + _CLEAR_GAIN):
            return None
        self.setting = best
        again = yield
        self.setting = other
        return found if found > again * (1 + _CLEAR_GAIN) else None


@dataclass(slots=True)
class Storage:
    """What is known of a device, and of the page cache before it.

    `memory_alignment` is what direct reads demand of the memory they fill, as far as it is known: 4 bytes where a
    device takes any, 512 for many virtual ones.
    """

    disk: Tuner = field(default_factory=lambda: Tuner(("direct", "buffered"), 2))
    cache: Tuner = field(default_factory=lambda: Tuner(("cached",), 2))
    memory_alignment: int = 4


@cache
def storage_of(device: int) -> Storage:
    """What this process has found out about the device with this st_dev: later loads begin with it."""
    del device
    return Storage()
