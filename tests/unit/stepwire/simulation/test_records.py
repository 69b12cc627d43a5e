import statistics

import pytest

from stepwire.simulation.records import Distribution, RequestRecord, Slo, percentile, summarise


def finished(arrival: float, first: float, end: float, num: int, **fields: float) -> RequestRecord:
    record = RequestRecord(arrival, first_token_s=first, end_s=end, num_output_tokens=num, started_s=arrival + 0.25)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_times_of_one_request() -> None:
    record = finished(1.0, 1.5, 3.5, 5)
    assert (record.ttft_s, record.tpot_s, record.latency_s, record.wait_s) == (0.5, 0.5, 2.5, 0.25)
    assert RequestRecord(1.0).ttft_s is RequestRecord(1.0).latency_s is RequestRecord(1.0).wait_s is None
    assert finished(1.0, 1.5, 1.5, 1).tpot_s is None


def test_percentiles_are_those_of_the_statistics_module() -> None:
    values = sorted([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert Distribution.of([None, *values]).largest == 9.0
    assert Distribution.of([None]).num == 0


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5, tpot_s=0.5), True),
        (Slo(ttft_s=0.49), False),
        (Slo(tpot_s=0.49), False),
    ],
)
def test_an_slo_bounds_both_times(slo: Slo, is_met: bool) -> None:
    assert slo.is_met(finished(1.0, 1.5, 3.5, 5)) is is_met


def test_a_deadline_always_counts_and_a_failure_is_never_good() -> None:
    assert Slo().is_met(finished(1.0, 1.5, 3.5, 5, deadline_s=2.5))
    assert not Slo().is_met(finished(1.0, 1.5, 3.5, 5, deadline_s=2.4))
    failed = finished(1.0, 1.5, 3.5, 5)
    failed.error = "DEADLINE_EXCEEDED"
    assert not Slo().is_met(failed)


def test_a_summary_counts_everything_once() -> None:
    failed = RequestRecord(2.0, end_s=5.0, error="QUEUE_FULL")
    summary = summarise([finished(1.0, 1.5, 3.5, 5), finished(1.0, 2.5, 3.0, 2), failed], Slo(ttft_s=1.0))
    assert (summary.num_requests, summary.num_finished, summary.num_good) == (3, 2, 1)
    assert summary.errors == {"QUEUE_FULL": 1}
    assert summary.duration_s == 4.0
    assert (summary.output_tokens_per_s, summary.requests_per_s, summary.goodput) == (7 / 4, 2 / 4, 1 / 4)
    assert summary.as_json()["ttft_s"]["max"] == 1.5  # type: ignore[index]
    assert summarise([]).goodput == 0.0
