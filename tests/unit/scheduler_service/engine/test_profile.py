"""One timeline of scheduler and ranks, and profiles that come to nothing."""

import asyncio
import gzip
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.flight import FlightStep
from scheduler_service.engine.ports import StepTimings
from scheduler_service.engine.profile import merge, profile_group
from stepwire.rpc.errors import StepwireError
from tests.support.fake_worker import FAKE_TRACE

BASE_NS = 1_000_000_000_000_000_000


def step(step_id: int, sent_ms: float, answered_ms: float) -> FlightStep:
    """A step of two tokens whose worker began one millisecond after it was sent."""
    plan = StepPlan(step_id, sequence_ids=[4], scheduled_token_counts=[2])
    sent = BASE_NS + int(sent_ms * 1e6)
    timings = StepTimings(sent + 1_000_000, 0, 100_000, 200_000, 50_000)
    return FlightStep(plan, sent, StepResult(step_id, [4], [9]), timings, BASE_NS + int(answered_ms * 1e6))


def merged(*steps: FlightStep, num_ranks: int = 2) -> list[dict[str, Any]]:
    trace = gzip.compress(json.dumps(FAKE_TRACE).encode())
    document = json.loads(gzip.decompress(merge(steps, [trace] * num_ranks)))
    assert document["baseTimeNanoseconds"] == min((s.sent_unix_ns for s in steps), default=0)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_times_of_all_services_are_on_one_clock() -> None:
    events = merged(step(1, 1990, 2010))
    (sent,) = [event for event in events if event["name"] == "step 1"]
    assert (sent["ts"], sent["dur"]) == (0.0, 20_000.0)
    assert sent["args"] == {"sequences": 1, "tokens": 2, "new": 0, "preempted": 0, "finished": 0, "sampled": 1}
    products = [event for event in events if event["name"] == "aten::mm"]
    # 2,000,000.5 us after the base of the rank's trace, and the step was sent 1,990 ms after it.
    assert [event["ts"] for event in products] == [10_000.5] * 2
    assert len({event["pid"] for event in [sent, *products]}) == 3


def test_parts_that_the_worker_reported_follow_each_other() -> None:
    parts = {e["name"]: (e["ts"], e["dur"]) for e in merged(step(7, 0, 5)) if e.get("args") == {"step": 7}}
    assert parts == {"prepare": (1000.0, 100.0), "forward": (1100.0, 200.0), "sample": (1300.0, 50.0)}


def test_steps_in_flight_at_one_time_are_on_different_tracks() -> None:
    events = merged(step(1, 0, 10), step(2, 4, 16), step(3, 11, 21), step(4, 17, 20))
    tracks = {event["name"]: event["tid"] for event in events if event["name"].startswith("step ")}
    assert tracks == {"step 1": 0, "step 2": 1, "step 3": 0, "step 4": 1}
    for track in (0, 1):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_processes_have_names() -> None:
    names = {e["pid"]: e["args"]["name"] for e in merged(step(1, 0, 1)) if e["name"] == "process_name"}
    assert sorted(names.values()) == ["scheduler", "worker, rank 0", "worker, rank 1"]


class _Port:
    """A rank that may fail to begin; `is_profiling` while it profiles."""

    def __init__(self, failure: StepwireError | None = None, delay_s: float = 0) -> None:
        self.is_profiling = False
        self._failure = failure
        self._delay_s = delay_s

    async def start_profile(self, epoch: int, max_steps: int) -> None:
        del epoch, max_steps
        if self._failure is not None:
            raise self._failure
        self.is_profiling = True
        await asyncio.sleep(self._delay_s)

    async def stop_profile(self, epoch: int) -> None:
        del epoch
        if not self.is_profiling:
            raise StepwireError("FIELD_INVALID", "none was begun")
        self.is_profiling = False


async def test_a_profile_that_one_rank_cannot_begin_ends_on_the_others() -> None:
    ports = [_Port(delay_s=0.05), _Port(StepwireError("OUT_OF_MEMORY", "no room"))]
    group: Any = SimpleNamespace(ports=ports, epoch=1, flight=SimpleNamespace(num_answered=0))
    with pytest.raises(StepwireError, match="no room"):
        await profile_group(group, 5, 1)
    assert not any(port.is_profiling for port in ports)


async def test_a_profile_that_is_cancelled_while_it_begins_ends() -> None:
    port = _Port(delay_s=10)
    group: Any = SimpleNamespace(ports=[port], epoch=1, flight=SimpleNamespace(num_answered=0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(profile_group(group, 5, 1), 0.05)
    assert not port.is_profiling
