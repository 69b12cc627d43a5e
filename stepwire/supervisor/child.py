"""One child process of the supervisor."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stepwire.supervisor.line import MAX_LINE_BYTES, Lines, Record, encode
from stepwire.supervisor.parent import STANDBY_VARIABLE, SUPERVISOR_VARIABLE
from stepwire.supervisor.process import Launcher

_TAIL_BYTES = 65_536
_READ_BYTES = 4096


class LogError(OSError):
    """A child's log cannot be written; the text names it, the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. Output goes to `log_path`, or to the supervisor's own output for None.

    `address` is where a worker listens, by which a scheduler names it. With `has_standby` a second process is kept
    that has made itself ready and waits to take the place of the first. With a `launcher` it is started by that, on
    a machine and at an address of its choice. `group` is what it is there for: the end of all children of one group
    for good is not the end of those of another.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path | None = None
    address: str = ""
    has_standby: bool = False
    launcher: Launcher | None = None
    group: str = ""


class Child:
    """A child that was started. It is in a session of its own, so a terminal's Ctrl-C does not reach it."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, line: socket.socket, on_record: "OnRecord"
    ) -> None:
        self.spec = spec
        self.was_told = False
        """Whether it was sent a signal from here."""
        self._process = process
        self._line = line
        self._lines = Lines()
        self._on_record = on_record
        self._is_given_up = False
        self._unsent = bytearray()
        asyncio.get_running_loop().add_reader(line, self._read)

    @classmethod
    async def start(
        cls,
        spec: ChildSpec,
        on_record: "OnRecord" = lambda _record: None,
        *,
        is_first: bool = True,
        is_standby: bool = False,
    ) -> "Child":
        """Starts it. `on_record` takes what it says over its line. The log of the first begins anew.

        Raises OSError when it cannot be started, LogError when its log cannot be written.
        """
        ours, theirs = socket.socketpair()
        environment = {**spec.environment, SUPERVISOR_VARIABLE: str(os.getpid())}
        if is_standby:
            environment[STANDBY_VARIABLE] = "1"
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(theirs)
                output = stack.enter_context(_open_log(spec.log_path, is_new=is_first)) if spec.log_path else None
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return cls(spec, process, ours, on_record)

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits until it has ended."""
        return await self._process.wait()

    def say(self, record: Record) -> None:
        """Tells it something, whole, unless it has ended or has not listened for long."""
        if len(self._unsent) <= MAX_LINE_BYTES:
            self._unsent += encode(record)
            self._send_on()

    def give_up(self) -> None:
        """Ends it at once, because it does not answer."""
        self._is_given_up = True
        self.send(signal.SIGKILL)

    def close(self) -> None:
        """Closes the line to it, which ends it if it still runs."""
        if self._line.fileno() != -1:
            asyncio.get_running_loop().remove_reader(self._line)
            asyncio.get_running_loop().remove_writer(self._line)
            self._line.close()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        self.was_told = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def describe_end(self) -> str:
        """One line: how it ended, what it said last and where its log is. Call it after the end."""
        status = self.status or 0
        how = f"exited with status {status}" if status >= 0 else _signal_text(-status)
        if self._is_given_up:
            how = "did not answer and was killed"
        # What is no error explains no kill.
        said = _last_words(self.spec.log_path, errors_only=status < 0) if self.spec.log_path else ""
        where = f"; log: {self.spec.log_path}" if self.spec.log_path else ""
        return f"{self.spec.name} {how}{': ' + said if said else ''}{where}"

    def _send_on(self) -> None:
        """Sends what the line takes now, and the rest as it takes more."""
        loop = asyncio.get_running_loop()
        try:
            del self._unsent[: self._line.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        if self._unsent:
            loop.add_writer(self._line, self._send_on)
        elif self._line.fileno() != -1:
            loop.remove_writer(self._line)

    def _read(self) -> None:
        try:
            data = self._line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It has ended, or has closed its end: nothing more comes.
            asyncio.get_running_loop().remove_reader(self._line)
        for record in self._lines.feed(data):
            self._on_record(record)


OnRecord = Callable[[Record], None]


def _open_log(path: Path, *, is_new: bool) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_new and path.exists():
            path.replace(path.with_suffix(".previous.log"))
        return path.open("wb" if is_new else "ab")
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
