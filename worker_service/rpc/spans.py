"""Spans of the sequences of sampled requests: one for each prefill chunk, one for all of a sequence's decoding."""

from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Tracer, get_current_span
from opentelemetry.util.types import AttributeValue

from stepwire.telemetry import names
from stepwire.telemetry.trace import context_from_traceparent, record_span
from worker_service.runtime.step import NewSequence, StepInput, StepOutput


@dataclass(slots=True)
class _Track:
    """A sequence whose request is sampled. Times are wall-clock nanoseconds since the Unix epoch."""

    parent: Context
    request_id: str
    sequence_index: int
    num_known: int
    start_ns: int = 0
    end_ns: int = 0
    first_step_id: int = 0
    last_step_id: int = 0
    num_steps: int = 0


def request_ids(new: NewSequence) -> dict[str, str]:
    """What a log record about a sequence carries: the ids of its request and of its trace, when it has one."""
    context = get_current_span(context_from_traceparent(new.traceparent)).get_span_context()
    traced = {"trace_id": f"{context.trace_id:032x}"} if context.is_valid else {}
    return {"request_id": new.request_id, **traced}


class SequenceSpans:
    """Follows sequences from step to step and records what their requests' traces show of this worker.

    A decode span is recorded when its sequence ends, is preempted or is dropped, so a trace grows with
    the chunks of its prompt and never with its tokens. Requests that are not sampled cost one
    look at their trace context.
    """

    def __init__(self, tracer: Tracer, *, rank: int, epoch: int) -> None:
        self._tracer = tracer
        self._common: dict[str, AttributeValue] = {names.RANK: rank, names.EPOCH: epoch}
        self._tracks: dict[int, _Track] = {}

    @property
    def num_tracked(self) -> int:
        """Sequences that are followed."""
        return len(self._tracks)

    def record(self, step: StepInput, output: StepOutput) -> None:
        """Notes an executed step. To be called in the order of the steps."""
        if self._tracks:
            self._end(step.finished_sequence_ids, "finished")
            self._end(step.preempted_sequence_ids, "preempted")
        for new in step.new_sequences:
            self._follow(new)
        if not self._tracks:
            return
        start_ns = output.start_unix_ns
        end_ns = start_ns + output.prepare_ns + output.forward_ns + output.sample_ns
        for index, sequence_id in enumerate(step.sequence_ids):
            track = self._tracks.get(sequence_id)
            if track is None:
                continue
            if step.computed_token_counts[index] < track.num_known:
                self._record_chunk(sequence_id, track, step, index, (start_ns, end_ns))
            else:
                if track.num_steps == 0:
                    track.start_ns, track.first_step_id = start_ns, step.step_id
                track.end_ns, track.last_step_id = end_ns, step.step_id
                track.num_steps += 1
        self._end(output.stopped_sequence_ids, "stopped")
        self._end(output.errors, "failed")

    def end_all(self, outcome: str) -> None:
        """Records what is open, because the worker drops its sequences."""
        self._end(list(self._tracks), outcome)

    def _follow(self, new: NewSequence) -> None:
        if not new.traceparent:
            return
        parent = context_from_traceparent(new.traceparent)
        span_context = get_current_span(parent).get_span_context()
        if span_context.is_valid and span_context.trace_flags.sampled:
            self._tracks[new.sequence_id] = _Track(
                parent, new.request_id, new.sampling.sequence_index, len(new.token_ids)
            )

    def _record_chunk(
        self, sequence_id: int, track: _Track, step: StepInput, index: int, times_ns: tuple[int, int]
    ) -> None:
        attributes = self._attributes(sequence_id, track)
        attributes[names.STEP_ID] = step.step_id
        attributes[names.NUM_TOKENS] = step.scheduled_token_counts[index]
        record_span(self._tracer, names.SPAN_WORKER_PREFILL, track.parent, times_ns, attributes=attributes)

    def _end(self, sequence_ids: Iterable[int], outcome: str) -> None:
        for sequence_id in sequence_ids:
            track = self._tracks.pop(sequence_id, None)
            if track is None or track.num_steps == 0:
                continue
            attributes = self._attributes(sequence_id, track)
            attributes[names.FIRST_STEP_ID] = track.first_step_id
            attributes[names.LAST_STEP_ID] = track.last_step_id
            attributes[names.NUM_STEPS] = track.num_steps
            attributes[names.OUTCOME] = outcome
            times_ns = (track.start_ns, track.end_ns)
            record_span(self._tracer, names.SPAN_WORKER_DECODE, track.parent, times_ns, attributes=attributes)

    def _attributes(self, sequence_id: int, track: _Track) -> dict[str, AttributeValue]:
        return {
            **self._common,
            names.REQUEST_ID: track.request_id,
            names.SEQUENCE_ID: sequence_id,
            names.SEQUENCE_INDEX: track.sequence_index,
        }
