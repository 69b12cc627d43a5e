"""A placement group and its actors: what is given back when. A fake stands for Ray."""

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")

from ray.exceptions import GetTimeoutError, RayError  # noqa: E402

from stepwire.placement import group as module  # noqa: E402
from stepwire.placement.group import PlacedGroup, RayWish, no_actor  # noqa: E402


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What Ray was told, in its order."""
    done: list[object] = []
    monkeypatch.setattr(ray, "kill", lambda killed, no_restart: done.append((killed, no_restart)))
    monkeypatch.setattr(module, "remove_placement_group", done.append)
    monkeypatch.setattr(module, "_actor", lambda wish, group, index: f"actor {index} of {group}")
    return done


def filled(held: list[PlacedGroup]) -> PlacedGroup:
    group = PlacedGroup("group", held.append)
    group.fill(RayWish(1, 2, {"CPU": 1}, timeout_s=1.0))
    return group


def test_it_is_given_back_with_its_last_actor(done: list[object]) -> None:
    held: list[PlacedGroup] = []
    group = filled(held)
    first, second = group.actors
    assert (first, second) == ("actor 0 of group", "actor 1 of group")
    group.end(first)
    assert (done, held) == ([(first, True)], [])
    group.end(second)
    assert (done[1:], held) == ([(second, True), "group"], [group])


def test_given_back_as_a_whole_it_takes_its_actors_along(done: list[object]) -> None:
    held: list[PlacedGroup] = []
    group = filled(held)
    first, second = group.actors
    group.end(first)
    group.give_back()
    assert done == [(first, True), (second, True), "group"]
    assert (group.actors, held) == ([], [group])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (GetTimeoutError(), "did not start an actor for each worker in time (worker_timeout)"),
        (RayError("lost\nand a page of Ray's own"), "Ray cannot start a worker's actor (lost); install the same"),
        (RayError("worker died:\nNo module named 'stepwire'"), "(a node cannot import stepwire); install the same"),
    ],
)
def test_an_actor_that_does_not_start_is_told_with_a_remedy(error: RayError, text: str) -> None:
    assert text in no_actor(error)
