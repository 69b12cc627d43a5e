"""Between client values and wire messages; the only module of the client that knows the latter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from stepwire.client import _structured
from stepwire.client.types import (
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
from stepwire.v1 import common_pb2, inference_pb2

_FINISH_REASONS: Mapping[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_MODEL_STATES: Mapping[int, ModelState] = {
    inference_pb2.MODEL_STATE_STARTING: ModelState.STARTING,
    inference_pb2.MODEL_STATE_READY: ModelState.READY,
    inference_pb2.MODEL_STATE_DRAINING: ModelState.DRAINING,
    inference_pb2.MODEL_STATE_FAILED: ModelState.FAILED,
    inference_pb2.MODEL_STATE_RECOVERING: ModelState.RECOVERING,
    inference_pb2.MODEL_STATE_SLEEPING: ModelState.SLEEPING,
}
_REQUEST_FIELDS = ("model", "request_id", "priority", "adapter", "stream_interval")
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


class _WireMessage(Protocol):
    def __init__(self, **fields: Any) -> None: ...


_T = TypeVar("_T")
_W = TypeVar("_W", bound=_WireMessage)


def generate_request(
    prompt: Prompt, sampling: SamplingParams | None, keywords: GenerateKeywords
) -> inference_pb2.GenerateRequest:
    """The wire form of a request.

    Raises StepwireError FIELD_OUT_OF_RANGE or FIELD_INVALID for what no message can carry, and
    TypeError for unknown keywords and values of a wrong type. All other checks are the service's.
    """
    own = {name: value for name, value in keywords.items() if name in _REQUEST_FIELDS}
    taken = (*own, "timeout", "max_draft_tokens")
    others: dict[str, Any] = {name: value for name, value in keywords.items() if name not in taken}
    params = replace(sampling or SamplingParams(), **others)
    if (num_drafts := keywords.get("max_draft_tokens")) is not None:
        own["speculation"] = filled(inference_pb2.Speculation, max_draft_tokens=num_drafts)
    return filled(inference_pb2.GenerateRequest, sampling=_sampling(params), **own, **_prompt(prompt))


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[_T]):
    """A call with one answer: the RPC's name, its request, and what the answer means."""

    method: str
    request: Any
    convert: Callable[[Any], _T]


def tokenize(prompt: str | Sequence[Message], model_name: str) -> UnaryCall[tuple[int, ...]]:
    """Raises as `generate_request` does."""
    request = filled(inference_pb2.TokenizeRequest, model=model_name, **_prompt(prompt))
    return UnaryCall("Tokenize", request, lambda answer: tuple(answer.token_ids))


def detokenize(token_ids: Sequence[int], model_name: str, *, keep_special_tokens: bool) -> UnaryCall[str]:
    """Raises as `generate_request` does."""
    request = filled(
        inference_pb2.DetokenizeRequest,
        model=model_name,
        token_ids=list(token_ids),
        keep_special_tokens=keep_special_tokens,
    )
    return UnaryCall("Detokenize", request, lambda answer: str(answer.text))


def get_model(name: str) -> UnaryCall[Model]:
    """Raises as `generate_request` does."""
    request = filled(inference_pb2.GetModelRequest, model=name)
    return UnaryCall("GetModel", request, lambda answer: model(answer.model))


def list_models() -> UnaryCall[tuple[Model, ...]]:
    """Asks for all models."""
    request = inference_pb2.ListModelsRequest()
    return UnaryCall("ListModels", request, lambda answer: tuple(model(entry) for entry in answer.models))


def event(response: inference_pb2.GenerateResponse) -> Event | None:
    """What a message of a stream says; None for a kind of event that this client does not know."""
    kind = response.WhichOneof("event")
    if kind == "output":
        return _output(response.output)
    if kind == "started":
        started = response.started
        return Started(started.request_id, started.seed, started.model, started.prompt_token_count)
    if kind == "prompt_logprobs":
        return _prompt_logprobs(response.prompt_logprobs)
    if kind == "finished":
        usage = response.finished.usage
        return Finished(
            Usage(usage.prompt_token_count, usage.output_token_count, usage.cached_token_count),
            response.finished.queue_duration.ToNanoseconds() / 1e9,
        )
    return None


def model(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        state=_MODEL_STATES.get(message.state, ModelState.UNKNOWN),
        architecture=message.architecture,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        block_size=message.block_size,
        num_blocks=message.block_count,
        num_free_blocks=message.free_block_count,
        num_running=message.running_count,
        num_waiting=message.waiting_count,
    )


def _output(output: inference_pb2.GenerateOutput) -> Output:
    finish_reason = None
    if output.finish_reason:
        finish_reason = _FINISH_REASONS.get(output.finish_reason, FinishReason.UNKNOWN)
    return Output(
        output.sequence_index,
        output.position,
        tuple(output.token_ids),
        output.text,
        tuple(_position_logprobs(entry) for entry in output.logprobs) if output.logprobs else (),
        finish_reason,
        output.stop if output.HasField("stop") else None,
        output.stop_token_id if output.HasField("stop_token_id") else None,
    )


def _position_logprobs(entry: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(entry.sampled.token_id, entry.sampled.logprob),
        tuple(TokenLogprob(top.token_id, top.logprob) for top in entry.top),
    )


def _prompt_logprobs(part: common_pb2.PromptLogprobs) -> PromptLogprobs:
    token_ids, logprobs = list(part.token_ids), list(part.logprobs)
    top = list(map(TokenLogprob, part.top_token_ids, part.top_logprobs))
    num_top = len(top) // max(1, len(token_ids))
    entries = (
        PositionLogprobs(TokenLogprob(token_id, logprob), tuple(top[i * num_top : (i + 1) * num_top]))
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    )
    return PromptLogprobs(part.position, tuple(entries))


def _sampling(params: SamplingParams) -> inference_pb2.SamplingParams:
    if isinstance(params.stop, str):
        raise TypeError("stop is a sequence of strings, not one string")
    values = {name: getattr(params, name) for name in _SAMPLING_FIELDS if name not in _structured.FIELDS}
    if (form := _structured.structured_output(params)) is not None:
        values["structured_output"] = filled(inference_pb2.StructuredOutput, **form)
    return filled(inference_pb2.SamplingParams, **{name: value for name, value in values.items() if value is not None})


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, bytes | bytearray | Mapping):
        raise TypeError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}")
    items = list(prompt)
    if items and isinstance(items[0], Message | Mapping):
        turns = [_turn(cast(Message | Mapping[str, str], item)) for item in items]
        return {"messages": inference_pb2.ChatMessages(messages=turns)}
    return {"token_ids": filled(inference_pb2.TokenIds, ids=items)}


def _turn(item: Message | Mapping[str, str]) -> inference_pb2.ChatMessage:
    if isinstance(item, Message):
        return filled(inference_pb2.ChatMessage, role=item.role, content=item.content)
    if item.keys() != {"role", "content"}:
        raise TypeError(f"a message has the keys role and content, not {sorted(item)}")
    return filled(inference_pb2.ChatMessage, **item)


def filled(kind: type[_W], **values: Any) -> _W:
    """A message with these fields, set one by one when something is wrong, to name the field that is."""
    try:
        return kind(**values)
    except ValueError:
        for name, value in values.items():
            try:
                kind(**{name: value})
            except UnicodeEncodeError as error:
                text = f"{name} is not text that UTF-8 can encode: {error.reason} at {error.start}"
                raise StepwireError("FIELD_INVALID", text, {"field": name}) from None
            except ValueError as error:
                text = f"{name} is outside what a message can carry: {error}"
                raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": name}) from None
        raise
