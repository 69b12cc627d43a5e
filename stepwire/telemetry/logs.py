"""Logging: one format for structlog's records and those of the standard library."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from stepwire.telemetry.trace import current_span_context

LogFormat = Literal["auto", "json", "pretty"]

# These write a record for each span or batch that a dead collector loses; the exporter's own one says it once.
_NOISY = ("opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")


def configure_logging(
    *,
    format: LogFormat = "auto",
    level: str = "info",
    service: str,
    stream: TextIO | None = None,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Sends all log records of this process to `stream` (standard error by default).

    "json" writes one object a line; "pretty" is for people; "auto" is pretty on a terminal only.
    Every record has time, level, service, logger, and trace_id, span_id and request_id where they
    are known: bind the latter by `structlog.contextvars`. `fields` are added to each, as they are at that
    time: a worker's rank and epoch. Pretty ones have the time of day in UTC, and
    neither service nor span_id. Replaces an earlier configuration.
    Raises ValueError for a level that does not exist.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is none of debug, info, warning, error, critical")
    is_elsewhere = stream is not None
    stream = stream or sys.stderr
    is_pretty = format == "pretty" or (format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _add_trace_ids,
        _AddFields(service, {} if fields is None else fields),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream) if is_elsewhere else _StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(is_pretty=is_pretty, colors=stream.isatty()),
            ],
        )
    )
    handler.addFilter(_is_news)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record says anything. gRPC calls it an error when a client goes away in the very moment in which it is
    answered, and keeps silent when it does so a little earlier."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError" or not record.name.startswith("grpc.")


def _renderers(*, is_pretty: bool, colors: bool) -> Sequence[Processor]:
    if is_pretty:
        return [_for_people, structlog.dev.ConsoleRenderer(colors=colors, timestamp_key="time", pad_event_to=0)]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
        structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
    ]


def _for_people(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Leaves out what a line in one terminal needs not; a trace is found by its id alone."""
    event.pop("service", None)
    event.pop("span_id", None)
    event["time"] = str(event["time"])[11:19]
    return event


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time: a progress bar replaces it to keep records out of its line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _AddFields:
    def __init__(self, service: str, fields: Mapping[str, object]) -> None:
        self._service = service
        self._fields = fields

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        for name, value in self._fields.items():
            event.setdefault(name, value)
        return event


def _add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    context = current_span_context()
    if context.is_valid and "trace_id" not in event:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event
