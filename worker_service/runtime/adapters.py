"""The adapters of one rank: in host memory, and those in use in the slots of the device."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from worker_service.runtime.errors import RuntimeFailure

MAX_ADAPTERS = 1024


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Factors as an engine computes with them; `weights` is the engine's own."""

    weights: object
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that was read and checked. `fingerprint` names its content."""

    fingerprint: str
    path: str
    rank: int
    packed: PackedAdapter = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """How an adapter stands. `num_sequences` are those that it is computed for."""

    fingerprint: str
    path: str
    rank: int
    num_bytes: int
    is_resident: bool = False
    num_sequences: int = 0


@dataclass(slots=True, eq=False)
class ResidentAdapter:
    """An adapter in a slot of the device; slots count from 1."""

    fingerprint: str
    slot: int
    weights: object
    num_users: int = 0


class AdapterMissing(Exception):
    """A sequence cannot be computed with its adapter."""


class AdapterTable:
    """The adapters that a rank was given, least recently used first. Used by the device thread alone.

    All are held in host memory, up to `max_bytes`; at most `num_slots` are on the device. One that a sequence needs
    takes the place of the one that has not been used for longest; those with sequences stay.
    """

    def __init__(self, attach: Callable[[PackedAdapter], object], *, num_slots: int, max_bytes: int) -> None:
        self._attach = attach
        self._max_bytes = max_bytes
        self._hosts: dict[str, HostAdapter] = {}
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._free_slots = list(range(num_slots, 0, -1))
        self.num_slots = num_slots

    def add(self, adapter: HostAdapter) -> AdapterReport:
        """Holds an adapter from now on; one of the same content is kept. Raises RuntimeFailure "limit"."""
        if adapter.fingerprint not in self._hosts:
            held = sum(host.packed.num_bytes for host in self._hosts.values())
            if held + adapter.packed.num_bytes > self._max_bytes:
                raise too_large(Path(adapter.path), held + adapter.packed.num_bytes, self._max_bytes)
            if len(self._hosts) >= MAX_ADAPTERS:
                text = f"the worker holds {MAX_ADAPTERS} adapters, and no more are allowed; unload one first"
                raise RuntimeFailure("limit", text, {"limit": str(MAX_ADAPTERS)})
            self._hosts[adapter.fingerprint] = adapter
        return self._report(self._hosts[adapter.fingerprint])

    def remove(self, fingerprint: str) -> None:
        """Forgets an adapter; sequences that have it keep it until they end. Unknown ones are ignored."""
        self._hosts.pop(fingerprint, None)
        resident = self._resident.get(fingerprint)
        if resident is not None and not resident.num_users:
            self._evict(resident)

    def leave_device(self) -> None:
        """Takes all adapters out of their slots; no sequence may have one."""
        for resident in list(self._resident.values()):
            self._evict(resident)

    def reports(self) -> list[AdapterReport]:
        """All that can be used, in the order in which they were added."""
        return [self._report(host) for host in self._hosts.values()]

    def take(self, fingerprint: str) -> ResidentAdapter:
        """The adapter, in a slot, for one sequence more. Raises AdapterMissing."""
        host = self._hosts.get(fingerprint)
        if host is None:
            raise AdapterMissing(f"its adapter {fingerprint[:64]!r} is not on this worker")
        resident = self._resident.get(fingerprint)
        if resident is None:
            resident = ResidentAdapter(fingerprint, self._free_slot(), self._attach(host.packed))
            self._resident[fingerprint] = resident
        self._resident.move_to_end(fingerprint)
        resident.num_users += 1
        return resident

    def release(self, resident: ResidentAdapter) -> None:
        """A sequence that took the adapter is gone."""
        resident.num_users -= 1
        if not resident.num_users and resident.fingerprint not in self._hosts:
            self._evict(resident)

    def _free_slot(self) -> int:
        if not self._free_slots:
            idle = next((each for each in self._resident.values() if not each.num_users), None)
            if idle is None:
                raise AdapterMissing(f"all {self.num_slots} adapter slots of the worker are in use")
            self._evict(idle)
        return self._free_slots.pop()

    def _evict(self, resident: ResidentAdapter) -> None:
        del self._resident[resident.fingerprint]
        self._free_slots.append(resident.slot)

    def _report(self, host: HostAdapter) -> AdapterReport:
        resident = self._resident.get(host.fingerprint)
        users = 0 if resident is None else resident.num_users
        return AdapterReport(host.fingerprint, host.path, host.rank, host.packed.num_bytes, resident is not None, users)


class NoAdapters:
    """The adapters of a runtime that takes none."""

    def __init__(self, problem: str) -> None:
        self._problem = problem
        self.table = AdapterTable(lambda packed: packed.weights, num_slots=0, max_bytes=0)

    def reader(self) -> NoReturn:
        """Raises RuntimeFailure "unsupported"."""
        raise RuntimeFailure("unsupported", self._problem)


class SequenceAdapters:
    """Which sequences have which adapter, by their rows of the sequence table. Used by the device thread alone."""

    def __init__(self, table: AdapterTable | None) -> None:
        self._table = table
        self.by_row: dict[int, ResidentAdapter] = {}

    def take(self, row: int, fingerprint: str) -> None:
        """The sequence of a row comes with an adapter. Raises AdapterMissing."""
        if self._table is None:
            raise AdapterMissing("the worker takes no adapters")
        self.by_row[row] = self._table.take(fingerprint)

    def leave(self, row: int) -> None:
        """The sequence of a row is gone."""
        adapter = self.by_row.pop(row, None)
        if adapter is not None and self._table is not None:
            self._table.release(adapter)

    def clear(self) -> None:
        """All sequences are gone."""
        for row in list(self.by_row):
            self.leave(row)


def too_large(path: Path, num_bytes: int, limit: int) -> RuntimeFailure:
    """The error of an adapter for which adapter_host_bytes leaves no room."""
    return RuntimeFailure(
        "limit",
        f"with {path} the adapters of this worker have {num_bytes} bytes, and adapter_host_bytes allows {limit}; "
        "unload one, or raise adapter_host_bytes",
        {"needed_bytes": str(num_bytes), "limit_bytes": str(limit), "file": str(path)},
    )
