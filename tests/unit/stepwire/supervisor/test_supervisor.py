"""The supervisor with small scripts in place of scheduler and worker."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stepwire.supervisor.child import ChildSpec, LogError
from stepwire.supervisor.supervisor import Supervisor

# Says "up" in a file when its signal handlers are set.
_OBEDIENT = """
    import os, pathlib, signal, sys
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    def end(*_):
        with (folder / "ends").open("a") as file: file.write(name + "\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    (folder / name).write_text(str(os.getpid()))
    while True: signal.pause()
"""
_STUBBORN = _OBEDIENT.replace("os._exit(0)", "return")


class Stack:
    """A supervisor over scripts, and what it reported."""

    def __init__(self, folder: Path, scheduler: str = _OBEDIENT, worker: str = _OBEDIENT, drain_s: float = 20) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.supervisor = Supervisor(
            self._spec("scheduler", scheduler),
            [self._spec("worker", worker, folder / "worker.log")],
            drain_s=drain_s,
            report=self.lines.append,
        )

    def _spec(self, name: str, script: str, log_path: Path | None = None) -> ChildSpec:
        command = (sys.executable, "-c", textwrap.dedent(script), name, str(self.folder))
        return ChildSpec(name, command, dict(os.environ), log_path)

    def pid(self, name: str) -> int:
        return int((self.folder / name).read_text())

    async def until_up(self, names: Sequence[str] = ("scheduler", "worker")) -> None:
        paths = [self.folder / name for name in names]
        await until(lambda: all(path.exists() and path.read_text() for path in paths))

    async def send_then_wait(self, *numbers: signal.Signals, after: Sequence[str] = ()) -> int:
        """Runs; once up sends the signals to this process, the later ones when `after` are lines of `ends`."""

        async def drive() -> None:
            await self.until_up()
            os.kill(os.getpid(), numbers[0])
            for number in numbers[1:]:
                await until(lambda: set(after) <= set(self.ends()))
                os.kill(os.getpid(), number)

        task = asyncio.create_task(drive())
        status = await self.supervisor.run(forever)
        await task
        return status

    def ends(self) -> list[str]:
        path = self.folder / "ends"
        return path.read_text().splitlines() if path.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    """Other processes tell this one by files, which have no events."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def forever() -> None:
    await asyncio.Event().wait()


def command_lines() -> bytes:
    """Those of all other processes."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += b"" if path.parent.name == str(os.getpid()) else path.read_bytes()
    return found


def assert_gone(*pids: int) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_scheduler_first_then_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    stack = Stack(tmp_path)
    assert await stack.send_then_wait(number) == 0
    assert stack.ends() == ["scheduler", "worker"]
    assert_gone(stack.pid("scheduler"), stack.pid("worker"))


async def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    stack = Stack(tmp_path, scheduler=_STUBBORN, worker=_STUBBORN)
    status = await stack.send_then_wait(signal.SIGTERM, signal.SIGINT, after=["scheduler"])
    assert status == 128 + signal.SIGINT
    gc.collect()
    assert not complaints
    assert_gone(stack.pid("scheduler"), stack.pid("worker"))


@pytest.mark.parametrize(("scheduler", "within_s"), [(_OBEDIENT, 60.0), (_STUBBORN, 0.1)])
async def test_what_cannot_go_on_is_ended_in_order_and_at_once_after_its_time(
    tmp_path: Path, scheduler: str, within_s: float
) -> None:
    stack = Stack(tmp_path, scheduler)
    running = asyncio.create_task(stack.supervisor.run(forever))
    await stack.until_up()
    stack.supervisor.stop("the head is lost", within_s)
    assert await running == 1
    assert stack.lines[0].startswith("the head is lost: ending after the requests that run")
    assert stack.ends()[0] == "scheduler"
    assert_gone(stack.pid("scheduler"), stack.pid("worker"))


async def test_a_scheduler_that_does_not_end_is_killed_after_its_time(tmp_path: Path) -> None:
    stack = Stack(tmp_path, scheduler=_STUBBORN, drain_s=0.2)
    assert await stack.send_then_wait(signal.SIGTERM) == 1
    assert "scheduler did not end within 0.2 s and is killed" in stack.lines
    assert stack.ends() == ["scheduler", "worker"]
    assert_gone(stack.pid("scheduler"), stack.pid("worker"))


async def test_a_worker_that_dies_is_named_with_its_last_words_and_its_log(tmp_path: Path) -> None:
    stack = Stack(tmp_path, worker="import sys; sys.stderr.write('fine\\nError: no such device\\n\\n'); sys.exit(3)")
    assert await stack.supervisor.run(forever) == 1
    assert stack.lines == [f"worker exited with status 3: Error: no such device; log: {tmp_path / 'worker.log'}"]


FAILED = '{"message": "device_failed", "level": "critical", "exception": "Traceback:\\n  x\\nRuntimeError: lost"}'
REFUSED = '{"message": "cannot_load", "error": "file is truncated", "level": "error"}'
STOPPED = '{"message": "stopped", "level": "info"}'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([FAILED, STOPPED], "device_failed: RuntimeError: lost"),
        ([STOPPED, REFUSED], "cannot_load: file is truncated"),
        ([REFUSED, "Segmentation fault"], "Segmentation fault"),
        ([STOPPED], "stopped"),
        (["[1, 2]"], "[1, 2]"),
    ],
)
async def test_the_last_words_are_a_crash_or_the_last_error(tmp_path: Path, lines: list[str], words: str) -> None:
    stack = Stack(tmp_path, worker=f"print({chr(10).join(lines)!r}); raise SystemExit(1)")
    assert await stack.supervisor.run(forever) == 1
    assert stack.lines[0].startswith(f"worker exited with status 1: {words};")


async def test_what_is_no_error_explains_no_kill(tmp_path: Path) -> None:
    stack = Stack(tmp_path, worker=f"import os; print({STOPPED!r}, flush=True); os.kill(os.getpid(), 9)")
    assert await stack.supervisor.run(forever) == 1
    assert stack.lines[0] == (
        f"worker was killed by SIGKILL (the kernel does this when memory runs out); log: {tmp_path / 'worker.log'}"
    )


async def test_a_worker_killed_before_all_is_ready_is_reported_and_the_scheduler_ended(tmp_path: Path) -> None:
    stack = Stack(tmp_path)

    async def kill_the_worker() -> None:
        await stack.until_up()
        os.kill(stack.pid("worker"), signal.SIGKILL)
        await forever()

    assert await stack.supervisor.run(kill_the_worker) == 1
    assert "worker was killed by SIGKILL (the kernel does this when memory runs out)" in stack.lines[0]
    assert_gone(stack.pid("scheduler"))


async def test_the_cause_comes_before_the_consequence(tmp_path: Path) -> None:
    watch = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[2]) / 'dead').exists(): time.sleep(0.005)\n"
    scheduler = watch + "sys.exit(1)"
    worker = "import pathlib, sys; (pathlib.Path(sys.argv[2]) / 'dead').touch(); sys.exit(7)"
    stack = Stack(tmp_path, scheduler=scheduler, worker=worker)
    assert await stack.supervisor.run(forever) == 1
    assert [line.split(" exited")[0] for line in stack.lines] == ["worker", "scheduler"]


async def test_a_child_that_cannot_be_started_leaves_none_behind(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    missing = ChildSpec("worker", ("/nowhere/python",), {})
    supervisor = Supervisor(stack.supervisor._scheduler.spec, [missing], drain_s=1, report=stack.lines.append)
    with pytest.raises(FileNotFoundError):
        await supervisor.run(stack.until_up)
    assert str(tmp_path).encode() not in command_lines()


async def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    for word in ("first", "second"):
        stack = Stack(tmp_path, worker=f"print('{word}'); raise SystemExit(1)")
        await stack.supervisor.run(forever)
    assert (tmp_path / "worker.log").read_text() == "second\n"
    assert (tmp_path / "worker.previous.log").read_text() == "first\n"


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    child = """
        import pathlib, signal, sys
        from stepwire.supervisor.parent import end_with_supervisor
        end_with_supervisor()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import os
        (pathlib.Path(sys.argv[2]) / sys.argv[1]).write_text(str(os.getpid()))
        while True: signal.pause()
    """
    parent = f"""
        import asyncio, os, sys
        from stepwire.supervisor.child import ChildSpec, LogError
        from stepwire.supervisor.supervisor import Supervisor
        def spec(name):
            script, folder = {textwrap.dedent(child)!r}, {str(tmp_path)!r}
            return ChildSpec(name, (sys.executable, "-c", script, name, folder), dict(os.environ))
        specs = [spec("scheduler"), spec("worker")]
        asyncio.run(Supervisor(specs[0], specs[1:], drain_s=1, report=print).run(asyncio.Event().wait))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)])
    stack = Stack(tmp_path)
    asyncio.run(stack.until_up())
    process.kill()
    process.wait()
    for name in ("scheduler", "worker"):
        _wait_gone(stack.pid(name))


def _wait_gone(pid: int) -> None:
    """Returns when the process has ended; the test's own timeout bounds it. Init reaps it in its own time."""
    stat = Path(f"/proc/{pid}/stat")
    while True:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return


async def test_a_signal_before_a_child_has_its_handlers_is_a_clean_end(tmp_path: Path) -> None:
    starting = """
        import pathlib, signal, sys
        (pathlib.Path(sys.argv[2]) / sys.argv[1]).write_text("starting")
        while True: signal.pause()
    """
    stack = Stack(tmp_path, scheduler=starting, worker=starting)
    assert await stack.send_then_wait(signal.SIGTERM) == 0
    assert len(stack.lines) == 1


async def test_a_log_that_cannot_be_written_is_one_error_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("of the run before")
    (tmp_path / "worker.previous.log").mkdir()
    stack = Stack(tmp_path)
    with pytest.raises(LogError, match=r"cannot be written to .*worker\.log .*--log-dir"):
        await stack.supervisor.run(forever)
    assert str(tmp_path).encode() not in command_lines()
