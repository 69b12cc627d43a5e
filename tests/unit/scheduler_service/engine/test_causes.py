"""Of all that ranks say at the end of an epoch, the one thing that the rest follows from."""

import asyncio
from typing import Any

import pytest

from scheduler_service.engine import causes
from scheduler_service.engine.causes import Causes, EpochEnd, Kind, RankFailure, root_of
from scheduler_service.engine.ports import Place
from scheduler_service.engine.ranks import Rank
from scheduler_service.engine.supervision import ProcessEnd, Unsupervised
from stepwire.rpc.errors import StepwireError


class Port:
    """Of a worker, what an error names."""

    def __init__(self, number: int) -> None:
        self.address = f"10.0.0.{number}:50061"


class Supervisor:
    """Says how processes ended, as soon as it is asked."""

    def __init__(self, **ends: ProcessEnd) -> None:
        self.ends = ends

    async def end_of(self, address: str, process_id: int, timeout_s: float) -> ProcessEnd | None:
        return self.ends.get(f"p{process_id}")

    def replace(self, address: str, process_id: int) -> None:
        raise AssertionError("nobody asks here")


def rank(number: int) -> Rank:
    return Rank(number, Port(number), Place(0, 1, 0, 1), f"host{number}", 100 + number)  # type: ignore[arg-type]


def broken() -> StepwireError:
    return StepwireError("WORKER_FAILED", "the connection broke", {"grpc_code": "UNAVAILABLE"})


def failure(number: int, kind: Kind, text: str = "it failed") -> RankFailure:
    return RankFailure(rank(number), kind, StepwireError("WORKER_FAILED", text))


async def concluded(failures: list[RankFailure], num_ranks: int, supervisor: Any = None) -> EpochEnd:
    """What comes of these failures."""
    ends: asyncio.Queue[EpochEnd] = asyncio.Queue()
    collected = Causes(7, num_ranks, supervisor or Unsupervised(), on_end=ends.put_nowait)
    assert not collected.is_ending
    for one in failures:
        collected.add(one)
        assert collected.is_ending
    end = await asyncio.wait_for(ends.get(), 5)
    await asyncio.sleep(0)
    assert ends.empty()
    return end


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (broken(), Kind.EXIT),
        (StepwireError("OUT_OF_MEMORY", "full"), Kind.OWN_ERROR),
        (StepwireError("STATE_MISMATCH", "3, not 4"), Kind.OWN_ERROR),
        (StepwireError("DRAINING", "told to stop"), Kind.OWN_ERROR),
    ],
)
def test_what_the_end_of_a_stream_says(error: StepwireError, kind: Kind) -> None:
    assert RankFailure.of_stream(rank(0), error).kind is kind


@pytest.mark.parametrize("first", range(len(Kind)))
def test_the_nearest_to_the_root_is_found_whenever_it_comes(first: int) -> None:
    order = list(Kind)[first:] + list(Kind)[:first]
    failures = [failure(number, kind) for number, kind in enumerate(order)]
    assert root_of(failures).kind is Kind.EXIT
    assert root_of([f for f in failures if f.kind is not Kind.EXIT]).kind is Kind.OWN_ERROR
    assert root_of([f for f in failures if f.kind > Kind.OWN_ERROR]).kind is Kind.SILENT


def test_of_a_kind_the_first_counts() -> None:
    assert root_of([failure(2, Kind.SILENT), failure(0, Kind.SILENT)]).rank.rank == 2


async def test_all_ranks_are_waited_for_but_no_longer_than_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    end = await concluded([failure(1, Kind.OTHERS), failure(0, Kind.OWN_ERROR, "full")], num_ranks=2)
    assert (end.epoch, end.root.rank.rank) == (7, 0)
    monkeypatch.setattr(causes, "COLLECT_S", 0.05)
    end = await concluded([failure(1, Kind.OTHERS)], num_ranks=2)
    assert end.root.rank.rank == 1


async def test_the_error_names_the_rank_and_how_its_process_ended() -> None:
    lost = RankFailure.of_stream(rank(3), broken())
    supervisor = Supervisor(p103=ProcessEnd(-11, "worker 3 was killed by SIGSEGV"))
    end = await concluded([lost], 1, supervisor)
    assert end.error.reason == "WORKER_FAILED"
    assert end.error.message == "execute_model failed on rank 3 at 10.0.0.3:50061 on host host3: " + (
        "worker 3 was killed by SIGSEGV"
    )
    assert end.error.metadata | {"rank": "3", "exit_status": "-11", "process_id": "103"} == end.error.metadata
    assert end.error.retry_after_s is not None
    assert end.root.is_fault is True


async def test_a_second_failure_of_a_rank_is_not_heard() -> None:
    lost = rank(0)
    first = RankFailure(lost, Kind.OWN_ERROR, StepwireError("OUT_OF_MEMORY", "full"))
    second = RankFailure(lost, Kind.EXIT, broken())
    end = await concluded([first, second], 1)
    assert end.root is first


async def test_a_fence_is_final_and_waited_for_no_further() -> None:
    fence = RankFailure(rank(0), Kind.OWN_ERROR, StepwireError("FENCED", "taken"))
    end = await asyncio.wait_for(concluded([fence], 64), 0.4)
    assert end.is_final
    assert (end.error.reason, end.error.retry_after_s) == ("FENCED", None)


async def test_nothing_is_told_once_it_is_cancelled() -> None:
    told: list[EpochEnd] = []
    collected = Causes(1, 1, Unsupervised(), on_end=told.append)
    collected.add(failure(0, Kind.EXIT))
    collected.cancel()
    collected.add(failure(0, Kind.EXIT))
    await asyncio.sleep(0.02)
    assert told == []


@pytest.mark.parametrize(
    ("kind", "reason", "end", "is_fault"),
    [
        (Kind.EXIT, "WORKER_FAILED", None, None),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(-9, "killed"), False),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(-15, "ended"), False),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(0, "stopped"), False),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(143, "stopped at once"), False),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(-11, "crashed"), True),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(-6, "aborted"), True),
        (Kind.EXIT, "WORKER_FAILED", ProcessEnd(3, "device failed"), True),
        (Kind.OWN_ERROR, "OUT_OF_MEMORY", None, True),
        (Kind.OWN_ERROR, "STATE_MISMATCH", None, True),
        (Kind.OWN_ERROR, "DRAINING", None, False),
        (Kind.SILENT, "WORKER_FAILED", None, False),
        (Kind.HUNG, "WORKER_FAILED", None, True),
        (Kind.OTHERS, "WORKER_FAILED", None, False),
    ],
)
def test_a_fault_inside_a_worker_is_told_from_a_kill_and_a_lost_host(
    kind: Kind, reason: str, end: ProcessEnd | None, is_fault: bool | None
) -> None:
    assert RankFailure(rank(0), kind, StepwireError(reason, "x"), end).is_fault is is_fault
