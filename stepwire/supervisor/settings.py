"""Settings of the supervisor itself; those of the services are the services' own."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


def default_log_dir() -> str:
    """`$XDG_STATE_HOME/stepwire/logs`, which is `~/.local/state/stepwire/logs` by default."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return str(Path(state) / "stepwire" / "logs")


class SupervisorSettings(BaseModel):
    """Settings of `stepwire serve` beyond those that it passes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log_dir: str = Field(
        default_factory=default_log_dir, min_length=1, description="Folder for the log file of each worker."
    )
    standby: bool = Field(
        default=True,
        description="Keep a second process for scheduler and worker that has imported all it needs, so that one that "
        "ends is replaced without that wait.",
    )
    placement: Literal["local", "ray"] = Field(
        default="local",
        description="Where workers run: all on this machine, or one an accelerator on the nodes of a Ray cluster, of "
        "which this machine is one.",
    )
    ray_address: str = Field(
        default="auto",
        pattern=r"^(auto|[^\s/]+:\d{1,5})$",
        description="Head of the Ray cluster, host:port; auto finds the one that this machine is a node of.",
    )
    ray_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="How Ray places the workers of a group: on few nodes, or on many; the strict ones refuse to start "
        "where they cannot have it on just one node, or on one node each.",
    )
