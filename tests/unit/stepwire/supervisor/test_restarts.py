"""The supervisor once all is ready: who ends is replaced, and it says so. Small scripts stand for the services."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stepwire.supervisor import keeper
from stepwire.supervisor.child import Child, ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.supervisor import Supervisor

ADDRESS = "127.0.0.1:7"

# Writes a line of its process id when it begins; one that stands by does so when it may go. Then obeys a file.
SCRIPT = """
    import json, os, pathlib, signal, sys, time
    from stepwire.supervisor.parent import end_with_supervisor, is_standby
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    line = end_with_supervisor()
    def note(what):
        with (folder / name).open("a") as file: file.write(f"{what} {os.getpid()}\\n")
    line.listen(lambda record: note(json.dumps(record)))
    if is_standby():
        note("stands-by")
        line.wait_for_go()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    note("began")
    while not (folder / f"{name}.exit").exists():
        ask = folder / f"{name}.ask"
        if ask.exists():
            line.say(json.loads(ask.read_text()))
            ask.unlink()
        time.sleep(0.005)
    os._exit(int((folder / f"{name}.exit").read_text()))
"""


class Elsewhere:
    """A launcher that starts each worker at another address, as long as `has_room`."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_given_back = 0
        self.has_room = True
        self.takes_back = True
        self._settled = asyncio.Event()

    async def start(self, spec: ChildSpec, *, is_first: bool) -> Child:
        if not self.has_room:
            await self._settled.wait()
            raise OSError(0, "no room")
        self.num_started += 1
        return await Child.start(replace(spec, address=f"127.0.0.1:{self.num_started}"), is_first=is_first)

    def settle(self) -> None:
        self._settled.set()

    async def give_back(self) -> None:
        if not self.takes_back:
            raise OSError(0, "nobody answers")
        self.num_given_back += 1


class Stack:
    """A supervisor over scripts; `lines` is what it reports."""

    def __init__(
        self, folder: Path, *, has_standby: bool = False, is_seen: bool = True, launcher: Elsewhere | None = None
    ) -> None:
        """Unless `is_seen`, nobody sees it get ready."""
        self.folder = folder
        self._is_seen = is_seen
        self.lines: list[str] = []
        self._is_ready = asyncio.Event()
        specs = [self.spec(name, has_standby=has_standby and name == "worker") for name in ("scheduler", "worker")]
        specs[1] = replace(specs[1], launcher=launcher)
        self.records: list[Record | None] = []
        self.supervisor = Supervisor(
            specs[0], specs[1:], drain_s=20, report=self.lines.append, on_record=self.records.append
        )
        self.run = asyncio.create_task(self.supervisor.run(self._ready))

    def spec(self, name: str, *, has_standby: bool) -> ChildSpec:
        command = (sys.executable, "-c", textwrap.dedent(SCRIPT), name, str(self.folder))
        address = ADDRESS if name == "worker" else ""
        return ChildSpec(name, command, dict(os.environ), None, address, has_standby, group=name)

    def other(self, name: str = "other") -> ChildSpec:
        """A worker that is there for something else."""
        return replace(self.spec(name, has_standby=False), address="127.0.0.1:9", group="other")

    async def say(self, record: str) -> None:
        """Has the scheduler say something."""
        ask = self.folder / "scheduler.new"
        ask.write_text(record)
        ask.rename(self.folder / "scheduler.ask")
        await until(lambda: not (self.folder / "scheduler.ask").exists())

    async def _ready(self) -> None:
        await self.begun()
        if self._is_seen:
            self._is_ready.set()
        else:
            await asyncio.Event().wait()

    async def begun(self) -> None:
        await until(lambda: bool(self.pids("scheduler") and self.pids("worker")))

    async def ready(self) -> None:
        await self._is_ready.wait()
        await asyncio.sleep(0)

    def notes(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, name: str, what: str = "began") -> list[int]:
        """Of the processes that noted `what`, in their order."""
        return [int(note.rpartition(" ")[2]) for note in self.notes(name) if note.startswith(what)]

    async def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await self.run


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], bool]) -> None:
    """Other processes tell this one by files, which have no events."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_worker_that_is_killed_is_replaced_and_the_scheduler_is_told(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    (first,) = stack.pids("worker")
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(stack.pids("worker")) == 2 and any("ended" in note for note in stack.notes("scheduler")))
    (told,) = [note for note in stack.notes("scheduler") if "ended" in note]
    for part in (f'"ended": "{ADDRESS}"', f'"process_id": {first}', '"status": -9', "killed by SIGKILL"):
        assert part in told
    assert len(stack.pids("scheduler")) == 1
    assert "worker was killed by SIGKILL" in stack.lines[0]
    assert "started again" in stack.lines[0]
    assert await stack.stop() == 0


async def test_a_scheduler_that_is_killed_is_replaced_and_the_worker_stays(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    os.kill(stack.pids("scheduler")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("scheduler")) == 2)
    assert len(stack.pids("worker")) == 1
    assert await stack.stop() == 0


async def test_a_worker_that_comes_back_elsewhere_is_told_to_its_scheduler_and_to_the_next(tmp_path: Path) -> None:
    def num_told() -> int:
        return stack.notes("scheduler").count(f'{{"worker": "{ADDRESS}", "is_at": "127.0.0.1:2"}} {scheduler_pid()}')

    def scheduler_pid() -> int:
        return stack.pids("scheduler")[-1]

    stack = Stack(tmp_path, launcher=Elsewhere())
    await stack.ready()
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    await until(lambda: num_told() == 1)
    ended = next(note for note in stack.notes("scheduler") if "ended" in note)
    assert '"ended": "127.0.0.1:1"' in ended, "named by an address at which it never was"
    os.kill(scheduler_pid(), signal.SIGKILL)
    await until(lambda: len(stack.pids("scheduler")) == 2 and num_told() == 1)
    assert await stack.stop() == 0


async def test_a_place_is_given_back_with_the_worker_for_which_it_was(tmp_path: Path) -> None:
    launcher = Elsewhere()
    stack = Stack(tmp_path, launcher=launcher)
    await stack.ready()
    await stack.supervisor.end_workers([ADDRESS])
    assert launcher.num_given_back == 1
    assert await stack.stop() == 0


async def test_a_place_that_nobody_takes_back_is_told_and_held_no_more(tmp_path: Path) -> None:
    launcher = Elsewhere()
    stack = Stack(tmp_path, launcher=launcher)
    await stack.ready()
    launcher.takes_back = False
    await stack.supervisor.end_workers([ADDRESS])
    assert stack.lines[-1] == "the place of worker cannot be given back: nobody answers"
    assert await stack.stop() == 0
    assert not any("did not end" in line for line in stack.lines)


async def test_the_scheduler_is_told_where_a_worker_is_that_it_knows_by_another_address(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    await stack.supervisor.add_workers([replace(stack.other(), launcher=Elsewhere())])
    told = '{"worker": "127.0.0.1:9", "is_at": "127.0.0.1:1"}'
    await until(lambda: any(note.startswith(told) for note in stack.notes("scheduler")))
    assert await stack.stop() == 0


async def test_a_worker_that_waits_for_a_place_holds_up_no_end(tmp_path: Path) -> None:
    launcher = Elsewhere()
    stack = Stack(tmp_path, launcher=launcher)
    await stack.ready()
    launcher.has_room = False
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    await until(lambda: len(stack.lines) == 1)
    assert await asyncio.wait_for(stack.stop(), 20) == 1
    assert launcher.num_started == 1


async def test_one_that_stands_by_takes_the_place_and_another_stands_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STANDBY_AFTER_S", 0.05)
    stack = Stack(tmp_path, has_standby=True)
    await stack.ready()
    for _ in range(2):
        num = len(stack.pids("worker"))
        await until(lambda num=num: len(stack.pids("worker", "stands-by")) == num)
        waiting, now = stack.pids("worker", "stands-by")[-1], stack.pids("worker")[-1]
        assert waiting not in stack.pids("worker")
        os.kill(now, signal.SIGKILL)
        await until(lambda num=num: len(stack.pids("worker")) == num + 1)
        assert stack.pids("worker")[-1] == waiting
    assert await stack.stop() == 0
    assert len(stack.lines) == 3


async def test_one_that_stood_by_and_died_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "STANDBY_AFTER_S", 0.05)
    stack = Stack(tmp_path, has_standby=True)
    await stack.ready()
    await until(lambda: bool(stack.pids("worker", "stands-by")))
    waiting = stack.pids("worker", "stands-by")[0]
    os.kill(waiting, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{waiting}").exists())
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("worker")) == 2)
    assert await stack.stop() == 0


async def test_a_worker_that_the_scheduler_gives_up_is_killed_and_replaced(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    (first,) = stack.pids("worker")
    os.kill(first, signal.SIGSTOP)
    for process_id, address in ((first + 1, ADDRESS), (first, "127.0.0.1:8"), (first, ADDRESS)):
        await stack.say(f'{{"replace": "{address}", "process_id": {process_id}}}')
    await until(lambda: len(stack.pids("worker")) == 2)
    assert stack.lines[0].startswith("worker did not answer and was killed")
    assert await stack.stop() == 0


async def test_a_worker_that_ends_by_itself_again_and_again_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_MOST_QUICK_ENDS", 2)
    stack = Stack(tmp_path)
    await stack.ready()
    (tmp_path / "worker.exit").write_text("9")
    assert await asyncio.wait_for(stack.run, 20) == 1
    assert len(stack.pids("worker")) == 3
    assert stack.lines[-1].startswith("worker exited with status 9")


@pytest.mark.parametrize("status", [3, 4])
async def test_a_scheduler_that_gave_up_ends_all_with_its_status(tmp_path: Path, status: int) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    (tmp_path / "scheduler.exit").write_text(str(status))
    assert await asyncio.wait_for(stack.run, 20) == status
    assert len(stack.pids("scheduler")) == 1


async def test_a_worker_is_replaced_once_the_scheduler_says_that_it_serves(tmp_path: Path) -> None:
    """Clients may be served before anybody else sees it."""
    stack = Stack(tmp_path, is_seen=False)
    await stack.begun()
    await stack.say('{"serving": true}')
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("worker")) == 2)
    assert await stack.stop() == 0


async def test_a_worker_is_not_replaced_before(tmp_path: Path) -> None:
    stack = Stack(tmp_path, is_seen=False)
    await stack.begun()
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    assert await asyncio.wait_for(stack.run, 20) == 1
    assert len(stack.pids("worker")) == 1


async def test_a_worker_is_replaced_also_while_the_scheduler_drains(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    os.kill(stack.pids("scheduler")[0], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: any("SIGTERM" in line for line in stack.lines))
    os.kill(stack.pids("worker")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("worker")) == 2)
    os.kill(stack.pids("scheduler")[0], signal.SIGCONT)
    assert await asyncio.wait_for(stack.run, 20) == 0


async def test_workers_come_and_go_while_the_others_run(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    await stack.supervisor.add_workers([stack.other()])
    await until(lambda: bool(stack.pids("other")))
    os.kill(stack.pids("other")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("other")) == 2)
    pid = stack.pids("other")[1]
    await stack.supervisor.end_workers(["127.0.0.1:9", "127.0.0.1:10"])
    assert not is_running(pid)
    assert len(stack.pids("other")) == 2
    assert len(stack.pids("worker")) == 1
    await stack.say('{"something": "else"}')
    await until(lambda: {"something": "else"} in stack.records)
    assert await stack.stop() == 0


async def test_a_worker_that_cannot_be_started_leaves_none_of_its_group(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    missing = replace(stack.other("missing"), command=("/nonexistent",))
    with pytest.raises(OSError, match="nonexistent"):
        await stack.supervisor.add_workers([stack.other(), missing])
    assert not any(map(is_running, stack.pids("other")))
    assert await stack.stop() == 0


async def test_a_worker_that_ends_again_and_again_is_the_end_of_its_own_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_MOST_QUICK_ENDS", 1)
    stack = Stack(tmp_path)
    await stack.ready()
    (tmp_path / "other.exit").write_text("9")
    await stack.supervisor.add_workers([stack.other()])
    await until(lambda: any('"gone": "127.0.0.1:9"' in note for note in stack.notes("scheduler")))
    assert any('"text": "it ends again and again"' in note for note in stack.notes("scheduler"))
    assert "it is not started again" in stack.lines[-1]
    assert len(stack.pids("other")) == 2
    assert not stack.run.done()
    num_lines = len(stack.lines)
    await stack.supervisor.end_workers(["127.0.0.1:9"])
    assert len(stack.lines) == num_lines
    assert await stack.stop() == 0


async def test_another_scheduler_takes_the_place_of_one_that_ends_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STANDBY_AFTER_S", 0.05)
    stack = Stack(tmp_path, has_standby=True)
    await stack.ready()
    changed = replace(stack.spec("scheduler", has_standby=True), command=stack.other("changed").command)
    stack.supervisor.change_scheduler(changed)
    os.kill(stack.pids("scheduler")[0], signal.SIGKILL)
    await until(lambda: bool(stack.pids("changed")))
    assert stack.records == [None]
    await until(lambda: bool(stack.pids("changed", "stands-by")))
    standby = stack.pids("changed", "stands-by")[0]
    stack.supervisor.change_scheduler(stack.spec("scheduler", has_standby=True))
    await until(lambda: not is_running(standby))
    os.kill(stack.pids("changed")[0], signal.SIGKILL)
    await until(lambda: len(stack.pids("scheduler")) == 2)
    assert await stack.stop() == 0


async def test_workers_that_are_ended_while_they_start_do_not_come_back(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    starting = asyncio.create_task(stack.supervisor.add_workers([stack.other()]))
    await asyncio.sleep(0)
    await stack.supervisor.end_workers(["127.0.0.1:9"])
    await starting
    num = len(stack.pids("other"))
    await asyncio.sleep(0.3)
    assert (len(stack.pids("other")), stack.lines) == (num, [])
    assert not any(map(is_running, stack.pids("other")))
    assert await stack.stop() == 0


async def test_a_scheduler_that_cannot_be_started_again_is_the_end_whatever_the_cause(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    await stack.ready()
    stack.supervisor.change_scheduler(replace(stack.spec("scheduler", has_standby=False), command=("a\0b",)))
    os.kill(stack.pids("scheduler")[0], signal.SIGKILL)
    assert await asyncio.wait_for(stack.run, 20) == 1
    assert any("cannot be started again: embedded null byte" in line for line in stack.lines)
