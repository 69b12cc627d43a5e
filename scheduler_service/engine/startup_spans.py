"""The spans of a start: a root, and one for each phase."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import Status, StatusCode, Tracer

from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names


@contextmanager
def startup_phase(tracer: Tracer, phase: str, epoch: int = 0) -> Iterator[None]:
    """The span of one phase of a start. Epoch 0 is before there is one."""
    with tracer.start_as_current_span(
        names.startup_span_name(phase),
        attributes={names.PHASE: phase, names.EPOCH: epoch, names.KEEP: True},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except StepwireError as error:
            span.set_attribute(names.ERROR_TYPE, error.reason)
            span.set_status(Status(StatusCode.ERROR, error.message))
            raise


@contextmanager
def startup_trace(tracer: Tracer, path: str, model: str) -> Iterator[None]:
    """The root span of a start: the checkpoint's path, and the model's name."""
    with tracer.start_as_current_span(
        names.SPAN_STARTUP,
        attributes={names.MODEL_PATH: path, names.GEN_AI_REQUEST_MODEL: model, names.KEEP: True},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
