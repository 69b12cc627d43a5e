"""Holds the traces of a run against what its clients saw."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from benchmarks.tracing.load import ROOT_SPAN, Outcome
from stepwire.telemetry import names
from stepwire.traces import Span, Trace, TraceStore

CALL = "stepwire.v1.InferenceService/Generate"
_WORKER_SPANS = (names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE)
# Of a client's view: a token that came this close to a kill may be of either epoch.
_KILL_MARGIN_S = 0.3


@dataclass(frozen=True, slots=True)
class Epochs:
    """How the workers fared: ranks of each epoch, and when one was killed, on the clients' monotonic clock.

    `numbers` are those of the epochs with steps, as the workers' own spans have them: one more than kills. A start
    that fails on the way takes a number too.
    """

    num_ranks: int
    killed_at: Sequence[float] = ()
    numbers: Sequence[int] = ()


@dataclass(slots=True)
class Verdict:
    """Shares from 0 to 1, and what is wrong, in words."""

    complete: float = 0.0
    num_orphans: int = 0
    sum_error_ok: float = 0.0
    attempts: float = 0.0
    num_preempted: int = 0
    num_recovered: int = 0
    num_step_traces: int = 0
    largest_sum_error_s: float = 0.0
    client_latency_within: float = 0.0
    faults: list[str] = field(default_factory=list)


def check(store: TraceStore, outcomes: Sequence[Outcome], epochs: Epochs) -> Verdict:
    """Looks at every trace that there is."""
    verdict = Verdict()
    traces = list(store.recent(limit=store.num_traces))
    seen = {place[0] for trace in traces for place in _places(_worker_spans(trace))}
    epochs = replace(epochs, numbers=sorted(seen))
    if len(seen) != len(epochs.killed_at) + 1:
        verdict.faults.append(f"workers tell of epochs {sorted(seen)} with {len(epochs.killed_at)} kills")
    by_id = {trace.trace_id: trace for trace in traces}
    _check_orphans(traces, verdict)
    verdict.num_step_traces = sum(trace.root.name == names.SPAN_STEP for trace in traces)
    num_traces = Counter(f"{root}" for root in _request_roots(traces))
    ids = Counter(outcome.trace_id for outcome in outcomes)
    num_complete = num_sums = num_sums_ok = num_ran = num_attempts = num_close = 0
    for outcome in outcomes:
        trace = by_id.get(outcome.trace_id)
        problems = ["has no trace"] if trace is None else _problems(trace, outcome)
        if num_traces[outcome.trace_id] > 1 or ids[outcome.trace_id] > 1:
            problems.append("has more traces than one")
        num_complete += not problems
        verdict.faults += [f"{outcome.ask.request_id} ({outcome.code}): {problem}" for problem in problems]
        request = None if trace is None else _request_span(trace)
        if trace is None or request is None:
            continue
        num_sums += 1
        error_s, is_ok = _sum_error(trace, request)
        num_sums_ok += is_ok
        if not is_ok:
            verdict.faults.append(f"{outcome.ask.request_id}: its parts miss its latency by {error_s * 1e3:.2f} ms")
        verdict.largest_sum_error_s = max(verdict.largest_sum_error_s, error_s)
        latency_s = outcome.ended_at - outcome.began_at
        num_close += abs(latency_s - request.duration_ns / 1e9) <= 0.02 * latency_s + 0.001
        verdict.num_preempted += any(span.name == names.SPAN_PREEMPTED for span in trace.spans)
        verdict.num_recovered += any(span.name == names.SPAN_RECOVERY for span in trace.spans)
        if wanted := _wanted_attempts(trace, outcome, epochs):
            num_ran += 1
            found = Counter(_places(span for span in trace.spans if span.name == names.SPAN_ATTEMPT))
            has_all = wanted <= found.keys() and set(found.values()) == {1}
            num_attempts += has_all
            if not has_all:
                verdict.faults.append(f"{outcome.ask.request_id}: attempts {dict(found)}, wanted {sorted(wanted)}")
    verdict.complete = num_complete / len(outcomes)
    verdict.sum_error_ok = num_sums_ok / max(1, num_sums)
    verdict.attempts = num_attempts / max(1, num_ran)
    verdict.client_latency_within = num_close / max(1, num_sums)
    return verdict


def _request_roots(traces: Iterable[Trace]) -> Iterable[str]:
    """Trace ids, once for each root span of a request's trace."""
    for trace in traces:
        for span in trace.spans:
            if not span.parent_id and span.name not in (names.SPAN_STEP, names.SPAN_STARTUP):
                yield trace.trace_id


def _check_orphans(traces: Iterable[Trace], verdict: Verdict) -> None:
    for trace in traces:
        known = {span.span_id for span in trace.spans}
        for span in trace.spans:
            if span.parent_id and span.parent_id not in known:
                verdict.num_orphans += 1
                verdict.faults.append(f"{span.service} {span.name} of {trace.trace_id} hangs from a span nobody sent")


def _request_span(trace: Trace) -> Span | None:
    """The request's own span, below the SERVER span of the call."""
    return next((span for span in trace.spans if names.GEN_AI_OPERATION in span.attributes), None)


def _problems(trace: Trace, outcome: Outcome) -> list[str]:
    """What a trace lacks, or says otherwise than its client saw it."""
    problems = []
    by_kind = {
        "root": [span for span in trace.spans if span.name == ROOT_SPAN],
        "client": [span for span in trace.spans if span.name == CALL and span.kind == "client"],
        "server": [span for span in trace.spans if span.name == CALL and span.kind == "server"],
        "request": [span for span in trace.spans if names.GEN_AI_OPERATION in span.attributes],
    }
    if _never_began(by_kind["server"], outcome):
        # The service has nothing more to tell of it.
        del by_kind["request"]
    for kind, spans in by_kind.items():
        if len(spans) != 1:
            return [f"has {len(spans)} {kind} spans"]
    if "request" not in by_kind:
        found = by_kind["client"][0].attributes.get(names.RPC_STATUS)
        return [] if found == outcome.code else [f"the client span says {found}"]
    for side in ("client", "server"):
        found = by_kind[side][0].attributes.get(names.RPC_STATUS)
        if found != outcome.code:
            problems.append(f"the {side} span says {found}")
    request = by_kind["request"][0]
    reason = request.attributes.get(names.ERROR_TYPE, "")
    if reason != outcome.reason:
        problems.append(f"the request span says {reason or 'no error'}")
    if request.is_error != (outcome.reason not in ("", "CANCELLED")):
        problems.append(f"the request span's status is{'' if request.is_error else ' not'} an error")
    if request.attributes.get(names.REQUEST_ID) != outcome.ask.request_id:
        problems.append("the request span has another id")
    return problems


def _never_began(server: Sequence[Span], outcome: Outcome) -> bool:
    """Whether the call was over for its client before the service could begin with it, as both sides tell."""
    said = any(span.attributes.get(names.OUTCOME) == names.OUTCOME_NOT_BEGUN for span in server)
    return said and not outcome.token_times and outcome.code in ("CANCELLED", "DEADLINE_EXCEEDED")


def _sum_error(trace: Trace, request: Span) -> tuple[float, bool]:
    """By how much the parts miss the latency of the call, in seconds, and whether that is little enough."""
    server = next((span for span in trace.spans if span.span_id == request.parent_id), request)
    parts = [span for span in trace.spans if span.parent_id == request.span_id and span.name in names.REQUEST_PARTS]
    error_s = abs(sum(part.duration_ns for part in parts) - server.duration_ns) / 1e9
    return error_s, error_s <= 0.02 * server.duration_ns / 1e9 + 0.001


def _worker_spans(trace: Trace) -> Iterable[Span]:
    return (span for span in trace.spans if span.name in _WORKER_SPANS)


def _places(spans: Iterable[Span]) -> list[tuple[int, int]]:
    return [(int(span.attributes[names.EPOCH]), int(span.attributes[names.RANK])) for span in spans]


def _wanted_attempts(trace: Trace, outcome: Outcome, epochs: Epochs) -> set[tuple[int, int]]:
    """(epoch, rank) of which there must be an attempt: by the workers' own spans, and by when its tokens came."""
    found = {epoch for epoch, _ in _places(_worker_spans(trace))}
    bounds = [float("-inf"), *epochs.killed_at, float("inf")]
    for number, (begin, end) in zip(epochs.numbers, pairwise(bounds), strict=False):
        # What came close to a kill may be of either epoch.
        if any(begin + _KILL_MARGIN_S < time < end - _KILL_MARGIN_S for time in outcome.token_times):
            found.add(number)
    return {(epoch, rank) for epoch in found for rank in range(epochs.num_ranks)}
