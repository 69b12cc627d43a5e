"""The scheduler process: listens at once, makes its workers ready, serves, drains, ends."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from grpc_health.v1 import health_pb2
from opentelemetry.trace import Tracer

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.inspection import Problem
from loader.tokenizer import load_tokenizer
from scheduler_service.assembly import Assembled, Assembly
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.grammars import GrammarChecker
from scheduler_service.engine.preflight import PHASE, check_before_start, check_failed, wish_of
from scheduler_service.engine.refusals import not_ready
from scheduler_service.engine.served import ServedModel
from scheduler_service.engine.sleep import SleepRule
from scheduler_service.engine.start import StartPlan, startup_phase, startup_trace
from scheduler_service.engine.step_tracing import StepTraceRule
from scheduler_service.engine.supervision import Supervision, Unsupervised
from scheduler_service.engine.template import ChatTemplate
from scheduler_service.engine.tokens import Tokens
from scheduler_service.rpc.admin.adapters import AdapterRoots
from scheduler_service.rpc.admin.servicer import ADMIN_SERVICE_NAME, AdminServicer
from scheduler_service.rpc.servicer import SERVICE_NAME, InferenceServicer
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.run import settle_memory
from stepwire.rpc.server import BindError, HealthServicer, add_standard_services, bind, create_server, serve_metrics
from stepwire.telemetry import names
from stepwire.telemetry.logs import configure_logging
from stepwire.telemetry.metrics import Metrics
from stepwire.telemetry.setup import Telemetry
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import admin_pb2_grpc, inference_pb2_grpc

EXIT_OK = 0
EXIT_CANNOT_START = 1
EXIT_WORKER_FAILED = 3
EXIT_FENCED = 4
EXIT_INTERRUPTED = 130

# A prompt of a million tokens fits. Parsing one message holds up all others, so there is no room to spare.
MAX_MESSAGE_BYTES = 16 << 20
_HEALTH_EVERY_S = 0.25
_ERROR_GRACE_S = 1.0

_log = structlog.stdlib.get_logger(__name__)


async def serve(settings: SchedulerSettings, supervision: Supervision | None = None) -> int:
    """Runs the scheduler until it is told to stop; answers the process's exit status.

    0 after a drain, 1 when it could not start, 3 when its workers were lost and could not be got back, 4 when another
    scheduler has taken them, 130 when a second signal ended it. What ends it is one line on standard error.
    """
    began = time.monotonic()
    configure_logging(format=settings.log_format, level=settings.log_level, service=names.SERVICE_SCHEDULER)
    try:
        telemetry = Telemetry.start(
            names.SERVICE_SCHEDULER, otlp_endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio
        )
    except ValueError as error:
        return _cannot_start(str(error))
    try:
        return await _Service(settings, telemetry, began, supervision or Unsupervised()).run()
    finally:
        await asyncio.to_thread(telemetry.shutdown)


class _Service:
    """One run of the scheduler process."""

    def __init__(
        self, settings: SchedulerSettings, telemetry: Telemetry, began: float, supervision: Supervision
    ) -> None:
        self._settings = settings
        self._supervision = supervision
        self._began = began
        self._tracer: Tracer = get_tracer(telemetry.tracer_provider)
        self._metrics = Metrics()
        self._metrics.watch_spans(telemetry.exporter)
        self._assembly: Assembly | None = None
        self._engine = Engine(
            _served_name(settings),
            self._tracer,
            settings.tenant_rules,
            self._metrics,
            StepTraceRule(settings.trace_step_ratio, settings.trace_slow_step),
            max_adapters=settings.max_adapters,
            sleep_rule=SleepRule(settings.sleep_running == "preempt", settings.sleep_arrivals == "refuse"),
        )
        admin_keys = {} if settings.admin_key is None else {ADMIN_SERVICE_NAME: settings.admin_key}
        self._server = create_server(
            tracer_provider=telemetry.tracer_provider, max_message_bytes=MAX_MESSAGE_BYTES, service_keys=admin_keys
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(self._engine), self._server)
        if admin_keys:
            roots = AdapterRoots(settings.adapter_roots, settings.host)
            servicer = AdminServicer(self._engine, roots, self._add_replica)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server)
        self._health = _Health(self._engine, add_standard_services(self._server, [SERVICE_NAME, *admin_keys]))
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Listens, starts, serves, ends."""
        try:
            port = bind(self._server, self._settings.host, self._settings.port)
            self._serve_metrics()
        except BindError as error:
            return _cannot_start(error.strerror or str(error))
        await self._server.start()
        if self._settings.admin_key is not None:
            await self._health.set_serving(ADMIN_SERVICE_NAME)
        _log.info("listening", address=f"{self._settings.host}:{port}", model=self._engine.model_name)
        watchers = (
            asyncio.create_task(self._health.follow(), name="health"),
            asyncio.create_task(self._metrics.watch_loop(), name="loop lag"),
        )
        try:
            with self._signals():
                return await self._start_and_serve()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._server.stop(None)
            await self._engine.close()
            if self._assembly is not None:
                await self._assembly.close()

    def _serve_metrics(self) -> None:
        """Raises BindError."""
        host, port = self._settings.host, self._settings.metrics_port
        if port is None:
            return
        port = serve_metrics(self._metrics, host, port)
        _log.info("serving_metrics", address=f"http://{host}:{port}/metrics")

    async def _start_and_serve(self) -> int:
        start = asyncio.create_task(self._make_ready(), name="start")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await _first_of(start, stop)
            if not start.done():
                # It may serve already, while what makes first requests quicker is still being started.
                return await self._drain() if self._engine.is_healthy else EXIT_OK
            try:
                await start
            except StepwireError as error:
                _log.error("start_failed", reason=error.reason, error=error.message, **_log_fields(error))
                return _cannot_start(error.message)
            settle_memory()
            _log.info("ready", seconds=round(time.monotonic() - self._began, 3), model=self._engine.model_name)
            await _first_of(stop, self._engine.failed)
            return await (self._fail() if self._engine.failed.done() else self._drain())
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)

    async def _make_ready(self) -> None:
        """From settings to a serving engine. Raises StepwireError."""
        settings = self._settings
        path = _model_path(settings)
        with startup_trace(self._tracer, path):
            with startup_phase(self._tracer, PHASE):
                checkpoint = await asyncio.to_thread(check_before_start, path, wish_of(settings))
            plan = start_plan(settings, checkpoint, path)
            assembly = Assembly(settings, plan, self._tracer, self._supervision, self._engine.adapters)
            self._assembly = assembly
            model, assembled = await _both(
                asyncio.to_thread(_load_text_side, checkpoint, plan.max_model_len, settings.grammar_timeout),
                self._start_all(assembly),
            )
            first = assembled[0].started
            model = replace(
                model,
                max_model_len=min(each.started.max_model_len for each in assembled),
                max_draft_tokens=settings.max_draft_tokens,
            )
            with startup_phase(self._tracer, "load_adapters", first.epoch):
                for name, adapter_path in settings.adapters.items():
                    await self._engine.adapters.load(name, adapter_path)
            # What one accepts the others must be able to take over.
            num_blocks = min(each.config.num_blocks for each in assembled)
            await self._engine.begin(
                model, [replace(each, config=replace(each.config, num_blocks=num_blocks)) for each in assembled]
            )
            self._supervision.serving()
        await self._health.update()
        if model.template is not None:
            await model.template.start()

    async def _start_all(self, assembly: Assembly) -> list[Assembled]:
        """The groups of all replicas at once; the first failure is raised, and ends the others."""
        settings = self._settings
        size = len(settings.workers) // settings.replicas
        groups = [settings.workers[i : i + size] for i in range(0, len(settings.workers), size)]
        starts = [asyncio.create_task(assembly.start(addresses)) for addresses in groups]
        try:
            return await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _add_replica(self, addresses: Sequence[str]) -> int:
        if self._assembly is None:
            raise not_ready()
        return await self._engine.add_replica(await self._assembly.start(addresses))

    async def _drain(self) -> int:
        """SIGTERM: no new requests; running ones get their time, unless a second signal comes."""
        _log.info("draining", seconds=self._settings.shutdown_timeout)
        drain = asyncio.create_task(self._engine.drain(self._settings.shutdown_timeout), name="drain")
        now = asyncio.create_task(self._stop_now.wait(), name="second signal")
        await asyncio.sleep(0)
        await self._health.update()
        await _first_of(drain, now, self._engine.failed)
        is_drained = drain.done()
        for task in (drain, now):
            task.cancel()
        await asyncio.gather(drain, now, return_exceptions=True)
        if is_drained:
            await self._server.stop(_ERROR_GRACE_S)
            _log.info("stopped")
            return EXIT_OK
        if self._engine.failed.done():
            return await self._fail()
        _log.warning("interrupted")
        return EXIT_INTERRUPTED

    async def _fail(self) -> int:
        """The workers are lost for good: clients get the cause, then the process ends so that its supervisor acts."""
        error = self._engine.failed.result()
        _log.critical("worker_group_failed", reason=error.reason, error=error.message, **_log_fields(error))
        await self._health.update()
        await self._server.stop(_ERROR_GRACE_S)
        sys.stderr.write(f"stepwire scheduler: {error.message}\n")
        sys.stderr.flush()
        return EXIT_FENCED if error.reason == "FENCED" else EXIT_WORKER_FAILED

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT asks for a drain, the second one for an end at once."""

        def stop() -> None:
            (self._stop_now if self._stop.is_set() else self._stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Health:
    """Keeps grpc.health.v1 in step with the engine: its state, its step loop, its workers."""

    def __init__(self, engine: Engine, servicer: HealthServicer) -> None:
        self._engine = engine
        self._servicer = servicer
        self._is_serving = False

    async def follow(self) -> None:
        """Looks again and again."""
        while True:
            await self.update()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def set_serving(self, service: str) -> None:
        """A service that answers whatever the engine's state is."""
        await self._servicer.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def update(self) -> None:
        """Looks once."""
        is_serving = self._engine.is_healthy
        if is_serving is self._is_serving:
            return
        self._is_serving = is_serving
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._servicer.set(service, status)


def _served_name(settings: SchedulerSettings) -> str:
    return settings.served_model_name or Path(settings.model).name.removesuffix(".gguf") or "model"


def _model_path(settings: SchedulerSettings) -> str:
    # Links stay: a hub cache links to blobs whose names say nothing, and workers are told this path.
    return os.path.abspath(os.path.expanduser(settings.model))


def start_plan(settings: SchedulerSettings, checkpoint: Checkpoint, path: str) -> StartPlan:
    """What workers are to be made ready for, by the settings and what the checkpoint says of its model."""
    config = checkpoint.config
    return StartPlan(
        model_path=path,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        fingerprint=checkpoint.fingerprint,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=settings.max_model_len or config.max_position_count,
        max_sequences=settings.max_num_seqs,
        max_step_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        num_blocks=settings.num_kv_blocks,
        worker_timeout_s=settings.worker_timeout,
        fit_max_model_len=settings.fit_max_model_len,
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp,
    )


def _load_text_side(checkpoint: Checkpoint, max_model_len: int, grammar_timeout_s: float) -> ServedModel:
    """Tokenizer, template and grammars. Blocks for a few hundred milliseconds."""
    try:
        files = load_tokenizer(checkpoint)
    except CheckpointError as error:
        raise check_failed(Problem.of(error), phase="tokenizer") from error
    config = checkpoint.config
    special = {"bos_token": files.bos_token or "", "eos_token": files.eos_token or ""}
    return ServedModel(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        tokens=Tokens(files.tokenizer, config.vocab_size),
        template=None if files.chat_template is None else ChatTemplate(files.chat_template, special),
        grammars=GrammarChecker(
            files.tokenizer.to_str(), config.vocab_size, config.eos_token_ids, time_limit_s=grammar_timeout_s
        ),
    )


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    """Waits until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _both(
    first: Awaitable[ServedModel], second: Awaitable[list[Assembled]]
) -> tuple[ServedModel, list[Assembled]]:
    """Waits for both; when one fails the other is cancelled."""
    tasks = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_fields(error: StepwireError) -> dict[str, str]:
    return {f"error_{key}": value for key, value in error.metadata.items()}


def _cannot_start(text: str) -> int:
    sys.stderr.write(f"stepwire scheduler: {text}\n")
    sys.stderr.flush()
    return EXIT_CANNOT_START
