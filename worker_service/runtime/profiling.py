"""Profiles of steps by torch's profiler: a timeline, and the time of each operator by layer."""

import gzip
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from worker_service.profiled import part, record_parts
from worker_service.runtime.report import Profile, ProfileRow

STEP = "step"
# Parts that rows are told by; others belong to the part around them.
_PLACES = ("layer ", "embed", "head", "sample", STEP)


class StepProfiler:
    """Profiles the next `max_steps` steps of this thread. Made, used and stopped on the device thread."""

    def __init__(self, max_steps: int, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._num_left = max_steps
        self._num_done = 0
        # Its library says on standard error that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        self._profile: Any = profile(activities=activities)
        self._profile.start()
        self._is_running = True
        # Calls and nanoseconds of operators that torch does not see, by part and operator.
        self._noted: dict[tuple[str, str], tuple[int, int]] = {}
        record_parts(record_function, self._note)

    def step(self) -> AbstractContextManager[object]:
        """What is put around a step; the one after the last finds the profile stopped."""
        if self._num_left == 0:
            self._halt()
        else:
            self._num_left -= 1
            self._num_done += 1
        return part(STEP)

    def stop(self) -> Profile:
        """Ends the profile. Its timeline is gzip-compressed JSON in Chrome's trace format, times since the epoch."""
        self._halt()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), 5)
        return Profile(self._num_done, _rows(self._profile.events(), self._noted), trace)

    def _note(self, name: str, operator: str, nanoseconds: int) -> None:
        num_calls, total_ns = self._noted.get((name, operator), (0, 0))
        self._noted[name, operator] = (num_calls + 1, total_ns + nanoseconds)

    def _halt(self) -> None:
        if self._is_running:
            self._is_running = False
            record_parts(None)
            self._profile.stop()


def _rows(events: Any, noted: Mapping[tuple[str, str], tuple[int, int]]) -> tuple[ProfileRow, ...]:
    """The time that each operator took itself, summed by the part that it ran in; the longest first.

    What was noted of operators within a part is no time of its own of that part.
    """
    counts: dict[tuple[str, str], int] = defaultdict(int)
    cpu_ns: dict[tuple[str, str], float] = defaultdict(float)
    device_ns: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        place = _place(event)
        if place is None:
            continue
        key = (place, event.name)
        counts[key] += 1
        cpu_ns[key] += event.self_cpu_time_total * 1e3
        device_ns[key] += event.self_device_time_total * 1e3
    for (place, operator), (num_calls, nanoseconds) in noted.items():
        cpu_ns[place, place] = max(0.0, cpu_ns[place, place] - nanoseconds)
        if operator != place:
            counts[place, operator] += num_calls
        cpu_ns[place, operator] += nanoseconds
    rows = [ProfileRow(*key, counts[key], round(cpu_ns[key]), round(device_ns[key])) for key in counts]
    return tuple(sorted(rows, key=lambda row: -max(row.cpu_ns, row.device_ns)))


def _place(event: Any) -> str | None:
    """The innermost part around an event, itself included; None outside of steps."""
    while event is not None:
        if event.name.startswith(_PLACES):
            return str(event.name)
        event = event.cpu_parent
    return None
