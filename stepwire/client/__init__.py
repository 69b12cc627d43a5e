"""Calls a Stepwire service from Python: `Client` for threads, `AsyncClient` for asyncio."""

from stepwire.client._async import AsyncClient, AsyncGenerateStream
from stepwire.client._sync import Client, GenerateStream
from stepwire.client.types import (
    CompletedSequence,
    Completion,
    Event,
    Finished,
    FinishReason,
    GenerateKeywords,
    Message,
    Model,
    ModelState,
    Output,
    PositionLogprobs,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenLogprob,
    Usage,
)
from stepwire.rpc.errors import StepwireError

__all__ = [
    "AsyncClient",
    "AsyncGenerateStream",
    "Client",
    "CompletedSequence",
    "Completion",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateKeywords",
    "GenerateStream",
    "Message",
    "Model",
    "ModelState",
    "Output",
    "PositionLogprobs",
    "Prompt",
    "PromptLogprobs",
    "SamplingParams",
    "Started",
    "StepwireError",
    "TokenLogprob",
    "Usage",
]
