"""The client for threads."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, Unpack

import grpc
from opentelemetry.trace import TracerProvider

from stepwire.client import _calls, _convert
from stepwire.client._calls import DEFAULT_TIMEOUT_S, CallFactory, ClientCall
from stepwire.client._closing import Closing
from stepwire.client._convert import UnaryCall
from stepwire.client._resume import DEFAULT_RESUME_S, Progress
from stepwire.client.types import (
    Completion,
    CompletionBuilder,
    Event,
    GenerateKeywords,
    Message,
    Model,
    ModelState,
    Prompt,
    SamplingParams,
)
from stepwire.rpc.channel import create_sync_channel
from stepwire.rpc.errors import StepwireError
from stepwire.v1.inference_pb2 import GenerateRequest
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub

_T = TypeVar("_T")
Begin = Callable[[GenerateRequest, float | None], tuple[Any, ClientCall]]


def call_unary(method: Any, span: ClientCall, call: UnaryCall[_T], timeout: float | None) -> _T:
    """Makes a call, and answers what its answer means, or the parts of it. Raises StepwireError."""
    try:
        answer = method(call.request, timeout=timeout, metadata=span.metadata)
        if isinstance(answer, Iterator):
            answer = list(answer)
    except grpc.RpcError as error:
        raise span.failed(error) from error
    except BaseException:
        span.cancelled()
        raise
    span.succeeded()
    return call.convert(answer)


class GenerateStream(Closing, Iterator[Event]):
    """The events of one request. Dropping it, closing it or leaving its `with` block cancels the request.

    Iterating raises StepwireError when the request fails. `close` may be called from any thread.
    """

    def __init__(self, begin: Begin, progress: Progress) -> None:
        self._begin = begin
        self._progress = progress
        self._is_over = True
        self._call, self._span = begin(progress.request, progress.timeout)
        self._is_over = False

    def __next__(self) -> Event:
        while not self._is_over:
            try:
                event = _convert.event(next(self._call))
            except StopIteration:
                self._is_over = True
                self._span.succeeded()
            except grpc.RpcError as error:
                self._resume(error)
            except BaseException:  # KeyboardInterrupt too.
                self.close()
                raise
            else:
                if event is not None and (event := self._progress.take(event)) is not None:
                    return event
        raise StopIteration

    def _resume(self, error: grpc.RpcError) -> None:
        """Goes on with another call, in a while. Raises StepwireError when that makes no sense."""
        was_closed = self._is_over
        try:
            pause_s = self._progress.pause_before_resuming(self._span.failed(error))
        except StepwireError as failure:
            self._is_over = True
            raise failure from error
        if not was_closed:
            time.sleep(pause_s)
        if not self._is_over:
            self._call, self._span = self._begin(self._progress.next_request(), self._progress.timeout)

    def close(self) -> None:
        """Cancels the request unless it is over."""
        if not self._is_over:
            self._is_over = True
            self._span.cancelled()
            self._call.cancel()

    def __del__(self) -> None:
        self.close()


class Client(Closing):
    """Calls a Stepwire service. Safe to share between threads; connects at the first call.

    `target` is "host:port". `key` and `tenant` are sent with every call. Spans go to `tracer_provider`, or to
    OpenTelemetry's global one, which does nothing unless the application has set it. All methods
    raise StepwireError when a call fails, and take a `timeout` in seconds for the whole call. A request whose
    service is lost after it began is sent again with what has come, for up to `resume_s` seconds; 0 never does.
    """

    def __init__(
        self,
        target: str = _calls.DEFAULT_TARGET,
        *,
        key: str | None = None,
        tenant: str | None = None,
        tracer_provider: TracerProvider | None = None,
        max_message_bytes: int = _calls.DEFAULT_MAX_MESSAGE_BYTES,
        resume_s: float = DEFAULT_RESUME_S,
    ) -> None:
        self._resume_s = resume_s
        self._calls = CallFactory(target, key, tenant, tracer_provider)
        self._channel = create_sync_channel(target, max_message_bytes=max_message_bytes)
        self._stub = InferenceServiceStub(self._channel)
        self._is_closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> GenerateStream:
        """Sends a request at once and returns the stream of its events.

        `prompt` is text, token ids, or messages for the model's chat template. Sampling is given as
        `sampling`, as keywords (`temperature=0`), or both: keywords win. See GenerateKeywords.
        """
        request = _convert.generate_request(prompt, sampling, keywords)
        return GenerateStream(self._begin, Progress(request, keywords.get("timeout"), self._resume_s))

    def _begin(self, request: GenerateRequest, timeout: float | None) -> tuple[Any, ClientCall]:
        span = self._calls.begin("Generate")
        return self._method("Generate")(request, timeout=timeout, metadata=span.metadata), span

    def complete(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Completion:
        """As `generate`, but waits for the end and returns the whole."""
        builder = CompletionBuilder()
        with self.generate(prompt, sampling=sampling, **_calls.in_whole(keywords)) as stream:
            for event in stream:
                builder.add(event)
        completion = builder.build()
        if completion is None:
            raise _calls.stream_cut()
        return completion

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> tuple[int, ...]:
        """The token ids of a prompt, as `generate` would see them."""
        return self._unary(_convert.tokenize(prompt, model), timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> str:
        """The text of token ids."""
        call = _convert.detokenize(token_ids, model, keep_special_tokens=keep_special_tokens)
        return self._unary(call, timeout)

    def list_models(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> tuple[Model, ...]:
        """The models that are served."""
        return self._unary(_convert.list_models(), timeout)

    def get_model(self, model: str = "", *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Model:
        """One model and how it stands; by default the first."""
        return self._unary(_convert.get_model(model), timeout)

    def wait_ready(self, model: str = "", *, timeout: float = DEFAULT_TIMEOUT_S) -> Model:
        """Waits until a model serves requests.

        Raises StepwireError: DEADLINE_EXCEEDED with the last cause when it is not ready in time,
        WORKER_FAILED as soon as it has failed.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            try:
                found = self._unary(_convert.get_model(model), max(remaining, 0.001), traced=False)
            except StepwireError as error:
                last = _calls.why_not_ready(error)
            else:
                if found.state is ModelState.READY:
                    return found
                last = _calls.why_not_ready(found)
            if remaining <= _calls.POLL_INTERVAL_S:
                raise _calls.not_ready(self._calls.target, timeout, last)
            time.sleep(_calls.POLL_INTERVAL_S)

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._is_closed = True
        self._channel.close()

    def _unary(self, call: UnaryCall[_T], timeout: float | None, *, traced: bool = True) -> _T:
        method = self._method(call.method)
        return call_unary(method, self._calls.begin(call.method, traced=traced), call, timeout)

    def _method(self, name: str) -> Any:
        if self._is_closed:
            raise _calls.client_closed()
        return getattr(self._stub, name)
