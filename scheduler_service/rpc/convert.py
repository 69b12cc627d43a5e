"""Messages of InferenceService to the engine's values and back.

A list in a message may have millions of entries. It is passed on as it stands, and copied by nobody
before the validator has seen its length.
"""

from google.protobuf import duration_pb2

from scheduler_service.core.plan import PromptLogprobs
from scheduler_service.core.request import FinishReason
from scheduler_service.engine.validate import DEFAULT_DRAFT_TOKENS, MAX_MESSAGES, MAX_N, check_count
from scheduler_service.engine.values import (
    ChatMessage,
    ChatPrompt,
    Event,
    Finished,
    GenerateInput,
    ModelInfo,
    Output,
    Prompt,
    SamplingInput,
    Started,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
)
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb

_FINISH_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}

_STATES = {
    "starting": pb.MODEL_STATE_STARTING,
    "ready": pb.MODEL_STATE_READY,
    "draining": pb.MODEL_STATE_DRAINING,
    "failed": pb.MODEL_STATE_FAILED,
    "recovering": pb.MODEL_STATE_RECOVERING,
    "sleeping": pb.MODEL_STATE_SLEEPING,
}

_OPTIONAL_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "logprobs",
    "typical_p",
    "best_of",
    "prompt_logprobs",
)


def generate_input(request: pb.GenerateRequest, deadline_s: float | None, tenant: str) -> GenerateInput:
    """What a Generate call asks for, unchecked."""
    return GenerateInput(
        prompt=prompt_of(request),
        sampling=_sampling_input(request.sampling),
        model=request.model,
        request_id=request.request_id,
        tenant=tenant,
        priority=request.priority,
        adapter=request.adapter,
        priors=[prior.ids for prior in request.prior_output_token_ids[: MAX_N + 1]],
        deadline_s=deadline_s,
        max_draft_tokens=_max_draft_tokens(request),
        stream_interval=request.stream_interval if request.HasField("stream_interval") else None,
    )


def _max_draft_tokens(request: pb.GenerateRequest) -> int | None:
    if not request.HasField("speculation"):
        return None
    given = request.speculation
    return given.max_draft_tokens if given.HasField("max_draft_tokens") else DEFAULT_DRAFT_TOKENS


def prompt_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt | None:
    """The prompt; None when it is missing. Raises StepwireError for more messages than a prompt may have."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "messages":
        turns = request.messages.messages
        check_count("messages", len(turns), MAX_MESSAGES)
        return ChatPrompt(tuple(ChatMessage(turn.role, turn.content) for turn in turns))
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
        return TokenPrompt(request.token_ids.ids)
    return None


def _sampling_input(sampling: pb.SamplingParams) -> SamplingInput:
    given = {name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING if sampling.HasField(name)}  # type: ignore[arg-type]  # names of optional fields
    return SamplingInput(
        **given,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        structured_output=_structured_output(sampling),
    )


def _structured_output(sampling: pb.SamplingParams) -> StructuredOutput | None:
    if not sampling.HasField("structured_output"):
        return None
    given = sampling.structured_output
    kind = given.WhichOneof("form")
    if kind is None:
        raise StepwireError("FIELD_INVALID", "structured_output says no form", {"field": "structured_output"})
    if kind == "json_object":
        return StructuredOutput(kind)
    if kind == "choices":
        return StructuredOutput(kind, choices=given.choices.choices)
    return StructuredOutput(kind, text=getattr(given, kind))


def generate_response(event: Event) -> pb.GenerateResponse:
    """The message of one event."""
    if isinstance(event, Output):
        return _output_response(event)
    if isinstance(event, Started):
        started = pb.GenerateStarted(
            request_id=event.request_id,
            seed=event.seed,
            model=event.model,
            prompt_token_count=event.prompt_token_count,
        )
        return pb.GenerateResponse(started=started)
    if isinstance(event, PromptLogprobs):
        # The worker's own message, carried through the engine untouched.
        return pb.GenerateResponse(prompt_logprobs=event.values)  # type: ignore[arg-type]
    return pb.GenerateResponse(finished=_finished(event))


def _output_response(event: Output) -> pb.GenerateResponse:
    response = pb.GenerateResponse()
    output = response.output
    output.sequence_index = event.sequence_index
    output.position = event.position
    output.token_ids.extend(event.token_ids)
    output.text = event.text
    if event.logprobs:
        # The worker's own messages, carried through the engine untouched.
        output.logprobs.extend(event.logprobs)  # type: ignore[arg-type]
    if event.finish_reason is not None:
        output.finish_reason = _FINISH_REASONS[event.finish_reason]
        if event.stop is not None:
            output.stop = event.stop
        elif event.stop_token_id is not None:
            output.stop_token_id = event.stop_token_id
    return response


def _finished(event: Finished) -> pb.GenerateFinished:
    queue = duration_pb2.Duration()
    queue.FromNanoseconds(int(event.queue_s * 1e9))
    usage = pb.Usage(
        prompt_token_count=event.prompt_token_count,
        output_token_count=event.output_token_count,
        cached_token_count=event.cached_token_count,
    )
    return pb.GenerateFinished(usage=usage, queue_duration=queue)


def model_message(info: ModelInfo) -> pb.Model:
    """A model and how it stands."""
    return pb.Model(
        name=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        eos_token_ids=info.eos_token_ids,
        has_chat_template=info.has_chat_template,
        state=_STATES[info.state],
        block_size=info.block_size,
        block_count=info.num_blocks,
        free_block_count=info.num_free_blocks,
        running_count=info.num_running,
        waiting_count=info.num_waiting,
    )
