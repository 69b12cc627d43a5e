"""Profiles of steps: what they show, and that they change nothing."""

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.shares import RankPlace
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.kernels import native
from worker_service.profiled import is_profiling
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import Profile
from worker_service.runtime.step import NewSequence, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings


@pytest.fixture(params=["plain torch", "compiled kernels"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> WorkerRuntime:
    compiled = request.param == "compiled kernels"
    if compiled and native.load() is None:
        pytest.skip("there is no compiler")
    runtime = WorkerRuntime(WorkerSettings.model_validate({"threads": 1, "native_kernels": compiled}))
    runtime.init_device(RankPlace())
    runtime.load_model(make_tiny_llama(tmp_path), "float32", lambda *_: None, lambda: False)
    runtime.initialize_cache(8, 16, 64)
    return runtime


FIRST = StepInput(1, [NewSequence(1, "r", [1, 2, 3, 4, 5], 5, Sampling(), range(2))], [1], [5], [0], [0], [], [], [])


def tokens(runtime: WorkerRuntime, first_step: int, num_steps: int) -> list[int]:
    """So many tokens of one sequence, whose first step is `first_step`."""
    output = runtime.execute(replace(FIRST, step_id=first_step))
    found = list(output.token_ids)
    for i in range(num_steps - 1):
        step = StepInput(first_step + 1 + i, [], [1], [1], [5 + i], [0], [], [], [])
        found += runtime.execute(step).token_ids
    runtime.execute(StepInput(first_step + num_steps, [], [], [], [], [], [], [1], []))
    return found


def events_of(profile: Profile) -> list[dict[str, Any]]:
    document = json.loads(gzip.decompress(profile.trace))
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        if "ts" in event:
            event["unix_ns"] = event["ts"] * 1e3 + document["baseTimeNanoseconds"]
    return events


def test_it_shows_steps_layers_and_head_and_changes_no_token(runtime: WorkerRuntime) -> None:
    undisturbed = tokens(runtime, 1, 4)
    began = time.time_ns()
    runtime.start_profile(100)
    assert tokens(runtime, 6, 4) == undisturbed
    profile = runtime.stop_profile()
    ended = time.time_ns()
    assert profile.num_steps == 5
    assert {"step", "layer 0", "layer 1", "head"} <= {row.part for row in profile.rows}
    for name in ("layer 0", "layer 1", "head"):
        of_part = [row for row in profile.rows if row.part == name]
        assert sum(row.num_calls for row in of_part if row.operator == name) == 4
        assert sum(row.cpu_ns for row in of_part) > 0
    assert [row.cpu_ns for row in profile.rows] == sorted((row.cpu_ns for row in profile.rows), reverse=True)
    steps = [event for event in events_of(profile) if event.get("name") == "step"]
    assert len(steps) == 5
    assert all(began <= event["unix_ns"] <= ended for event in steps)
    assert not is_profiling()


@pytest.mark.parametrize("runtime", ["compiled kernels"], indirect=True)
def test_it_shows_the_operators_of_compiled_layers(runtime: WorkerRuntime) -> None:
    runtime.start_profile(100)
    tokens(runtime, 1, 4)
    profile = runtime.stop_profile()
    layer = {row.operator: row for row in profile.rows if row.part == "layer 1"}
    rest = layer.pop("layer 1")
    assert layer.keys() == {"norms", "qkv", "write_kv", "attention", "o_proj", "gate_up", "down"}
    assert all(row.num_calls == 4 and row.cpu_ns > 0 for row in layer.values())
    whole_ns = sum(event["dur"] for event in events_of(profile) if event.get("name") == "layer 1") * 1e3
    assert rest.cpu_ns + sum(row.cpu_ns for row in layer.values()) == pytest.approx(whole_ns, rel=0.01, abs=1e4)
    assert {row.operator for row in profile.rows if row.part == "head"} >= {"norms", "head"}


def test_it_ends_by_itself_after_its_steps(runtime: WorkerRuntime) -> None:
    runtime.start_profile(2)
    tokens(runtime, 1, 4)
    assert not is_profiling()
    assert runtime.stop_profile().num_steps == 2


def test_one_that_is_begun_again_begins_anew(runtime: WorkerRuntime) -> None:
    runtime.start_profile(100)
    tokens(runtime, 1, 4)
    runtime.start_profile(100)
    tokens(runtime, 6, 1)
    assert runtime.stop_profile().num_steps == 2


def test_there_must_be_one_to_stop(runtime: WorkerRuntime) -> None:
    with pytest.raises(RuntimeFailure, match="StartProfile first"):
        runtime.stop_profile()
