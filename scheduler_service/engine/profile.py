"""Profiles of a whole group: every rank's timeline and the scheduler's steps on one clock."""

import asyncio
import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from scheduler_service.engine.changes import all_of
from scheduler_service.engine.flight import FlightStep
from scheduler_service.engine.group import WorkerGroup
from scheduler_service.engine.ports import RankProfile
from stepwire.rpc.errors import StepwireError

MAX_STEPS = 200
_SCHEDULER_PID = 1
_FIRST_RANK_PID = 2
# The track of what the output rank reported, below those of the steps.
_PARTS = 100


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """Each rank's profile, and of all together `timeline`: gzip-compressed JSON in Chrome's trace format."""

    ranks: Sequence[RankProfile]
    timeline: bytes


async def profile_group(group: WorkerGroup, num_steps: int, timeout_s: float) -> GroupProfile:
    """Profiles the next steps on every rank. Raises StepwireError, also when there are none within `timeout_s`."""
    if not 1 <= num_steps <= MAX_STEPS:
        metadata = {"field": "step_count", "found": str(num_steps), "expected": f"1 to {MAX_STEPS}"}
        raise StepwireError("FIELD_OUT_OF_RANGE", f"step_count {num_steps} lies outside 1 to {MAX_STEPS}", metadata)
    ports = group.ports
    first = group.flight.num_answered
    try:
        # A step that is in flight now may still be profiled on one rank and not on another.
        await all_of(port.start_profile(group.epoch, num_steps + 2) for port in ports)
        with suppress(TimeoutError):
            await asyncio.wait_for(group.flight.wait_answered(first + num_steps), timeout_s)
    except BaseException:
        # Ranks that have begun would go on, and nobody would ask for what they keep.
        await asyncio.gather(*(port.stop_profile(group.epoch) for port in ports), return_exceptions=True)
        raise
    profiles = await asyncio.gather(*(port.stop_profile(group.epoch) for port in ports))
    num_done = group.flight.num_answered - first
    if num_done == 0:
        text = f"no step ran within {timeout_s:g} s: profile while requests run"
        raise StepwireError("DEADLINE_EXCEEDED", text, {"seconds": f"{timeout_s:g}"})
    steps = [step for step in group.flight.steps() if step.answered_unix_ns][-num_done:]
    timeline = await asyncio.to_thread(merge, steps, [profile.trace for profile in profiles])
    return GroupProfile(profiles, timeline)


def merge(steps: Sequence[FlightStep], traces: Sequence[bytes]) -> bytes:
    """One timeline of the scheduler's steps and the ranks' traces, both with times since the Unix epoch.

    A process a service: the scheduler's has a track for each step in flight, with its plan, and one for the parts that
    the output rank reported.
    """
    ranks = [json.loads(gzip.decompress(trace)) for trace in traces]
    base_ns = min((step.sent_unix_ns for step in steps), default=0)
    events = [*_named(_SCHEDULER_PID, "scheduler"), *_scheduler_events(steps, base_ns)]
    for rank, trace in enumerate(ranks):
        pid = _FIRST_RANK_PID + rank
        shift_us = (int(trace.get("baseTimeNanoseconds", 0)) - base_ns) / 1e3
        events += _named(pid, f"worker, rank {rank}")
        events += [_moved(event, pid, shift_us) for event in trace["traceEvents"] if _is_kept(event)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 5)


def _named(pid: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]


def _is_kept(event: Mapping[str, Any]) -> bool:
    return event.get("ph") in ("X", "i", "s", "f") or event.get("name") == "thread_name"


def _moved(event: dict[str, Any], pid: int, shift_us: float) -> dict[str, Any]:
    moved = {**event, "pid": pid}
    if "ts" in event:
        moved["ts"] = float(event["ts"]) + shift_us
    return moved


def _scheduler_events(steps: Sequence[FlightStep], base_ns: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    # Steps in flight at one time overlap, so they take turns on tracks.
    ends: list[int] = []
    for step in steps:
        track = next((i for i, end in enumerate(ends) if end <= step.sent_unix_ns), len(ends))
        ends[track : track + 1] = [step.answered_unix_ns]
        plan = step.plan
        arguments = {
            "sequences": len(plan.sequence_ids),
            "tokens": plan.num_tokens,
            "new": len(plan.new_sequences),
            "preempted": len(plan.preempted_sequence_ids),
            "finished": len(plan.finished_sequence_ids),
            "sampled": 0 if step.result is None else len(step.result.sequence_ids),
        }
        span = (step.sent_unix_ns - base_ns, step.answered_unix_ns - step.sent_unix_ns)
        events.append(_event(f"step {plan.step_id}", track, span, arguments))
        events += _part_events(step, base_ns)
    tracks = [(i, f"steps in flight, {i + 1}") for i in range(len(ends))] + [(_PARTS, "output rank, as reported")]
    return [
        *({"ph": "M", "name": "thread_name", "pid": _SCHEDULER_PID, "tid": i, "args": {"name": n}} for i, n in tracks),
        *events,
    ]


def _part_events(step: FlightStep, base_ns: int) -> list[dict[str, Any]]:
    timings = step.timings
    if timings is None:
        return []
    events, start = [], timings.start_unix_ns - base_ns
    parts = (("prepare", timings.prepare_ns), ("forward", timings.forward_ns), ("sample", timings.sample_ns))
    for name, duration in parts:
        events.append(_event(name, _PARTS, (start, duration), {"step": step.plan.step_id}))
        start += duration
    return events


def _event(name: str, track: int, span: tuple[int, int], arguments: Mapping[str, int]) -> dict[str, Any]:
    """A complete event; `span` is start and duration in nanoseconds."""
    start, duration = span
    event = {"ph": "X", "name": name, "pid": _SCHEDULER_PID, "tid": track}
    return {**event, "ts": start / 1e3, "dur": duration / 1e3, "args": dict(arguments)}
