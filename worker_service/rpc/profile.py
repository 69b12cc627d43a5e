"""StartProfile and StopProfile: between messages and the device thread."""

from collections.abc import Iterator

from stepwire.v1 import worker_pb2
from worker_service.device_thread import DeviceThread
from worker_service.rpc.lifecycle import Lifecycle
from worker_service.rpc.limits import check_number
from worker_service.rpc.ports import Runtime
from worker_service.runtime.report import Phase, Profile

MAX_STEPS = 1000
_CHUNK_BYTES = 1 << 20


async def start_profile(
    lifecycle: Lifecycle, device: DeviceThread[Runtime], request: worker_pb2.StartProfileRequest
) -> None:
    """Begins a profile. Raises StepwireError, and what the runtime raises."""
    check_number("max_step_count", request.max_step_count, 1, MAX_STEPS)
    _require_ready(lifecycle, "StartProfile", request.epoch)
    await device.run(lambda runtime: runtime.start_profile(request.max_step_count))


async def stop_profile(
    lifecycle: Lifecycle, device: DeviceThread[Runtime], request: worker_pb2.StopProfileRequest
) -> Iterator[worker_pb2.StopProfileResponse]:
    """Ends the profile; answers it in messages, the last one with the summary. Raises as `start_profile`."""
    _require_ready(lifecycle, "StopProfile", request.epoch)
    return _messages(await device.run(lambda runtime: runtime.stop_profile()))


def _require_ready(lifecycle: Lifecycle, method: str, epoch: int) -> None:
    lifecycle.state.require_epoch(epoch)
    lifecycle.state.require_phase(method, Phase.READY)


def _messages(profile: Profile) -> Iterator[worker_pb2.StopProfileResponse]:
    for start in range(0, len(profile.trace), _CHUNK_BYTES):
        yield worker_pb2.StopProfileResponse(trace=profile.trace[start : start + _CHUNK_BYTES])
    rows = [
        worker_pb2.ProfileRow(
            part=row.part, operator=row.operator, call_count=row.num_calls, cpu_ns=row.cpu_ns, device_ns=row.device_ns
        )
        for row in profile.rows
    ]
    yield worker_pb2.StopProfileResponse(summary=worker_pb2.ProfileSummary(step_count=profile.num_steps, rows=rows))
