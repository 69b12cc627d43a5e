"""A scripted InferenceService, and either client connected to it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stepwire import AsyncClient, Client, StepwireError
from stepwire.client import Event
from stepwire.rpc.server import bind, create_server
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc


def output(position: int, text: str, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(output=pb.GenerateOutput(position=position, token_ids=[position], text=text, **fields))


STARTED = pb.GenerateResponse(
    started=pb.GenerateStarted(request_id="r", seed=2**64 - 1, model="m", prompt_token_count=3)
)
FINISHED = pb.GenerateResponse(
    finished=pb.GenerateFinished(usage=pb.Usage(prompt_token_count=3, output_token_count=2, cached_token_count=1))
)
LAST = output(1, " there", finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0)
SCRIPT = [STARTED, output(0, "hello"), LAST, FINISHED]


class Service(inference_pb2_grpc.InferenceServiceServicer):
    """Sends `script`, then raises `error`, or with `hold` waits; counts how its streams are left."""

    def __init__(self) -> None:
        self.script: Sequence[pb.GenerateResponse] = SCRIPT
        self.error: StepwireError | None = None
        self.hold = False
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.model_states: list[Any] = [pb.MODEL_STATE_READY]
        self.reached = asyncio.Event()
        self.both_reached = asyncio.Event()
        self.left = asyncio.Event()

    async def _begin(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.error and not self.script:
            raise self.error

    async def _finish(self) -> None:
        self.reached.set()
        if len(self.requests) == 2:
            self.both_reached.set()
        if self.error:
            raise self.error
        if self.hold:
            await asyncio.Event().wait()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            await self._begin(request, context)
            for response in self.script:
                yield response
            await self._finish()
        finally:
            self.left.set()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        try:
            await self._begin(request, context)
            await self._finish()
            return pb.TokenizeResponse(token_ids=[1, 2])
        finally:
            self.left.set()

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        await self._begin(request, context)
        return pb.DetokenizeResponse(text="text")

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        await self._begin(request, context)
        return pb.ListModelsResponse(models=[pb.Model(name="a"), pb.Model(name="b")])

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        await self._begin(request, context)
        state = self.model_states.pop(0) if len(self.model_states) > 1 else self.model_states[0]
        return pb.GetModelResponse(model=pb.Model(name="a", state=state, eos_token_ids=[2], block_count=9))


class Exporter(InMemorySpanExporter):
    """Says on its event loop that a span has ended, whichever thread ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.exported = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.loop.call_soon_threadsafe(self.exported.set)
        return result


class Rig:
    """A service, and one way of calling it: `kind` is "sync" or "async"."""

    def __init__(self, kind: str, target: str, service: Service, key: str | None) -> None:
        self.exporter = Exporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.target = target
        self.service = service
        # Errors are wanted at once here; going on after one is tested in test_client_resume.py.
        kind_of_client = Client if kind == "sync" else AsyncClient
        self.client: Any = kind_of_client(target, key=key, tracer_provider=self.provider, resume_s=0)
        self.is_sync = kind == "sync"

    async def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.client, method)
        return await (asyncio.to_thread(function, *args, **kwargs) if self.is_sync else function(*args, **kwargs))

    async def events(self, *args: Any, into: list[Event] | None = None, **kwargs: Any) -> list[Event]:
        events: list[Event] = [] if into is None else into
        if self.is_sync:
            await asyncio.to_thread(lambda: events.extend(self.client.generate(*args, **kwargs)))
        else:
            async for event in self.client.generate(*args, **kwargs):
                events.append(event)
        return events

    async def span(self) -> ReadableSpan:
        async with asyncio.timeout(5):
            await self.exporter.exported.wait()
        (span,) = self.exporter.get_finished_spans()
        return span

    async def close(self) -> None:
        await self.do("close")


@asynccontextmanager
async def running(kind: str, *, key: str | None = None) -> AsyncIterator[Rig]:
    service = Service()
    server = create_server(tracer_provider=None, max_message_bytes=1 << 20, key=key)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    target = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    rig = Rig(kind, target, service, key)
    try:
        yield rig
    finally:
        await rig.close()
        await server.stop(0)
