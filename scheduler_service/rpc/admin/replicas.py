"""Replicas that come and go while the others serve, as AdminService tells it."""

from collections.abc import Awaitable, Callable, Sequence

from scheduler_service.engine.changes import Changes
from scheduler_service.engine.models import Models
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import admin_pb2 as pb

AddReplica = Callable[[str, Sequence[str]], Awaitable[int]]
"""Makes workers at these addresses ready and serves a model on them, too; answers the replica's number."""

_MAX_WORKERS = 1024
_MAX_ADDRESS_LEN = 512


class ReplicaCalls:
    """AddReplica and DrainReplica. What was begun is finished, whoever waits for it."""

    def __init__(self, models: Models, add_replica: AddReplica) -> None:
        self._models = models
        self._add_replica = add_replica
        self._changes = Changes("replicas", takes_errors=False)

    async def add(self, request: pb.AddReplicaRequest) -> pb.AddReplicaResponse:
        """See admin.proto."""
        addresses = list(request.workers)
        check_addresses(addresses)
        model = self._models.get(request.model).model_name
        replicas = [replica for engine in self._models for replica in engine.replicas]
        held = {report.address for replica in replicas for report in replica.rank_reports()}
        if taken := held.intersection(addresses):
            text = f"these workers serve already: {', '.join(sorted(taken))}; name others"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
        return pb.AddReplicaResponse(replica=await self._changes.run(self._add(model, addresses)))

    async def drain(self, request: pb.DrainReplicaRequest) -> pb.DrainReplicaResponse:
        """See admin.proto."""
        await self._changes.run(self._models.get(request.model).replicas.drain(request.replica))
        return pb.DrainReplicaResponse()

    async def _add(self, model: str, addresses: Sequence[str]) -> int:
        return await self._add_replica(model, addresses)


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises FIELD_INVALID for what cannot be workers."""
    if not 1 <= len(addresses) <= _MAX_WORKERS or not all(map(_is_address, addresses)):
        text = f"workers must be 1 to {_MAX_WORKERS} addresses, each host:port"
        raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
    if len(set(addresses)) < len(addresses):
        raise StepwireError("FIELD_INVALID", "a worker is named twice", {"field": "workers"})


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and len(text) <= _MAX_ADDRESS_LEN and port.isascii() and port.isdigit() and 0 < int(port) < 65536
