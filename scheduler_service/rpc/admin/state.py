"""How the scheduler stands, as AdminService tells it."""

import time

from google.protobuf import duration_pb2

from scheduler_service.engine.engine import Engine
from scheduler_service.engine.group import RankReport
from scheduler_service.rpc.convert import model_message
from stepwire.v1 import admin_pb2 as pb


class StateCalls:
    """GetState."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began = time.monotonic()

    def get(self) -> pb.GetStateResponse:
        """See admin.proto."""
        engine, group = self._engine, self._engine.group
        return pb.GetStateResponse(
            model=model_message(engine.model_info()),
            epoch=0 if group is None else group.epoch,
            workers=[] if group is None else [_worker(report) for report in group.rank_reports()],
            call_count=engine.num_calls,
            uptime=_duration(time.monotonic() - self._began),
        )


def _worker(report: RankReport) -> pb.WorkerState:
    return pb.WorkerState(
        rank=report.rank,
        address=report.address,
        host=report.host,
        process_id=report.process_id,
        silent_duration=_duration(report.silent_s),
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
