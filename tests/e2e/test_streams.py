"""Many streams at once, dropped streams, and what is left when they are over; on the demo model."""

import asyncio
import json
from pathlib import Path
from typing import Any

from stepwire.client import AsyncClient, Client, Event, Finished, Output, Started
from stepwire.telemetry import names
from stepwire.telemetry.setup import Telemetry
from stepwire.traces import Trace
from tests.support.collector import Collector
from tests.support.stack import Server

NUM_STREAMS = 32
SERVICES = {names.SERVICE_CLIENT, names.SERVICE_SCHEDULER, names.SERVICE_WORKER}


def settings_of(number: int) -> dict[str, Any]:
    """Of the stream of this number: all lengths differ, and so do the ways to sample."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": number},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "n": 2, "logprobs": 3},
        {"temperature": 0.0, "presence_penalty": 1.0, "stop": ["the", "\n\n"]},
        {"temperature": 0.9, "frequency_penalty": 0.5, "min_tokens": 3},
        {"temperature": 1.0, "stop_token_ids": [28, 30], "n": 3, "seed": 3},
        {"temperature": 0.0, "logprobs": 0, "ignore_eos": True},
    ]
    return {**ways[number % len(ways)], "max_tokens": number + 1 if number != 2 else 8}


async def events_of(client: AsyncClient, number: int) -> list[Event]:
    prompt = "Tell me about the number " + " and ".join(str(i) for i in range(number + 1))
    fields = settings_of(number)
    if "min_tokens" in fields:
        fields["max_tokens"] = max(fields["max_tokens"], fields["min_tokens"])
    return [event async for event in client.generate(prompt, request_id=f"many-{number}", timeout=150, **fields)]


def assert_ended_exactly_once(events: list[Event], fields: dict[str, Any]) -> None:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    outputs = [event for event in events[1:-1] if isinstance(event, Output)]
    assert len(outputs) == len(events) - 2
    sequences = {output.sequence_index for output in outputs}
    assert sequences == set(range(fields.get("n", 1)))
    for index in sequences:
        own = [output for output in outputs if output.sequence_index == index]
        positions = [position for output in own for position in output.positions]
        assert positions == list(range(len(positions)))
        assert [output.finish_reason is not None for output in own] == [False] * (len(own) - 1) + [True]
    delivered = sum(len(output.token_ids) for output in outputs)
    assert events[-1].usage.num_output_tokens == delivered


async def test_32_streams_all_end_exactly_once_and_leave_every_block_free(demo: Server) -> None:
    async with AsyncClient(demo.target) as client:
        streams = await asyncio.gather(*(events_of(client, number) for number in range(NUM_STREAMS)))
    for number, events in enumerate(streams):
        assert_ended_exactly_once(events, settings_of(number))
    model = await asyncio.to_thread(demo.wait_idle, 2.0)
    assert model.num_free_blocks == model.num_blocks


def test_a_dropped_stream_frees_its_blocks_at_once(demo: Server) -> None:
    with demo.client() as client:
        stream = client.generate("Count: 1, 2, 3,", max_tokens=900, ignore_eos=True, request_id="dropped")
        outputs = [event for event, _ in zip(stream, range(4), strict=False) if isinstance(event, Output)]
        assert len(outputs) == 3
        assert client.get_model().num_free_blocks < client.get_model().num_blocks
        stream.close()
        demo.wait_idle(5.0)
    line = _line_of(demo.log_path, "request_cancelled", "dropped")
    assert line["output_tokens"] < 100


def test_a_passed_deadline_frees_what_the_request_holds(demo: Server) -> None:
    with demo.client() as client:
        events: list[Event] = []
        error = None
        try:
            events.extend(client.generate("Count: 1, 2, 3,", max_tokens=900, ignore_eos=True, timeout=1.0))
        except Exception as raised:
            error = raised
        assert getattr(error, "reason", None) == "DEADLINE_EXCEEDED"
        demo.wait_idle(5.0)


def test_the_scheduler_never_loads_torch(demo: Server) -> None:
    with demo.client() as client:
        client.complete("A request that was served", max_tokens=2)
    pids = demo.pids
    loaded = {name: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert loaded == {"scheduler": False, "worker": True}


def test_one_trace_runs_through_client_scheduler_worker_and_their_logs(demo: Server, collector: Collector) -> None:
    telemetry = Telemetry.start(names.SERVICE_CLIENT, otlp_endpoint=collector.endpoint)
    try:
        with Client(demo.target, tracer_provider=telemetry.tracer_provider) as client:
            client.complete("A traced request", max_tokens=4, ignore_eos=True, request_id="traced")
    finally:
        telemetry.shutdown()
    trace = collector.wait_for("traced", is_whole)
    assert trace.root.service == names.SERVICE_CLIENT
    by_id = {span.span_id: span for span in trace.spans}
    assert [span.name for span in trace.spans if span.parent_id not in by_id] == [trace.root.name]
    request = next(span for span in trace.spans if span.name.startswith(names.OPERATION_TEXT_COMPLETION))
    parts = {span.name for span in trace.spans if span.parent_id == request.span_id}
    expected = (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE, names.SPAN_WORKER_PREFILL)
    assert parts >= {*expected, names.SPAN_WORKER_DECODE}
    assert {line["trace_id"] for line in _lines_of(demo.log_path, "traced")} == {trace.trace_id}
    assert {line["trace_id"] for line in _lines_of(demo.worker_log_path, "traced")} == {trace.trace_id}


def test_a_start_is_one_trace(demo: Server, collector: Collector) -> None:
    starts = collector.find(names.SPAN_STARTUP)
    assert starts
    for start in starts:
        assert {names.SERVICE_SCHEDULER, names.SERVICE_WORKER} <= set(start.services)
        assert {"startup.load_model", "startup.warm_up"} <= {span.name for span in start.spans}


def is_whole(trace: Trace) -> bool:
    known = {span.span_id for span in trace.spans}
    has_decode = any(span.name == names.SPAN_WORKER_DECODE for span in trace.spans)
    return set(trace.services) >= SERVICES and has_decode and all(s.parent_id in known for s in trace.spans[1:])


def _lines_of(path: Path, request_id: str) -> list[dict[str, Any]]:
    """The records about a request; at least one."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    found = [record for record in records if record.get("request_id") == request_id]
    assert found, f"no line about {request_id} in {path}"
    return found


def _line_of(path: Path, message: str, request_id: str) -> dict[str, Any]:
    (line,) = (line for line in _lines_of(path, request_id) if line["message"] == message)
    return line
