"""What is read in one go: ranges of a file, over as many neighbouring tensors as a buffer has room for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loader.byte_runs import BLOCKS
from loader.reading.results import Result, Source

# Reads that bypass the page cache begin and end at multiples of this.
PAGE_BYTES = 4096
# From here on a run is read by itself: the pages that its ends share with its neighbours are under 4 % of it.
LONG_RUN_BYTES = 64 * PAGE_BYTES
# The kernel takes 1024 places for the bytes of one read; a fragment needs two at most.
_MAX_FRAGMENTS = 500


@dataclass(frozen=True, slots=True)
class Fragment:
    """Whole rows of a part as stored, or the values `[low, high)` of one; they lie in `[start, stop)` of the file."""

    result: Result
    source: Source
    row: int
    num_rows: int
    low: int
    high: int
    start: int
    stop: int

    @property
    def is_rows(self) -> bool:
        """Whether these are whole rows, to be taken apart in memory."""
        return _in_rows(self.source)

    @property
    def wanted_bytes(self) -> int:
        """What it holds of the part, without what lies between the rows."""
        if self.is_rows:
            return self.num_rows * self.source.rows.runs.run_bytes
        return self.stop - self.start


@dataclass(slots=True)
class Extent:
    """The bytes `[start, stop)` of a file, and what they are.

    `is_shared`: they also hold what other ranks want, in between; read through the page cache, the disk reads them
    once for all ranks of a machine.
    """

    number: int
    file: Path
    start: int
    stop: int
    is_shared: bool
    fragments: list[Fragment] = field(default_factory=list)

    @property
    def wanted_bytes(self) -> int:
        return sum(fragment.wanted_bytes for fragment in self.fragments)

    @property
    def buffer_bytes(self) -> int:
        """Its size in whole pages."""
        return self.stop + -self.stop % PAGE_BYTES - self.start + self.start % PAGE_BYTES


def least_room(results: Sequence[Result]) -> int:
    """What a buffer must have for the longest row that is taken apart, at whatever place in a page it begins."""
    longest = 0
    for result in results:
        for source in result.sources:
            if _in_rows(source):
                longest = max(longest, source.rows.runs.run_bytes)
    return longest + -longest % PAGE_BYTES + 2 * PAGE_BYTES


def extents(results: Sequence[Result], room: Callable[[], int]) -> Iterator[Extent]:
    """All that `results` need, in their order.

    Neighbours in the file, with less than a page between them, are read together. An extent, widened to whole pages,
    takes at most as many bytes as `room` says when it is begun; these must be whole pages, and `least_room` at least.
    """
    number = limit = 0
    extent: Extent | None = None
    for result, source in ((owner, source) for owner in results for source in owner.sources):
        for piece in _pieces(source):
            rest: _Piece | None = piece
            while rest is not None:
                if extent is not None and not _joins(extent, source, rest):
                    yield extent
                    extent = None
                if extent is None:
                    extent = Extent(number, source.info.file, rest.start, rest.start, rest.is_shared)
                    limit = rest.start - rest.start % PAGE_BYTES + room()
                    number += 1
                fragment, rest = rest.cut(result, source, limit)
                if fragment is None:
                    yield extent
                    extent = None
                else:
                    extent.fragments.append(fragment)
                    extent.stop = fragment.stop
    if extent is not None:
        yield extent


def _joins(extent: Extent, source: Source, piece: "_Piece") -> bool:
    return (
        extent.file == source.info.file
        and extent.is_shared == piece.is_shared
        and 0 <= piece.start - extent.stop < PAGE_BYTES
        and len(extent.fragments) < _MAX_FRAGMENTS
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a part that is yet to be cut: rows `[row, stop_row)`, or of one row the bytes `[low, high)`."""

    row: int
    stop_row: int
    low: int
    high: int
    start: int
    is_shared: bool
    in_rows: bool

    def cut(self, result: Result, source: Source, limit: int) -> "tuple[Fragment | None, _Piece | None]":
        """What of it ends at `limit` or before, and the rest."""
        if self.in_rows:
            return self._cut_rows(result, source, limit)
        return self._cut_row(result, source, limit)

    def _cut_rows(self, result: Result, source: Source, limit: int) -> "tuple[Fragment | None, _Piece | None]":
        runs, values = source.rows.runs, source.rows.run_values
        num_rows = min((limit - self.start - runs.run_bytes) // runs.stride_bytes + 1, self.stop_row - self.row)
        if num_rows <= 0:
            return None, self
        stop = self.start + (num_rows - 1) * runs.stride_bytes + runs.run_bytes
        fragment = Fragment(result, source, self.row, num_rows, 0, values, self.start, stop)
        if self.row + num_rows == self.stop_row:
            return fragment, None
        start = self.start + num_rows * runs.stride_bytes
        return fragment, _Piece(self.row + num_rows, self.stop_row, 0, 0, start, self.is_shared, True)

    def _cut_row(self, result: Result, source: Source, limit: int) -> "tuple[Fragment | None, _Piece | None]":
        block_values, block_bytes = BLOCKS[source.info.dtype]
        high = min(self.high, self.low + (limit - self.start) // block_bytes * block_bytes)
        if high <= self.low:
            return None, self
        low_value, high_value = (position // block_bytes * block_values for position in (self.low, high))
        stop = self.start + high - self.low
        fragment = Fragment(result, source, self.row, 1, low_value, high_value, self.start, stop)
        if high == self.high:
            return fragment, None
        return fragment, _Piece(self.row, self.stop_row, high, self.high, stop, self.is_shared, False)


def _pieces(source: Source) -> Iterator[_Piece]:
    runs = source.rows.runs
    if _in_rows(source):
        is_shared = runs.stride_bytes > runs.run_bytes
        yield _Piece(0, runs.count, 0, 0, runs.offset, is_shared, True)
        return
    for row, (start, _) in enumerate(runs.ranges):
        yield _Piece(row, row + 1, 0, runs.run_bytes, start, False, False)


def _in_rows(source: Source) -> bool:
    """Whether rows are taken apart in memory, and not read one by one."""
    return source.info.rotary_heads is not None or (
        source.rows.runs.count > 1 and source.rows.runs.run_bytes < LONG_RUN_BYTES
    )
