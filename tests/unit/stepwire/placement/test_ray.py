"""The workers of a rank, one after the other, each in an incarnation of its own. A fake stands for the actor."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError  # noqa: E402

from stepwire.placement import ray as module  # noqa: E402
from stepwire.placement.group import PlacedActor, PlacedGroup  # noqa: E402
from stepwire.placement.place import Place  # noqa: E402
from stepwire.placement.rank_actor import Launch  # noqa: E402
from stepwire.placement.ray import RayLauncher  # noqa: E402
from stepwire.supervisor.child import ChildSpec  # noqa: E402


class Call:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        return asyncio.ensure_future(self._method(*arguments))


class Actor:
    """An actor that Ray starts again when it is killed, after one call that finds it away."""

    def __init__(self) -> None:
        self.incarnation, self.launches, self.sent = 1, [], []
        self.host, self.is_away, self.is_dead = "10.0.0.1", False, False
        self.ends: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.place, self.start = Call(self._place), Call(self._start)
        self.wait, self.send = Call(self._wait), Call(self._send)

    def kill(self) -> None:
        self.incarnation += 1
        self.is_away = True

    async def _place(self, port: int) -> tuple[str, str, str, int]:
        if self.is_dead:
            raise ActorDiedError()
        if self.is_away:
            self.is_away = False
            raise ActorUnavailableError("it is started again", b"\0" * 16)
        return str(self.incarnation), "node", self.host, port

    async def _start(self, launch: Launch) -> int:
        self.launches.append(launch)
        return 100 * self.incarnation

    async def _wait(self) -> tuple[int, str]:
        status, text = await self.ends.get()
        if not text:
            raise ActorUnavailableError("the node is gone", b"\0" * 16)
        return status, text

    async def _send(self, number: int) -> None:
        self.sent.append(number)


def spec_at(place: Place) -> ChildSpec:
    return ChildSpec("worker 1", ("python", "-m", "worker", f"--host={place.host}"), {}, address=place.address)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    actor = Actor()
    monkeypatch.setattr(ray, "kill", lambda killed, no_restart: killed.kill())
    return actor


@pytest.fixture
def launcher(actor: Actor) -> RayLauncher:
    return launcher_of(actor, PlacedGroup("group"))


def launcher_of(actor: Actor, group: PlacedGroup) -> RayLauncher:
    return RayLauncher(PlacedActor(actor, group, "1", Place("10.0.0.1", 7, "node")), spec_at, {"STEPWIRE_PORT"})


async def test_the_first_worker_is_started_as_it_was_placed(actor: Actor, launcher: RayLauncher) -> None:
    process = await launcher.start(spec_at(Place("10.0.0.1", 7)), is_first=True)
    (launch,) = actor.launches
    assert launch.arguments == ("-m", "worker", "--host=10.0.0.1")
    assert (launch.is_first, launch.unset, actor.incarnation) == (True, ("STEPWIRE_PORT",), 1)
    assert (process.process_id, process.status) == (100, None)
    process.send(signal.SIGTERM)
    actor.ends.put_nowait((0, "worker 1 exited with status 0"))
    assert await process.wait() == 0
    assert (actor.sent, process.was_told, process.status) == ([15], True, 0)
    assert process.describe_end() == "worker 1 exited with status 0 (on 10.0.0.1)"


async def test_the_next_worker_is_in_the_next_incarnation_wherever_that_is(actor: Actor, launcher: RayLauncher) -> None:
    spec = spec_at(Place("10.0.0.1", 7))
    await launcher.start(spec, is_first=True)
    actor.host = "10.0.0.2"
    process = await launcher.start(spec, is_first=False)
    assert (process.process_id, process.spec.address) == (200, "10.0.0.2:7")
    assert actor.launches[-1].arguments[-1] == "--host=10.0.0.2"
    assert not actor.launches[-1].is_first


async def test_an_actor_that_ended_by_itself_is_not_ended_once_more(actor: Actor, launcher: RayLauncher) -> None:
    process = await launcher.start(spec_at(Place("10.0.0.1", 7)), is_first=True)
    actor.kill()
    actor.ends.put_nowait((0, ""))
    assert await process.wait() == -9
    assert "worker 1 was lost with its Ray actor: " in process.describe_end()
    await launcher.start(process.spec, is_first=False)
    assert actor.incarnation == 2


async def test_one_that_is_given_up_goes_with_its_actor(actor: Actor, launcher: RayLauncher) -> None:
    process = await launcher.start(spec_at(Place("10.0.0.1", 7)), is_first=True)
    process.give_up()
    actor.ends.put_nowait((0, ""))
    assert await process.wait() == -9
    assert process.describe_end() == "worker 1 did not answer and was killed (on 10.0.0.1)"
    assert actor.incarnation == 2


async def test_a_place_that_does_not_come_is_waited_for_until_nobody_wants_it(
    actor: Actor, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "kill", lambda killed, no_restart: None)
    waiting = asyncio.create_task(launcher.start(spec_at(Place("10.0.0.1", 7)), is_first=False))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    launcher.settle()
    with pytest.raises(OSError, match="not wanted any more"):
        await asyncio.wait_for(waiting, 5)


async def test_an_actor_that_is_gone_for_good_is_an_error(actor: Actor, launcher: RayLauncher) -> None:
    actor.is_dead = True
    with pytest.raises(OSError, match=r"Ray cannot start a worker's actor .* install the same stepwire\[ray\]"):
        await launcher.start(spec_at(Place("10.0.0.1", 7)), is_first=False)


async def test_a_worker_that_is_known_by_another_address_listens_at_its_own(
    actor: Actor, launcher: RayLauncher
) -> None:
    process = await launcher.start(spec_at(Place("10.0.0.7", 1)), is_first=True)
    assert actor.launches[0].arguments[-1] == "--host=10.0.0.1"
    assert process.spec.address == "10.0.0.1:7"


async def test_giving_back_ends_the_actor_and_with_the_last_one_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(ray, "kill", lambda killed, no_restart: ended.append((killed, no_restart)))
    monkeypatch.setattr("stepwire.placement.group.remove_placement_group", ended.append)
    group, actors = PlacedGroup("group"), [Actor(), Actor()]
    group.actors += actors
    first, second = (launcher_of(actor, group) for actor in actors)
    await first.give_back()
    assert ended == [(actors[0], True)]
    await second.give_back()
    assert ended[1:] == [(actors[1], True), "group"]


async def test_giving_back_to_a_head_that_hangs_or_is_gone_is_an_error_in_time(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GIVE_BACK_TIMEOUT_S", 0.05)
    group, go_on = PlacedGroup("group"), threading.Event()
    group.actors.append(actor)
    monkeypatch.setattr(ray, "kill", lambda killed, no_restart: go_on.wait())
    monkeypatch.setattr("stepwire.placement.group.remove_placement_group", lambda group: None)
    with pytest.raises(OSError, match=r"did not take it back within 0\.05 s"):
        await launcher_of(actor, group).give_back()
    go_on.set()

    def fail(killed: object, no_restart: object) -> None:
        raise RayError("no head")

    monkeypatch.setattr(ray, "kill", fail)
    with pytest.raises(OSError, match="no head"):
        await launcher_of(actor, group).give_back()
