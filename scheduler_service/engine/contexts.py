"""The context of tasks that outlive what began them."""

import contextvars

import structlog


def without_span() -> contextvars.Context:
    """A context in which log records say what they say here, such as the model, and no span is current."""
    context = contextvars.Context()
    context.run(structlog.contextvars.bind_contextvars, **structlog.contextvars.get_contextvars())
    return context
