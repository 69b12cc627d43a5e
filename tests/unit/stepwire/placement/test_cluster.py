"""What is held of a Ray cluster, and how it is given back. A fake stands for the cluster."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")

from ray.exceptions import ActorDiedError, GetTimeoutError

from stepwire.placement import cluster as module
from stepwire.placement import group as group_module
from stepwire.placement.cluster import Cluster, _check_reachable, joined
from stepwire.placement.group import RayWish
from stepwire.placement.head import Head
from stepwire.placement.place import Place, PlacementError

ONE = RayWish(1, 1, {"CPU": 2}, timeout_s=0.0)


class FakeRay:
    """A cluster with room for so many groups."""

    def __init__(self) -> None:
        self.room = 1
        self.groups: list[FakeGroup] = []
        self.killed: list[object] = []
        self.answers: threading.Event = threading.Event()
        self.answers.set()
        self.failure: Exception | None = None
        self.changed = threading.Event()

    @property
    def held(self) -> "list[FakeGroup]":
        return [group for group in self.groups if not group.is_removed]

    def placement_group(self, bundles: Sequence[Any], strategy: str) -> "FakeGroup":
        self.answers.wait()
        self.groups.append(FakeGroup(self, bundles, strategy))
        return self.groups[-1]

    def remove_placement_group(self, group: "FakeGroup") -> None:
        group.is_removed = True
        self.changed.set()

    def kill(self, actor: object, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)

    def wait(self, answers: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        if isinstance(self.failure, GetTimeoutError):
            return [], answers
        return answers, []

    def get(self, answers: list[Any], timeout: float) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        return answers

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, "memory": 5.0}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}, {"Alive": True}]


class FakeGroup:
    def __init__(self, ray: FakeRay, bundles: Sequence[Any], strategy: str) -> None:
        self._ray = ray
        self.bundles, self.strategy, self.is_removed = bundles, strategy, False

    def wait(self, timeout_s: int) -> bool:
        self._ray.changed.set()
        return self._ray.held.index(self) < self._ray.room


class FakeActor:
    def __init__(self, wish: RayWish, group: FakeGroup, index: int) -> None:
        self.index = index
        self.place = self

    def remote(self, port: int) -> tuple[str, str, str, int]:
        return "first", "node", "10.0.0.1", 7 + self.index


class Rig:
    """A cluster that was joined."""

    def __init__(self, ray: FakeRay) -> None:
        self.ray = ray
        self.cluster = Cluster("PACK")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    fake = FakeRay()
    for name in ("kill", "wait", "get", "available_resources", "nodes"):
        monkeypatch.setattr(module.ray, name, getattr(fake, name))
    monkeypatch.setattr(module, "placement_group", fake.placement_group)
    monkeypatch.setattr(group_module, "remove_placement_group", fake.remove_placement_group)
    monkeypatch.setattr(group_module, "_actor", FakeActor)
    monkeypatch.setattr(module, "_head", lambda: Head("10.0.0.9", 6379, 60.0, lambda: None))
    return Rig(fake)


async def until(condition: Callable[[], bool]) -> None:
    """A thread tells of nothing."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_actor_a_rank_in_one_group_a_replica(rig: Rig) -> None:
    rig.ray.room = 2
    placed = await rig.cluster.place(RayWish(2, 2, {"CPU": 1, "GPU": 1}, timeout_s=5.0))
    assert [each.place for each in placed] == [Place("10.0.0.1", 7 + i, "node") for i in (0, 1, 0, 1)]
    assert [(group.bundles, group.strategy) for group in rig.ray.groups] == [([{"CPU": 1, "GPU": 1}] * 2, "PACK")] * 2
    assert len({each.group for each in placed}) == 2
    await rig.cluster.take_back(placed)
    assert (rig.ray.held, len(rig.ray.killed)) == ([], 4)


async def test_no_room_is_told_with_what_is_wanted_and_free_and_nothing_stays_held(rig: Rig) -> None:
    first = await rig.cluster.place(ONE)
    with pytest.raises(PlacementError) as refused:
        await rig.cluster.place(ONE)
    for part in (
        "no room for 1 workers with {'CPU': 2} each, placed by PACK",
        "free on 2 nodes together: {'CPU': 1.0}",
    ):
        assert part in str(refused.value)
    assert "unload a model" in str(refused.value)
    assert [group for group in rig.ray.groups if not group.is_removed] == [first[0].group.group]
    await rig.cluster.take_back(first)
    with pytest.raises(PlacementError) as refused:
        rig.cluster.place_all([RayWish(2, 1, {"CPU": 2}, timeout_s=0.0)])
    assert "2 groups of 1 workers" in str(refused.value)
    assert "unload" not in str(refused.value), "there is none"
    assert rig.ray.held == []


@pytest.mark.parametrize(
    ("failure", "text"),
    [(ActorDiedError(), "install the same stepwire"), (GetTimeoutError(), "did not start an actor for each worker")],
)
async def test_actors_that_do_not_start_hold_nothing(rig: Rig, failure: Exception, text: str) -> None:
    rig.ray.failure = failure
    with pytest.raises(PlacementError, match=text):
        await rig.cluster.place(ONE)
    assert (rig.ray.held, len(rig.ray.killed)) == ([], 1)


async def test_whoever_waits_for_room_no_more_holds_nothing(rig: Rig) -> None:
    rig.ray.room = 0
    waiting = asyncio.create_task(rig.cluster.place(RayWish(1, 1, {"CPU": 1}, timeout_s=600.0)))
    await until(rig.ray.changed.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: rig.ray.held == [])


async def test_a_head_that_hangs_is_an_error_in_time_and_what_it_places_late_is_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OVER_S", 0.05)
    rig.ray.answers.clear()
    with pytest.raises(PlacementError, match=r"the head of the Ray cluster at 10\.0\.0\.9:6379 does not answer"):
        await rig.cluster.place(ONE)
    rig.ray.answers.set()
    await until(lambda: len(rig.ray.groups) == 1 and rig.ray.held == [])


async def test_a_head_that_is_known_not_to_answer_is_not_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    wish = RayWish(1, 1, {"CPU": 1}, timeout_s=600.0)
    rig.ray.answers.clear()
    waiting = asyncio.create_task(rig.cluster.place(wish))
    await asyncio.sleep(0.05)
    rig.cluster.head._trouble = "the head does not answer (it hangs)"
    with pytest.raises(PlacementError, match=r"the head does not answer \(it hangs\): no worker can be placed"):
        await asyncio.wait_for(waiting, 20)
    rig.ray.answers.set()
    await until(lambda: len(rig.ray.groups) == 1 and rig.ray.held == [])
    with pytest.raises(PlacementError, match="no worker can be placed"):
        await rig.cluster.place(wish)
    assert len(rig.ray.groups) == 1, "it was asked all the same"


async def test_the_end_gives_all_back(rig: Rig) -> None:
    await rig.cluster.place(ONE)
    rig.cluster.give_back()
    rig.cluster.give_back()
    assert (rig.ray.held, len(rig.ray.killed)) == ([], 1)


@pytest.mark.parametrize("trouble", ["", "the head does not answer (it hangs)"])
async def test_leaving_says_goodbye_to_a_head_that_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Ray itself waits for the answer without limit, and crashes at the end of the process if it may not."""
    done: list[str] = []
    monkeypatch.setattr(module, "_connect", done.append)
    monkeypatch.setattr(module.ray, "shutdown", lambda: done.append("shutdown"))
    with joined("auto", "PACK", evicts=False) as cluster:
        await cluster.place(ONE)
        cluster.head._trouble = trouble
    assert cluster.is_left == (not trouble)
    assert (done, len(rig.ray.held)) == ((["auto"], 1) if trouble else (["auto", "shutdown"], 0))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999"])
def test_a_head_that_does_not_answer_is_named_with_a_remedy(address: str) -> None:
    with pytest.raises(PlacementError, match=f"no Ray cluster answers at {address} .*--ray-address"):
        _check_reachable(address)


def test_what_this_process_logs_has_no_field_of_rays() -> None:
    given = "name", logging.INFO, "file", 1, "message", (), None
    assert vars(logging.getLogger().makeRecord(*given)).keys() == vars(logging.LogRecord(*given)).keys()
