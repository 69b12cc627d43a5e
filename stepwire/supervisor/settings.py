"""Settings of the supervisor itself; those of the services are the services' own."""

import os
from pathlib import Path

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
