"""The one thread that touches the device."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")

Done = Callable[[T | None, BaseException | None], None]


class DeviceStopped(Exception):
    """The device thread takes no more work: it was closed, or a call ended it. `__cause__` says which call's error."""


class DeviceThread(Generic[R]):
    """Runs calls on a runtime, one after the other, in the order they were given.

    The runtime is made on the thread, too, so importing and building it never holds up the event
    loop; calls given meanwhile wait. Outcomes are delivered on the event loop that `start` ran
    on, in the same order.

    An outcome wakes the event loop, whose work then holds up the next call: both need the interpreter. So a
    call may be given that says, by `launched`, when it has handed its work to the device; the outcome of
    the call before is delivered then.

    A call may raise; that is its own affair unless `is_fatal` says that the device can no longer be
    trusted. Then the outcome is delivered, every later call fails with DeviceStopped, and
    `on_fatal` is called on the event loop.
    """

    def __init__(
        self,
        make_runtime: Callable[[], R],
        *,
        is_fatal: Callable[[BaseException], bool],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._make_runtime = make_runtime
        self._is_fatal = is_fatal
        self._on_fatal = on_fatal
        self._jobs: queue.SimpleQueue[tuple[Callable[[R], Any], Done[Any], bool] | None] = queue.SimpleQueue()
        self._held_back: tuple[Done[Any], Any] | None = None
        self._runtime: R | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A hung device call must not keep a process alive that is to exit.
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    @property
    def runtime(self) -> R | None:
        """The runtime, for attributes that may be read from any thread; None until it is made."""
        return self._runtime

    @property
    def is_broken(self) -> bool:
        """Whether a call has ended it, so that it takes no more work."""
        return self._runtime is not None and self._failure is not None

    def start(self) -> None:
        """Starts the thread; outcomes go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def post(self, call: Callable[[R], T], done: Done[T], *, launches: bool = False) -> None:
        """Queues `call`; `done(result, error)` follows on the event loop. Never blocks.

        `launches` says that the call itself calls `launched`.
        """
        if self._closed:
            raise DeviceStopped("the device thread is closed")
        self._jobs.put((call, done, launches))

    def launched(self) -> None:
        """Called by a call when the device works and the interpreter is free: delivers the outcome before it."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            self._deliver(*held_back, None)

    async def run(self, call: Callable[[R], T]) -> T:
        """Queues `call` and waits for its outcome. Cancelling the wait does not stop the call."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self.post(call, done)
        return await future

    async def close(self, timeout_s: float) -> bool:
        """Takes no more calls and waits for those queued. Answers whether the thread ended within `timeout_s`."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            runtime = self._make_runtime()
        except BaseException as error:
            self._fail(error)
            runtime = None
        self._runtime = runtime
        while (job := self._next_job()) is not None:
            call, done, launches = job
            if not launches:
                self.launched()
            if runtime is None or self._failure is not None:
                self.launched()
                self._deliver(done, None, _stopped_by(self._failure))
                continue
            try:
                result = call(runtime)
            except BaseException as error:
                self.launched()
                is_fatal = self._is_fatal(error)
                if is_fatal:
                    # Before anybody hears of the error: who asks then must not find a thread that seems whole.
                    self._failure = error
                self._deliver(done, None, _reportable(error))
                if is_fatal:
                    self._fail(error)
            else:
                self.launched()
                self._held_back = (done, result)

    def _next_job(self) -> tuple[Callable[[R], Any], Done[Any], bool] | None:
        if self._jobs.empty():
            self.launched()
        job = self._jobs.get()
        if job is None:
            self.launched()
        return job

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._deliver(lambda _result, _error: self._on_fatal(error), None, error)

    def _deliver(self, done: Done[Any], result: Any, error: BaseException | None) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(done, result, error)
        except RuntimeError:
            # The loop closed between the check and the call: nobody is left to tell.
            return


def _stopped_by(cause: BaseException | None) -> DeviceStopped:
    error = DeviceStopped(f"the device thread has ended: {cause!r}")
    error.__cause__ = cause
    return error


def _reportable(error: BaseException) -> Exception:
    """The error as a coroutine can raise it: SystemExit would end the event loop, StopIteration a generator."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return _stopped_by(error)
