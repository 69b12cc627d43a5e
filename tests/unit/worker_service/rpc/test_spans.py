"""Which spans a sequence leaves, over chunks, decoding, preemption, stop and drop."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from worker_service.rpc.spans import SequenceSpans
from worker_service.runtime.step import NewSequence, Sampling, StepInput, StepOutput

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    """Feeds steps of one microsecond each and shows the spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = SequenceSpans(provider.get_tracer("test"), rank=2, epoch=3)
        self.step_id = 0

    def step(self, scheduled: dict[int, tuple[int, int]], *new: NewSequence, **fields: Any) -> None:
        """`scheduled` maps a sequence to (computed, scheduled) tokens."""
        self.step_id += 1
        stopped, errors = fields.pop("stopped", []), fields.pop("errors", {})
        step = StepInput(
            step_id=self.step_id,
            new_sequences=new,
            sequence_ids=list(scheduled),
            scheduled_token_counts=[value[1] for value in scheduled.values()],
            computed_token_counts=[value[0] for value in scheduled.values()],
            new_block_counts=[0] * len(scheduled),
            new_block_ids=[],
            finished_sequence_ids=fields.pop("finished", []),
            preempted_sequence_ids=fields.pop("preempted", []),
        )
        output = StepOutput(
            self.step_id,
            stopped_sequence_ids=stopped,
            errors=errors,
            start_unix_ns=self.step_id * 10_000,
            prepare_ns=100,
            forward_ns=800,
            sample_ns=100,
        )
        self.spans.record(step, output)

    @property
    def finished(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.finished]


def sequence(sequence_id: int, num_tokens: int, traceparent: str = TRACEPARENT) -> NewSequence:
    return NewSequence(sequence_id, f"r{sequence_id}", [1] * num_tokens, num_tokens, Sampling(), [], traceparent)


def test_one_span_a_chunk_and_one_for_all_decoding() -> None:
    recorder = Recorder()
    recorder.step({1: (0, 4)}, sequence(1, 10))
    recorder.step({1: (4, 4)})
    recorder.step({1: (8, 2)})
    for computed in range(10, 15):
        recorder.step({1: (computed, 1)})
    assert recorder.names == ["worker.prefill"] * 3
    recorder.step({}, finished=[1])
    assert recorder.names == ["worker.prefill"] * 3 + ["worker.decode"]
    first, decode = recorder.finished[0], recorder.finished[-1]
    assert (first.start_time, first.end_time) == (10_000, 11_000)
    assert (decode.start_time, decode.end_time) == (40_000, 81_000)
    assert decode.attributes is not None
    assert dict(decode.attributes) == {
        "stepwire.rank": 2,
        "stepwire.epoch": 3,
        "stepwire.request_id": "r1",
        "stepwire.sequence_id": 1,
        "stepwire.sequence_index": 0,
        "stepwire.first_step_id": 4,
        "stepwire.last_step_id": 8,
        "stepwire.num_steps": 5,
        "stepwire.outcome": "finished",
    }
    assert recorder.spans.num_tracked == 0


def test_a_preempted_sequence_comes_back_with_a_prefill() -> None:
    recorder = Recorder()
    recorder.step({1: (0, 3)}, sequence(1, 3))
    recorder.step({1: (3, 1)})
    recorder.step({}, preempted=[1])
    recorder.step({1: (0, 5)}, sequence(1, 5))
    recorder.step({1: (5, 1)})
    recorder.step({}, finished=[1])
    assert recorder.names == ["worker.prefill", "worker.decode", "worker.prefill", "worker.decode"]
    outcomes = [span.attributes.get("stepwire.outcome") for span in recorder.finished if span.attributes]
    assert outcomes == [None, "preempted", None, "finished"]


def test_a_single_computed_token_of_a_prompt_is_a_prefill() -> None:
    recorder = Recorder()
    recorder.step({1: (9, 1)}, sequence(1, 10))
    assert recorder.names == ["worker.prefill"]


@pytest.mark.parametrize(("fields", "outcome"), [({"stopped": [1]}, "stopped"), ({"errors": {1: "bad"}}, "failed")])
def test_stop_and_failure_end_the_decoding(fields: dict[str, Any], outcome: str) -> None:
    recorder = Recorder()
    recorder.step({1: (0, 3)}, sequence(1, 3))
    recorder.step({1: (3, 1)}, **fields)
    assert recorder.names == ["worker.prefill", "worker.decode"]
    attributes = recorder.finished[-1].attributes
    assert attributes is not None and attributes["stepwire.outcome"] == outcome
    # Planned before the stop was known.
    recorder.step({1: (4, 1)})
    assert len(recorder.names) == 2


def test_dropping_everything_ends_what_is_open() -> None:
    recorder = Recorder()
    recorder.step({1: (0, 3), 2: (0, 3)}, sequence(1, 3), sequence(2, 3))
    recorder.step({1: (3, 1)})
    recorder.spans.end_all("epoch_ended")
    assert recorder.names == ["worker.prefill"] * 2 + ["worker.decode"]
    assert recorder.spans.num_tracked == 0


@pytest.mark.parametrize("traceparent", ["", TRACEPARENT[:-1] + "0", "00-nonsense", "x" * 1000])
def test_requests_that_are_not_sampled_leave_nothing(traceparent: str) -> None:
    recorder = Recorder()
    recorder.step({1: (0, 3)}, sequence(1, 3, traceparent))
    recorder.step({1: (3, 1)})
    recorder.step({}, finished=[1])
    assert recorder.names == []
    assert recorder.spans.num_tracked == 0
