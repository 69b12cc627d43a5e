"""How the scheduler stands, as AdminService tells it."""

import time

from google.protobuf import duration_pb2

from scheduler_service.engine.group import RankReport
from scheduler_service.engine.models import Models
from scheduler_service.rpc.convert import model_message
from stepwire.v1 import admin_pb2 as pb


class StateCalls:
    """GetState."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._began = time.monotonic()

    def get(self, request: pb.GetStateRequest) -> pb.GetStateResponse:
        """See admin.proto."""
        engine = self._models.get(request.model)
        replicas = list(engine.replicas)
        epochs = [replica.group.epoch for replica in replicas if replica.group is not None]
        return pb.GetStateResponse(
            model=model_message(engine.model_info()),
            epoch=epochs[0] if epochs else 0,
            workers=[_worker(replica.number, report) for replica in replicas for report in replica.rank_reports()],
            call_count=engine.num_calls,
            uptime=_duration(time.monotonic() - self._began),
            models=[each.model_name for each in self._models],
        )


def _worker(replica: int, report: RankReport) -> pb.WorkerState:
    return pb.WorkerState(
        replica=replica,
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
