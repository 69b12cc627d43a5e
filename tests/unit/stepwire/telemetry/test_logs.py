import io
import json
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from stepwire.telemetry.logs import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_records_of_both_kinds_look_alike() -> None:
    stream = io.StringIO()
    configure_logging(format="auto", level="info", service="stepwire-worker", stream=stream)
    structlog.stdlib.get_logger("ours").info("loaded", num_tensors=3, path="a\nb")
    logging.getLogger("theirs").warning("slow: %d ms", 7, extra={"host": "h"})
    ours, theirs = records(stream)
    assert (ours["message"], ours["num_tensors"], ours["path"], ours["logger"]) == ("loaded", 3, "a\nb", "ours")
    assert (theirs["message"], theirs["host"], theirs["logger"]) == ("slow: 7 ms", "h", "theirs")
    assert (ours["level"], theirs["level"]) == ("info", "warning")
    assert ours.keys() - {"num_tensors", "path"} == theirs.keys() - {"host"}
    assert ours["service"] == "stepwire-worker" and ours["time"].endswith("Z")


def test_the_level_holds_for_both_kinds() -> None:
    stream = io.StringIO()
    configure_logging(format="json", level="WARNING", service="s", stream=stream)
    structlog.stdlib.get_logger("a").info("no")
    logging.getLogger("b").info("no")
    structlog.stdlib.get_logger("a").error("yes")
    assert [record["message"] for record in records(stream)] == ["yes"]


def test_ids_of_the_trace_and_the_request_are_added() -> None:
    stream = io.StringIO()
    configure_logging(format="json", level="info", service="s", stream=stream)
    span = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("x")
    structlog.contextvars.bind_contextvars(request_id="r-1")
    with trace.use_span(span):
        structlog.stdlib.get_logger().info("in")
        logging.getLogger("b").info("in")
    structlog.stdlib.get_logger().info("out")
    first, second, last = records(stream)
    context = span.get_span_context()
    for record in (first, second):
        assert record["trace_id"] == f"{context.trace_id:032x}"
        assert record["span_id"] == f"{context.span_id:016x}"
        assert record["request_id"] == "r-1"
    assert "trace_id" not in last


def test_a_traceback_is_one_json_line() -> None:
    stream = io.StringIO()
    configure_logging(format="json", level="info", service="s", stream=stream)
    try:
        raise ValueError("why")
    except ValueError as error:
        structlog.stdlib.get_logger().error("failed", exc_info=error)
    (record,) = records(stream)
    assert "ValueError: why" in record["exception"]


def test_pretty_is_not_json() -> None:
    stream = io.StringIO()
    configure_logging(format="pretty", level="info", service="s", stream=stream)
    structlog.stdlib.get_logger("a").info("hello", answer=42)
    logging.getLogger("b").info("there")
    assert "hello" in stream.getvalue() and "answer=42" in stream.getvalue() and "there" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert re.match(r"\d\d:\d\d:\d\d ", stream.getvalue())
    assert "service" not in stream.getvalue()


def test_records_go_to_what_is_standard_error_now(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(format="json", level="info", service="s")
    bar = io.StringIO()
    monkeypatch.setattr("sys.stderr", bar)
    structlog.stdlib.get_logger("a").info("above the bar")
    assert [record["message"] for record in records(bar)] == ["above the bar"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        configure_logging(format="json", level="loud", service="s")


def test_fields_are_added_as_they_are_at_the_time() -> None:
    stream, place = io.StringIO(), {"rank": 0}
    configure_logging(format="json", service="worker", stream=stream, fields=place)
    structlog.stdlib.get_logger("t").info("one")
    place.update(rank=3, epoch=2)
    structlog.stdlib.get_logger("t").info("two", epoch=9)
    one, two = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (one["rank"], "epoch" in one) == (0, False)
    assert (two["rank"], two["epoch"]) == (3, 9)


def test_clients_that_go_away_while_they_are_answered_are_no_error() -> None:
    stream = io.StringIO()
    configure_logging(format="json", service="test", stream=stream)
    gone: Any = import_module("grpc._cython.cygrpc")
    for error in (gone.ExecuteBatchError("Failed"), ValueError("a defect")):
        try:
            raise error
        except Exception:
            logging.getLogger("grpc._cython.cygrpc").exception("raised in a servicer method")
    (record,) = records(stream)
    assert "a defect" in record["exception"]
