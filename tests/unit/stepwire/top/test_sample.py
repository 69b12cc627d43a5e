"""Readings and what changed between them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stepwire.top.sample import Change, Sample, changes, read

TEXT = """
# TYPE steps counter
steps_total{rank="0"} 10
steps_total{rank="1"} 5
# TYPE wait histogram
wait_bucket{le="0.1"} 1
wait_bucket{le="1.0"} 3
wait_bucket{le="+Inf"} 4
wait_sum 2.0
wait_count 4
"""


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_a_reading_sums_over_series() -> None:
    with answering(TEXT.encode()) as url:
        sample = read(url)
    assert sample.error == ""
    assert sample.total("steps_total") == 15
    assert sample.total("steps_total", rank="1") == 5
    assert sample.by("steps_total", "rank") == {"0": 10, "1": 5}
    assert sample.total("nothing") == 0


@pytest.mark.parametrize(("body", "status"), [(b"no", 503), (b"steps_total{ 1", 200), (b"\xff\xfe", 200)])
def test_what_is_no_answer_is_an_error_and_no_exception(body: bytes, status: int) -> None:
    with answering(body, status) as url:
        assert read(url).error
    assert read(url).error  # and now nobody listens


def reading(at: float, steps: float, counts: tuple[float, float, float], total: float) -> Sample:
    bounds = ("0.1", "1.0", "+Inf")
    values = {("steps_total", ()): steps, ("wait_sum", ()): total, ("wait_count", ()): counts[-1]}
    buckets = {("wait_bucket", (("le", bound),)): count for bound, count in zip(bounds, counts, strict=True)}
    return Sample("u", at, {**values, **buckets})


def test_rates_means_and_quantiles_are_of_the_time_between() -> None:
    change = Change(reading(1.0, 10, (1, 3, 4), 2.0), reading(3.0, 30, (1, 13, 14), 7.0))
    assert change.rate("steps_total") == 10
    assert change.mean("wait") == 0.5
    assert change.quantile("wait", 0.5) == 1.0
    still = Change(change.after, change.after)
    assert still.mean("wait") is None
    assert still.quantile("wait", 0.5) is None
    assert still.rate("steps_total") == 0


def test_a_process_that_began_anew_counts_from_nothing() -> None:
    assert Change(reading(0.0, 100, (0, 0, 0), 0), reading(2.0, 6, (0, 0, 0), 0)).rate("steps_total") == 3


def test_a_process_that_has_just_come_is_compared_with_itself() -> None:
    came = reading(1.0, 5, (0, 0, 0), 0)
    assert changes([Sample("u", 0.0, error="refused")], [came]) == [Change(came, came)]
