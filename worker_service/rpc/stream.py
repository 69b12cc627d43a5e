"""The step stream: steps in, results out, in order, with several in flight."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from functools import partial

import structlog
from google.protobuf.message import DecodeError

from stepwire.rpc.errors import StepwireError, invalid_message
from stepwire.v1 import worker_pb2
from worker_service.device_thread import DeviceStopped, DeviceThread
from worker_service.rpc.convert import step_input, step_result, step_timings
from worker_service.rpc.failures import step_failure
from worker_service.rpc.guard import StepGuard, Verdict
from worker_service.rpc.limits import StepLimits, check_step, sequence_problem, without_sequences
from worker_service.rpc.ports import Runtime
from worker_service.rpc.spans import SequenceSpans, request_ids
from worker_service.runtime.step import StateMismatch, StepInput, StepOutput

# Of one stream: read, and not yet answered. Two keep the device busy; more serve deeper pipelines. A peer
# that sends faster is held up by flow control. Groups have one more than pipeline stages.
MAX_STEPS_IN_FLIGHT = 8
# A rank that does not answer with tokens says so often that it has executed all steps so far, and after each step
# that is traced.
ACKNOWLEDGE_EVERY = 8

_log = structlog.stdlib.get_logger(__name__)


class StepSkipped(Exception):
    """A queued step was not run, because a step before it broke off or its stream ended the epoch."""


class StepSession:
    """The steps of one epoch, whatever streams they come on: order, limits, refused sequences, spans."""

    def __init__(
        self,
        epoch: int,
        *,
        limits: StepLimits,
        device: DeviceThread[Runtime],
        spans: SequenceSpans,
        on_answer: Callable[[StepOutput, int], None],
        is_output: bool = True,
        num_stages: int = 1,
    ) -> None:
        """`on_answer` is told each step's output, and the nanoseconds that the step waited for the device.

        A rank that is not the output of its group, of `num_stages` pipeline stages, acknowledges steps every now and
        then.
        """
        self.guard: StepGuard[worker_pb2.StepResult] = StepGuard(epoch)
        self.limits = limits
        self.device = device
        self.spans = spans
        self.on_answer = on_answer
        self.is_output = is_output
        self.max_in_flight = max(MAX_STEPS_IN_FLIGHT, num_stages + 1)
        self.total_forward_ns = 0
        self.is_asleep = False
        self._refused: set[int] = set()
        self._stream: StepStream | None = None

    async def open(self, request: worker_pb2.OpenStream) -> "StepStream":
        """The stream of this epoch from now on; one before it ends with ABORTED.

        Waits for the steps that were accepted before. Raises StepwireError as StepGuard.check_open.
        """
        # A scheduler that is refused must not end the stream of one that is not.
        self.guard.check_open(request.epoch, min(request.last_step_id, self.guard.last_executed))
        stream = StepStream(self)
        before, self._stream = self._stream, stream
        if before is not None:
            _log.warning("step_stream_displaced", epoch=self.guard.epoch)
            before.end(_displaced(self.guard.epoch))
        try:
            await self.device.run(_nothing)
            self.guard.check_open(request.epoch, min(request.last_step_id, self.guard.last_executed))
            if self._stream is not stream:
                raise _displaced(self.guard.epoch)
            # What is accepted and was not executed now never will be: its stream ended before its turn.
            self.guard.roll_back()
            self.guard.check_open(request.epoch, request.last_step_id)
        except BaseException:
            self.release(stream)
            raise
        return stream

    def drain(self, error: StepwireError) -> None:
        """Ends the stream, if any, with `error` after the answer of the step that is running."""
        if self._stream is not None:
            self._stream.drain(error)

    def end(self, error: StepwireError) -> None:
        """Ends the epoch, and its stream, if any, with `error`; queued steps are not run."""
        if self._stream is not None:
            self._stream.skip_queued = True
            self._stream.end(error)
            self._stream = None
        self.guard.fail(error)
        self.spans.end_all("epoch_ended")

    def release(self, stream: "StepStream") -> None:
        """Notes that this stream is over."""
        if self._stream is stream:
            self._stream = None

    def admit(self, step: StepInput) -> tuple[StepInput, dict[int, str]]:
        """What to run of a step, and the sequences of it that cannot run, with the reason.

        A refused sequence is left out of all later steps too, since those planned before its
        error was known still name it.
        """
        errors: dict[int, str] = {}
        for new in step.new_sequences:
            problem = sequence_problem(new, self.limits)
            if problem is not None:
                errors[new.sequence_id] = problem
                _log.error("sequence_refused", problem=problem, step_id=step.step_id, **request_ids(new))
            else:
                _log.debug("sequence_started", step_id=step.step_id, tokens=len(new.token_ids), **request_ids(new))
        self._refused.update(errors)
        return (without_sequences(step, self._refused) if self._refused else step), errors


class StepStream:
    """One connection's share of a session. Answers leave in the order in which their requests came."""

    def __init__(self, session: StepSession) -> None:
        self._session = session
        self._answers: asyncio.Queue[worker_pb2.ExecuteModelResponse | StepwireError | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(session.max_in_flight)
        self._reader: asyncio.Task[None] | None = None
        self._may_read = True
        self._ended = False
        # Written on either thread, read on the device thread: queued steps behind a broken one must not run.
        self.skip_queued = False

    async def responses(
        self, requests: AsyncIterable[worker_pb2.ExecuteModelRequest]
    ) -> AsyncGenerator[worker_pb2.ExecuteModelResponse, None]:
        """Answers every step of `requests`; raises the StepwireError that ends the stream."""
        guard = self._session.guard
        try:
            yield worker_pb2.ExecuteModelResponse(
                open=worker_pb2.OpenStream(epoch=guard.epoch, last_step_id=guard.last_executed)
            )
            if self._may_read:
                self._reader = asyncio.create_task(self._read(requests), name="step-reader")
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, StepwireError):
                    raise answer
                yield answer
                self._slots.release()
        finally:
            self._ended = True
            self._stop_reading()
            self._session.release(self)

    def launched(self) -> None:
        """A step computes: see DeviceThread."""
        self._session.device.launched()

    def end(self, error: StepwireError) -> None:
        """Takes no more steps; the stream ends with `error` after the answers that are ready."""
        self._stop_reading()
        self._finish(error)

    def drain(self, error: StepwireError) -> None:
        """Takes no more steps; the stream ends with `error` after the answer of the step that is running."""
        self._stop_reading()
        self.skip_queued = True
        self._finish_after_queued(error)

    def _finish(self, ending: StepwireError | None) -> None:
        if not self._ended:
            self._ended = True
            self._answers.put_nowait(ending)

    def _finish_after_queued(self, ending: StepwireError | None) -> None:
        def finish(_result: None, _error: BaseException | None) -> None:
            self._finish(ending)

        try:
            self._session.device.post(_nothing, finish)
        except DeviceStopped:
            self._finish(ending)

    def _stop_reading(self) -> None:
        self._may_read = False
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, requests: AsyncIterable[worker_pb2.ExecuteModelRequest]) -> None:
        ending: StepwireError | None = None
        try:
            # A slot is taken before a step is read, so what a peer sends beyond them stays in its own buffers.
            await self._slots.acquire()
            async for request in requests:
                self._take(request)
                await self._slots.acquire()
        except StepwireError as error:
            ending = error
        except DecodeError as error:
            ending = invalid_message(error)
        except DeviceStopped as error:
            ending = step_failure(error)
        except Exception as error:
            _log.exception("step_stream_broke", epoch=self._session.guard.epoch)
            ending = step_failure(error)
        self._finish_after_queued(ending)

    def _take(self, request: worker_pb2.ExecuteModelRequest) -> None:
        if request.WhichOneof("message") != "step":
            raise StepwireError("FIELD_INVALID", "only the first message opens the stream", {"field": "message"})
        arrived_ns = time.monotonic_ns()
        session, step = self._session, request.step
        if session.guard.check(step.epoch, step.step_id) is Verdict.REPEAT:
            session.device.post(_nothing, partial(self._answer_again, step.step_id))
            return
        if session.is_asleep:
            text = f"step {step.step_id} needs the device's memory, which was given back; call WakeUp first"
            raise StepwireError("WRONG_PHASE", text, {"call": "ExecuteModel", "held": "asleep"})
        values = step_input(step)
        check_step(values, session.limits)
        values, errors = session.admit(values)
        job = _StepJob(self, values, errors, arrived_ns)
        session.guard.accept(step.step_id)
        session.device.post(job.run, partial(self._complete, job), launches=True)

    def _complete(self, job: "_StepJob", output: StepOutput | None, error: BaseException | None) -> None:
        session = self._session
        if output is not None:
            try:
                self._answer(job, output)
                return
            except Exception as broken:
                # The step ran and its result cannot be told: as bad as a step that broke off.
                error = broken
        if error is None or isinstance(error, StepSkipped):
            return
        failure = step_failure(error, step_id=job.step.step_id)
        if isinstance(error, StateMismatch):
            _log.error("step_refused", epoch=session.guard.epoch, step_id=job.step.step_id, problem=str(error))
            session.guard.roll_back()
        else:
            _log.error("step_failed", epoch=session.guard.epoch, step_id=job.step.step_id, exc_info=error)
            session.guard.fail(failure)
        self.end(failure)

    def _answer(self, job: "_StepJob", output: StepOutput) -> None:
        session = self._session
        output.errors.update(job.errors)
        epoch, step_id = session.guard.epoch, job.step.step_id
        session.total_forward_ns += output.forward_ns
        spent = {"queue_ns": job.queue_ns, "total_forward_ns": session.total_forward_ns}
        if session.is_output:
            result = step_result(output, epoch=epoch, **spent)
        else:
            result = worker_pb2.StepResult(epoch=epoch, step_id=step_id, timings=step_timings(output, **spent))
        session.guard.complete(step_id, result)
        if session.is_output or job.step.is_traced or step_id % ACKNOWLEDGE_EVERY == 0:
            self._answers.put_nowait(worker_pb2.ExecuteModelResponse(result=result))
        else:
            self._slots.release()
        session.spans.record(job.step, output)
        session.on_answer(output, job.queue_ns)

    def _answer_again(self, step_id: int, _result: None, error: BaseException | None) -> None:
        result = self._session.guard.stored(step_id)
        if error is not None:
            self.end(step_failure(error, step_id=step_id))
        elif result is not None:
            self._answers.put_nowait(worker_pb2.ExecuteModelResponse(result=result))
        elif not self.skip_queued:
            self.end(StepwireError("STEP_OUT_OF_ORDER", f"the result of step {step_id} is no longer kept"))


class _StepJob:
    """A step on its way through the device thread."""

    __slots__ = ("_arrived_ns", "_stream", "errors", "queue_ns", "step")

    def __init__(self, stream: StepStream, step: StepInput, errors: dict[int, str], arrived_ns: int) -> None:
        self._stream = stream
        self._arrived_ns = arrived_ns
        self.step = step
        self.errors = errors
        self.queue_ns = 0

    def run(self, runtime: Runtime) -> StepOutput:
        """Runs on the device thread. Raises StepSkipped, or what the runtime raises."""
        if self._stream.skip_queued:
            raise StepSkipped
        self.queue_ns = time.monotonic_ns() - self._arrived_ns
        try:
            return runtime.execute(self.step, self._stream.launched)
        except BaseException:
            self._stream.skip_queued = True
            raise


def _nothing(_runtime: Runtime) -> None:
    """Takes a place in the queue of the device thread."""


def _displaced(epoch: int) -> StepwireError:
    return StepwireError(
        "STREAM_DISPLACED", f"a newer step stream of epoch {epoch} took this one's place", {"epoch": str(epoch)}
    )
