"""What the API leaderworkerset.x-k8s.io/v1 allows in a LeaderWorkerSet, as its reference documents it.

No package publishes its schema. Pod templates are Kubernetes' own, and are for its schemas to check.
"""

from collections.abc import Mapping
from typing import Any

_COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 0}
_COUNT_OR_PERCENT: Mapping[str, Any] = {"anyOf": [_COUNT, {"type": "string", "pattern": r"^\d+%$"}]}


def _object(required: tuple[str, ...] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_POD_TEMPLATE = _object(("spec",), metadata={"type": "object"}, spec={"type": "object"})
_ROLLOUT = _object(
    ("type",),
    type={"enum": ["RollingUpdate"]},
    rollingUpdateConfiguration=_object(partition=_COUNT, maxUnavailable=_COUNT_OR_PERCENT, maxSurge=_COUNT_OR_PERCENT),
)
_TEMPLATE = _object(
    ("workerTemplate",),
    leaderTemplate=_POD_TEMPLATE,
    workerTemplate=_POD_TEMPLATE,
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "Default", "None"]},
    subGroupPolicy=_object(
        subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]},
        subGroupSize={"type": "integer", "minimum": 1},
    ),
    volumeClaimTemplates={"type": "array", "items": {"type": "object"}},
    persistentVolumeClaimRetentionPolicy=_object(
        whenDeleted={"enum": ["Retain", "Delete"]}, whenScaled={"enum": ["Retain", "Delete"]}
    ),
)
SCHEMA: Mapping[str, Any] = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    # Its name is the first label of its pods' host names.
    metadata={
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}},
        "required": ["name"],
    },
    spec=_object(
        ("leaderWorkerTemplate",),
        replicas=_COUNT,
        leaderWorkerTemplate=_TEMPLATE,
        rolloutStrategy=_ROLLOUT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_object(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    ),
)
