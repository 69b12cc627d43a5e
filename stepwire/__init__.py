"""Stepwire: LLM inference as gRPC microservices.

The names below are those of `stepwire.client`, imported when first used: `import stepwire` is
free of gRPC, so that the services and the command start without what they do not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwire.client import (
        AsyncClient,
        Client,
        Completion,
        Finished,
        FinishReason,
        Message,
        Model,
        Output,
        SamplingParams,
        Started,
        StepwireError,
    )

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "FinishReason",
    "Finished",
    "Message",
    "Model",
    "Output",
    "SamplingParams",
    "Started",
    "StepwireError",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("stepwire.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
