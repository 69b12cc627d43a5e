"""The worker process: one device behind WorkerService."""

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path

import structlog
from grpc_health.v1 import health_pb2
from opentelemetry.trace import TracerProvider

from loader.checkpoint import open_checkpoint
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.run import settle_memory
from stepwire.rpc.server import (
    BindError,
    HealthServicer,
    add_standard_services,
    bind,
    create_server,
    serve_metrics,
)
from stepwire.telemetry import names
from stepwire.telemetry.logs import configure_logging
from stepwire.telemetry.metrics import Metrics
from stepwire.telemetry.setup import Telemetry
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import worker_pb2_grpc
from worker_service.device_thread import DeviceThread
from worker_service.rpc.failures import is_fatal
from worker_service.rpc.lifecycle import Lifecycle
from worker_service.rpc.paths import ModelRoots
from worker_service.rpc.ports import Runtime
from worker_service.rpc.servicer import SERVICE_NAME, WorkerServicer
from worker_service.runtime.report import Phase
from worker_service.settings import WorkerSettings

MAX_MESSAGE_BYTES = 64 * 2**20

# For the step in hand when told to stop; a step takes longer only on a device that hangs.
DRAIN_TIMEOUT_S = 10.0
# For answers that are written, such as the cause of a failure, to reach their callers.
FLUSH_TIMEOUT_S = 1.0
# How long a thread keeps the interpreter when another one wants it; Python's own 5 ms are a whole step.
SWITCH_INTERVAL_S = 0.0001

MakeRuntime = Callable[[WorkerSettings], Runtime]

_log = structlog.stdlib.get_logger(__name__)


class ExitCode(IntEnum):
    """With what a worker process exits. A second signal exits with 128 + its number.

    STOPPED: told to, and the device let go. CANNOT_START: for a reason that it has said in one line,
    such as an address that is in use; also a defect of the service. DEVICE_FAILED: the device, or
    what drives it, cannot be made, broke, or hangs.
    NO_SCHEDULER: none came within `scheduler_timeout`.
    """

    STOPPED = 0
    CANNOT_START = 1
    DEVICE_FAILED = 3
    NO_SCHEDULER = 4


async def serve(settings: WorkerSettings, *, make_runtime: MakeRuntime | None = None) -> int:
    """Serves until SIGTERM or SIGINT, a failure of the device, or `scheduler_timeout`; returns an ExitCode.

    A first signal lets the step that is running end and be answered; a second ends the process at
    once. When the server listens, one record "listening" with its address is logged.
    `make_runtime` runs on the device thread, where it may import what it needs.
    """
    place: dict[str, object] = {}
    configure_logging(format=settings.log_format, level=settings.log_level, service=names.SERVICE_WORKER, fields=place)
    try:
        telemetry = Telemetry.start(
            names.SERVICE_WORKER, otlp_endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio
        )
    except ValueError as error:
        return _cannot_start(str(error))
    # The device thread comes back from a product and needs the interpreter at once; the event loop can wait.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    worker = Worker(
        settings,
        telemetry.tracer_provider,
        make_runtime or _make_runtime,
        on_ready=settle_memory,
        log_fields=place,
    )
    worker.metrics.watch_spans(telemetry.exporter)
    try:
        _watch_signals(worker)
        await worker.start()
        code = await worker.wait()
        worker_ended = await worker.shut_down(code)
    except BindError as error:
        return _cannot_start(error.strerror or str(error))
    finally:
        await asyncio.to_thread(telemetry.shutdown)
    if not worker_ended and code is ExitCode.STOPPED:
        code = ExitCode.DEVICE_FAILED
    _log.info("stopped", code=code.name)
    if not worker_ended:
        # The interpreter would wait for, or crash on, a device call that does not return.
        os._exit(code)
    return code


def preload(settings: WorkerSettings) -> None:
    """Imports what a worker of these settings computes with: a process that stands by then begins at once."""
    if settings.device == "sim":
        importlib.import_module("worker_service.runtime.sim")
        return
    importlib.import_module("worker_service.runtime.worker")
    if settings.device == "cpu" and settings.native_kernels:
        from worker_service.kernels import native

        native.load()


def _cannot_start(text: str) -> ExitCode:
    # Also when the log goes elsewhere or says less.
    sys.stderr.write(f"stepwire worker: {text}\n")
    sys.stderr.flush()
    return ExitCode.CANNOT_START


class Worker:
    """A worker service in this process: device thread, server, and the reason to stop. Needs a running event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        tracer_provider: TracerProvider | None,
        make_runtime: MakeRuntime,
        *,
        fingerprint_of: Callable[[Path], str] | None = None,
        on_ready: Callable[[], None] | None = None,
        log_fields: dict[str, object] | None = None,
    ) -> None:
        """`on_ready` is called whenever the worker gets ready for steps; `log_fields` is told its rank and epoch."""
        self._log_fields = {} if log_fields is None else log_fields
        self._on_ready = on_ready
        self._settings = settings
        self._stop: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self._device: DeviceThread[Runtime] = DeviceThread(
            partial(make_runtime, settings), is_fatal=is_fatal, on_fatal=self._on_fatal
        )
        self._server = create_server(
            tracer_provider=tracer_provider, max_message_bytes=MAX_MESSAGE_BYTES, key=settings.cluster_key
        )
        self.metrics = Metrics()
        self._health: HealthServicer = add_standard_services(self._server, [SERVICE_NAME])
        self._lifecycle = Lifecycle(
            self._device,
            tracer=get_tracer(tracer_provider),
            roots=ModelRoots(settings.model_roots),
            fingerprint_of=fingerprint_of or _fingerprint,
            on_phase=self._on_phase,
            on_hang=self._on_device_hangs,
            metrics=self.metrics,
        )
        self._servicer = WorkerServicer(self._lifecycle, self._device)
        self._watchers: list[asyncio.Task[None]] = []
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)

    async def start(self) -> int:
        """Listens and returns the port; the runtime is made meanwhile. Raises BindError."""
        port = bind(self._server, self._settings.host, self._settings.port)
        self._serve_metrics()
        self._device.start()
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._watchers = [
            asyncio.create_task(self._watch_scheduler()),
            asyncio.create_task(self.metrics.watch_loop()),
        ]
        _log.info("listening", address=f"{self._settings.host}:{port}", process_id=os.getpid())
        return port

    async def wait(self) -> ExitCode:
        """Waits for a reason to stop."""
        return await asyncio.shield(self._stop)

    def stop(self, code: ExitCode) -> bool:
        """Gives a reason to stop; the first counts. Answers whether this is it."""
        if self._stop.done():
            return False
        self._stop.set_result(code)
        return True

    async def shut_down(self, code: ExitCode) -> bool:
        """Answers the step that is running, refuses what is queued, and ends. Answers whether the device let go."""
        for watcher in self._watchers:
            watcher.cancel()
        await self._health.set_all(serving=False)
        if code is not ExitCode.DEVICE_FAILED:
            reason = StepwireError("DRAINING", "the worker is shutting down")
            try:
                await asyncio.wait_for(self._lifecycle.shut_down(reason), DRAIN_TIMEOUT_S)
            except TimeoutError:
                _log.warning("device_call_did_not_end", waited_s=DRAIN_TIMEOUT_S)
        await self._server.stop(FLUSH_TIMEOUT_S)
        return await self._device.close(FLUSH_TIMEOUT_S)

    def _serve_metrics(self) -> None:
        """Raises BindError."""
        if self._settings.metrics_port is not None:
            host = self._settings.host
            port = serve_metrics(self.metrics, host, self._settings.metrics_port)
            _log.info("serving_metrics", address=f"http://{host}:{port}/metrics")

    async def _on_phase(self, phase: Phase) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        self._log_fields.update(rank=self._lifecycle.rank, epoch=self._lifecycle.state.epoch)
        await self._health.set(SERVICE_NAME, serving if phase is Phase.READY else not_serving)
        if phase is Phase.READY and self._on_ready is not None:
            self._on_ready()

    def _on_fatal(self, error: BaseException) -> None:
        _log.critical("device_failed", exc_info=error)
        self.stop(ExitCode.DEVICE_FAILED)

    def _on_device_hangs(self) -> None:
        _log.critical("device_hangs")
        self.stop(ExitCode.DEVICE_FAILED)

    async def _watch_scheduler(self) -> None:
        timeout_s = self._settings.scheduler_timeout
        if timeout_s is None:
            return
        while True:
            left_s = timeout_s - self._servicer.idle_s
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        _log.error("no_scheduler", waited_s=timeout_s)
        self.stop(ExitCode.NO_SCHEDULER)


def _watch_signals(worker: Worker) -> None:
    def on_signal(number: signal.Signals) -> None:
        _log.info("stopping", signal=number.name)
        if not worker.stop(ExitCode.STOPPED):
            os._exit(128 + number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _make_runtime(settings: WorkerSettings) -> Runtime:
    if settings.device == "sim":
        from worker_service.runtime.sim import SimRuntime

        return SimRuntime(settings)
    # Imports torch: on the device thread, so that the server listens meanwhile.
    from worker_service.runtime.restart_store import RestartStore
    from worker_service.runtime.worker import WorkerRuntime

    return WorkerRuntime(settings, RestartStore.of_settings(settings.restart_store, settings.restart_store_bytes))


def _fingerprint(path: Path) -> str:
    return open_checkpoint(path).fingerprint
