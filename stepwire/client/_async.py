"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from opentelemetry.trace import TracerProvider

from stepwire.client import _calls, _convert
from stepwire.client._calls import DEFAULT_TIMEOUT_S, CallFactory, ClientCall
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
from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError
from stepwire.v1.inference_pb2 import GenerateRequest
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub

_T = TypeVar("_T")
Begin = Callable[[GenerateRequest, float | None], tuple[Any, ClientCall]]


class AsyncGenerateStream(AsyncIterator[Event]):
    """The events of one request. Dropping it, closing it or leaving its `async with` block cancels the request.

    Iterating raises StepwireError when the request fails. Belongs to the event loop that made it.
    """

    def __init__(self, begin: Begin, progress: Progress) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = begin
        self._progress = progress
        self._is_over = True
        self._call, self._span = begin(progress.request, progress.timeout)
        self._is_over = False

    async def __anext__(self) -> Event:
        while not self._is_over:
            try:
                # Not the call's own iterator: that one and the call hold each other, so that a
                # dropped call would run on until the next garbage collection.
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._resume(error)
                continue
            except asyncio.CancelledError:
                self.close()
                if _is_task_cancelled():
                    raise
                raise self._span.cancelled() from None
            if response is grpc.aio.EOF:
                self._is_over = True
                self._span.succeeded()
                break
            event = _convert.event(response)
            if event is not None and (event := self._progress.take(event)) is not None:
                return event
        raise StopAsyncIteration

    async def _resume(self, error: grpc.aio.AioRpcError) -> None:
        """Goes on with another call, in a while. Raises StepwireError when that makes no sense."""
        try:
            pause_s = self._progress.pause_before_resuming(self._span.failed(error))
        except StepwireError as failure:
            self._is_over = True
            raise failure from error
        await asyncio.sleep(pause_s)
        if not self._is_over:
            self._call, self._span = self._begin(self._progress.next_request(), self._progress.timeout)

    def close(self) -> None:
        """Cancels the request unless it is over."""
        if self._is_over:
            return
        self._is_over = True
        self._span.cancelled()
        if _running_loop() is self._loop:
            self._call.cancel()
        elif not self._loop.is_closed():  # Dropped by another thread.
            self._loop.call_soon_threadsafe(self._call.cancel)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_task_cancelled() -> bool:
    """gRPC raises CancelledError also when not the task but its call was cancelled, by `close` for instance."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class AsyncClient:
    """Calls a Stepwire service. Belongs to the event loop of its first call, when it connects.

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
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> AsyncGenerateStream:
        """Sends a request at once and returns the stream of its events.

        `prompt` is text, token ids, or messages for the model's chat template. Sampling is given as
        `sampling`, as keywords (`temperature=0`), or both: keywords win. See GenerateKeywords.
        """
        request = _convert.generate_request(prompt, sampling, keywords)
        return AsyncGenerateStream(self._begin, Progress(request, keywords.get("timeout"), self._resume_s))

    def _begin(self, request: GenerateRequest, timeout: float | None) -> tuple[Any, ClientCall]:
        span = self._calls.begin("Generate")
        return self._method("Generate")(request, timeout=timeout, metadata=span.metadata), span

    async def complete(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Completion:
        """As `generate`, but waits for the end and returns the whole."""
        builder = CompletionBuilder()
        async with self.generate(prompt, sampling=sampling, **_calls.in_whole(keywords)) as stream:
            async for event in stream:
                builder.add(event)
        completion = builder.build()
        if completion is None:
            raise _calls.stream_cut()
        return completion

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> tuple[int, ...]:
        """The token ids of a prompt, as `generate` would see them."""
        return await self._unary(_convert.tokenize(prompt, model), timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> str:
        """The text of token ids."""
        call = _convert.detokenize(token_ids, model, keep_special_tokens=keep_special_tokens)
        return await self._unary(call, timeout)

    async def list_models(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> tuple[Model, ...]:
        """The models that are served."""
        return await self._unary(_convert.list_models(), timeout)

    async def get_model(self, model: str = "", *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Model:
        """One model and how it stands; by default the first."""
        return await self._unary(_convert.get_model(model), timeout)

    async def wait_ready(self, model: str = "", *, timeout: float = DEFAULT_TIMEOUT_S) -> Model:
        """Waits until a model serves requests.

        Raises StepwireError: DEADLINE_EXCEEDED with the last cause when it is not ready in time,
        WORKER_FAILED as soon as it has failed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            remaining = deadline - loop.time()
            try:
                found = await self._unary(_convert.get_model(model), max(remaining, 0.001), traced=False)
            except StepwireError as error:
                last = _calls.why_not_ready(error)
            else:
                if found.state is ModelState.READY:
                    return found
                last = _calls.why_not_ready(found)
            if remaining <= _calls.POLL_INTERVAL_S:
                raise _calls.not_ready(self._calls.target, timeout, last)
            await asyncio.sleep(_calls.POLL_INTERVAL_S)

    async def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, call: UnaryCall[_T], timeout: float | None, *, traced: bool = True) -> _T:
        method = self._method(call.method)
        span = self._calls.begin(call.method, traced=traced)
        try:
            answer = await method(call.request, timeout=timeout, metadata=span.metadata)
        except grpc.aio.AioRpcError as error:
            raise span.failed(error) from error
        except asyncio.CancelledError:
            cancelled = span.cancelled()
            if _is_task_cancelled():
                raise
            raise cancelled from None
        span.succeeded()
        return call.convert(answer)

    def _method(self, name: str) -> Any:
        if self._is_closed:
            raise _calls.client_closed()
        if self._channel is None:  # Not earlier: a channel belongs to the loop that runs when it is made.
            self._channel = create_channel(self._calls.target, max_message_bytes=self._max_message_bytes)
            self._stub = InferenceServiceStub(self._channel)
        return getattr(self._stub, name)
