"""What a check finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` says what to do, unless all is well."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def human_bytes(num_bytes: float) -> str:
    """A size in the largest binary unit that keeps it at least 1, such as "3.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
