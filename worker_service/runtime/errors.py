"""The runtime's own error; a checkpoint that cannot be used is loader.errors.CheckpointError."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class RuntimeFailure(Exception):
    """The runtime cannot do what it was asked for.

    `code` is one of "device_unavailable", "out_of_memory", "unsupported" (a setting or model that
    this version cannot serve), "limit" (more than a setting allows), "invalid" (a number out of its range,
    or a call out of its phase), "cancelled" (by the caller), "rendezvous_failed" and "peer_lost" (the ranks of the
    group do not come together, or one of the others was lost) and "device_failed" (the device can no longer
    be trusted).
    `message` says what was needed, what there was and which setting to change; `metadata` repeats
    the variable parts for programs.
    """

    code: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message
