"""Sleep and WakeUp: a worker that is ready gives its device's memory back, and takes it again."""

from collections.abc import Callable
from functools import partial

import structlog

from stepwire.rpc.errors import StepwireError
from worker_service.device_thread import DeviceThread
from worker_service.rpc.ports import Runtime
from worker_service.rpc.progress import LoadProgress, load_errors
from worker_service.rpc.state import WorkerState
from worker_service.rpc.stream import StepSession
from worker_service.runtime.report import Phase, SleepLevel

_log = structlog.stdlib.get_logger(__name__)


class SleepCalls:
    """The two calls; whoever makes them sees to it that no other change goes on meanwhile.

    Phase, epoch and step stream outlive a sleep. Methods raise StepwireError, and what the runtime raises.
    """

    def __init__(
        self, state: WorkerState, device: DeviceThread[Runtime], session: Callable[[], StepSession | None]
    ) -> None:
        self._state = state
        self._device = device
        self._session = session

    async def sleep(self, epoch: int, level: SleepLevel) -> SleepLevel:
        """Gives memory back, unless as much has been given back before. Raises WRONG_PHASE, STATE_MISMATCH."""
        state = self._state
        state.require_epoch(epoch)
        session = self._require_session("Sleep")
        if level <= state.sleep_level:
            return state.sleep_level
        self._check_quiet(session)
        # From now on, so that no step gets between.
        session.is_asleep = True
        try:
            await self._device.run(lambda runtime: runtime.sleep(level))
        except BaseException:
            session.is_asleep = state.sleep_level is not SleepLevel.AWAKE
            raise
        state.sleep_level = level
        _log.info("asleep", level=level.name, epoch=epoch)
        return level

    async def wake_up(self, epoch: int, progress: LoadProgress) -> None:
        """Takes memory again; harmless when it does not sleep. `progress.cancel_reason` stops it, and it sleeps on.
        Raises WRONG_PHASE."""
        state = self._state
        state.require_epoch(epoch)
        session = self._require_session("WakeUp")
        if state.sleep_level is SleepLevel.AWAKE:
            return
        await self._device.run(partial(_wake_up_runtime, progress=progress))
        state.sleep_level, session.is_asleep = SleepLevel.AWAKE, False
        _log.info("awake", epoch=epoch)

    def _require_session(self, call: str) -> StepSession:
        session = self._session()
        if session is None:
            raise self._state.wrong_phase(call, Phase.READY)
        return session

    def _check_quiet(self, session: StepSession) -> None:
        guard, runtime = session.guard, self._device.runtime
        num_sequences = 0 if runtime is None else runtime.num_sequences
        if guard.last_accepted != guard.last_executed or num_sequences:
            raise StepwireError(
                "STATE_MISMATCH",
                f"steps up to {guard.last_accepted} are accepted, {guard.last_executed} is the last executed and "
                f"{num_sequences} sequences are known; wait for the steps and end or preempt the sequences first",
                {"accepted": str(guard.last_accepted), "sequences": str(num_sequences)},
            )


def _wake_up_runtime(runtime: Runtime, progress: LoadProgress) -> None:
    with load_errors(progress):
        runtime.wake_up(progress.is_cancelled)
