"""What the benchmark of kills makes of the streams that it saw."""

from benchmarks.recovery import Followed, Job, Outcome, summary
from benchmarks.serving import percentile

JOB = Job("a", 3, 0.0, 0)


def stream(times: list[float], token_ids: list[int], ended: float = 10.0, error: str = "") -> Followed:
    return Followed(JOB, 0.0, times, list(range(len(token_ids))), token_ids, ended, error)


def test_a_pause_reaches_to_the_first_token_that_was_not_on_its_way() -> None:
    seen = stream([1.0, 4.02, 5.5], [7, 8, 9])
    assert seen.pause_after(4.0) == 1.5
    assert seen.pause_after(11.0) is None
    assert stream([1.0], [7], ended=3.0).pause_after(4.0) is None


def test_only_whole_and_equal_streams_are_complete() -> None:
    good = stream([1.0, 2.0, 3.0], [7, 8, 9])
    bad = [
        stream([1.0], [7]),
        stream([1.0, 2.0, 3.0], [7, 8, 1]),
        stream([1.0], [7], error="WORKER_FAILED: gone"),
        Followed(JOB, 0.0, [1.0], [0, 1, 1], [7, 8, 9], 9.0),
    ]
    outcome = Outcome([good, *bad], [0.5], [1.0, 2.0], {JOB: [7, 8, 9]})
    assert len(outcome.problems()) == 4
    bars, _ = summary({"demo": outcome})
    assert bars.keys() == {"complete", "pause_p95_s", "ready_p95_s"}
    assert bars["complete"].value == 0.2
    assert not bars["complete"].ok


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 95) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile(list(range(1, 101)), 95) == 95
