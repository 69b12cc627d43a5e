"""Adapters between host memory and the slots of the device."""

import pytest

from worker_service.runtime.adapters import AdapterMissing, AdapterTable, HostAdapter, PackedAdapter, SequenceAdapters
from worker_service.runtime.errors import RuntimeFailure


class Attached:
    """Notes what was brought to the device."""

    def __init__(self) -> None:
        self.names: list[object] = []

    def __call__(self, packed: PackedAdapter) -> object:
        self.names.append(packed.weights)
        return packed.weights


def host(name: str, num_bytes: int = 10) -> HostAdapter:
    return HostAdapter(name, f"/adapters/{name}", 4, PackedAdapter(name, num_bytes))


@pytest.fixture
def attached() -> Attached:
    return Attached()


@pytest.fixture
def table(attached: Attached) -> AdapterTable:
    table = AdapterTable(attached, num_slots=2, max_bytes=100)
    for name in "abc":
        table.add(host(name))
    return table


def test_the_one_not_used_for_longest_leaves_its_slot(table: AdapterTable, attached: Attached) -> None:
    for name in ("a", "b", "a"):
        table.release(table.take(name))
    third = table.take("c")
    assert [report.is_resident for report in table.reports()] == [True, False, True]
    assert attached.names == ["a", "b", "c"]
    table.release(table.take("a"))
    assert attached.names == ["a", "b", "c"]
    assert {table.take("a").slot, third.slot} == {1, 2}


def test_one_with_sequences_stays(table: AdapterTable) -> None:
    first, second = table.take("a"), table.take("b")
    with pytest.raises(AdapterMissing, match="all 2 adapter slots"):
        table.take("c")
    table.release(second)
    assert table.take("c").slot == second.slot
    assert table.take("a") is first
    assert [report.num_sequences for report in table.reports()] == [2, 0, 1]


def test_one_removed_stays_for_its_sequences_and_takes_no_new_ones(table: AdapterTable, attached: Attached) -> None:
    resident = table.take("a")
    table.remove("a")
    table.remove("a")
    with pytest.raises(AdapterMissing, match="'a' is not on this worker"):
        table.take("a")
    table.add(host("a"))
    assert table.take("a") is resident
    table.remove("a")
    for _ in range(2):
        table.release(resident)
    table.take("b"), table.take("c")
    assert attached.names == ["a", "b", "c"]


def test_the_same_content_is_held_once(table: AdapterTable) -> None:
    before = table.add(host("a"))
    assert table.add(HostAdapter("a", "/elsewhere", 4, PackedAdapter("other", 95))) == before
    assert [report.fingerprint for report in table.reports()] == ["a", "b", "c"]


def test_bytes_and_count_are_bounded(table: AdapterTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFailure, match="101 bytes, and adapter_host_bytes allows 100") as caught:
        table.add(host("large", 71))
    assert caught.value.code == "limit"
    monkeypatch.setattr("worker_service.runtime.adapters.MAX_ADAPTERS", 3)
    with pytest.raises(RuntimeFailure, match="holds 3 adapters"):
        table.add(host("d"))
    assert len(table.reports()) == 3


def test_rows_give_their_adapters_back(table: AdapterTable) -> None:
    rows = SequenceAdapters(table)
    rows.take(5, "a")
    rows.take(7, "a")
    rows.leave(5)
    rows.leave(5)
    assert table.reports()[0].num_sequences == 1
    rows.clear()
    assert table.reports()[0].num_sequences == 0 and not rows.by_row
    with pytest.raises(AdapterMissing):
        SequenceAdapters(None).take(1, "a")
