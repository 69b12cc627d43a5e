"""One child process of the supervisor."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stepwire.supervisor.parent import SUPERVISOR_VARIABLE

_TAIL_BYTES = 65_536


class LogError(OSError):
    """A child's log cannot be written; the text names it, the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. Output goes to `log_path`, or to the supervisor's own output for None."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path | None = None


class Child:
    """A child that was started. It is in a session of its own, so a terminal's Ctrl-C does not reach it."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Starts it. Raises OSError when it cannot be started, LogError when its log cannot be written."""
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(_open_log(spec.log_path)) if spec.log_path else None
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**spec.environment, SUPERVISOR_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        return cls(spec, process)

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits until it has ended."""
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def describe_end(self) -> str:
        """One line: how it ended, what it said last and where its log is. Call it after the end."""
        status = self.status or 0
        how = f"exited with status {status}" if status >= 0 else _signal_text(-status)
        # What is no error explains no kill.
        said = _last_words(self.spec.log_path, errors_only=status < 0) if self.spec.log_path else ""
        where = f"; log: {self.spec.log_path}" if self.spec.log_path else ""
        return f"{self.spec.name} {how}{': ' + said if said else ''}{where}"


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_suffix(".previous.log"))
        return path.open("wb")
    except OSError as error:
        text = f"logs cannot be written to {path} ({error.strerror or error}): choose another folder with --log-dir"
        raise LogError(error.errno or 0, text) from error


def _signal_text(number: int) -> str:
    name = signal.Signals(number).name
    hint = " (the kernel does this when memory runs out)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _last_words(path: Path, *, errors_only: bool) -> str:
    """What a log says last: a line that is no record (a crash), else the last error, else the last record if wanted."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    if not lines:
        return ""
    records = [record for line in lines if (record := _record(line)) is not None]
    if _record(lines[-1]) is None or not records:
        return lines[-1]
    errors = [record for record in records if record.get("level") in ("error", "critical")]
    if errors_only and not errors:
        return ""
    last = (errors or records)[-1]
    exception = str(last.get("exception") or "").strip().rpartition("\n")[2]
    return ": ".join(str(text) for text in (last.get("message"), last.get("error"), exception) if text)


def _record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
