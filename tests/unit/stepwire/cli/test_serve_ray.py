"""What workers take of Ray nodes, and how they are started there. Nothing is placed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.model_settings import ModelSettings
from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_plan import plan
from stepwire.cli.serve_ray import RayPlacement, resources_of
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import Origin, Settings, gather
from stepwire.placement.head import Head
from stepwire.placement.place import Place, PlacementError


def given(**flags: object) -> Settings:
    return gather(SERVE, {"model": "/m", "placement": "ray", **flags}, {}, None)


def test_a_gpu_each_or_the_threads_that_it_computes_with() -> None:
    assert resources_of(given(device="cuda", host="0.0.0.0")) == {"CPU": 1, "GPU": 1}
    assert resources_of(given(threads="3")) == {"CPU": 3}
    assert resources_of(given(host="0.0.0.0")) == {"CPU": 1}
    with pytest.raises(SettingsError, match="set --device cuda"):
        resources_of(given(device="cuda:1"))


class FakeCluster:
    """A cluster that has these places."""

    def __init__(self, *places: Place) -> None:
        self.places = list(places)
        self.asked: list[Any] = []
        self.taken_back: list[Any] = []
        self.head = Head("10.0.0.9", 6379, 60.0, lambda: None)

    def place_all(self, wishes: Sequence[Any]) -> list[Any]:
        from stepwire.placement.group import PlacedActor

        self.asked += wishes
        num_ranks = sum(wish.num_groups * wish.group_size for wish in wishes)
        if num_ranks > len(self.places):
            raise PlacementError("no room")
        placed, self.places = self.places[:num_ranks], self.places[num_ranks:]
        return [PlacedActor(None, None, "first", place) for place in placed]  # type: ignore[arg-type]

    async def place(self, wish: Any) -> list[Any]:
        return self.place_all([wish])

    async def take_back(self, placed: Sequence[Any]) -> None:
        self.taken_back += placed


def placement(cluster: FakeCluster) -> RayPlacement:
    pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")
    return RayPlacement(cluster, Path("logs"))  # type: ignore[arg-type]


def test_ranks_of_a_group_take_a_gpu_each() -> None:
    """Here each would have a number of its own, there Ray gives them."""
    cluster = FakeCluster()
    settings = given(tp="2", device="cuda")
    with pytest.raises(PlacementError, match="no room"):
        placement(cluster).place_first(settings, (), plan(settings)[0])
    assert [(wish.group_size, wish.resources) for wish in cluster.asked] == [(2, {"CPU": 1, "GPU": 1})]


def test_several_models_have_workers_of_their_own() -> None:
    places = [Place("10.0.0.1", 7, "x"), Place("10.0.0.2", 8, "y"), Place("10.0.0.2", 9, "y")]
    entries = ("model=/m/a,tp=2", "model=/m/b,threads=2,served_model_name=second,worker_timeout=5")
    settings = gather(SERVE, {"models": entries, "placement": "ray"}, {}, None)
    cluster = FakeCluster(*places)
    on_ray = placement(cluster)
    assert str(on_ray.head).endswith("10.0.0.9:6379")
    scheduler, specs = on_ray.place_first(settings, (), plan(settings)[0])
    assert [(wish.num_groups, wish.group_size, wish.resources, wish.timeout_s) for wish in cluster.asked] == [
        (1, 2, {"CPU": 1}, 60.0),
        (1, 1, {"CPU": 2}, 5.0),
    ]
    assert [model.workers for model in scheduler.models] == [["10.0.0.1:7", "10.0.0.2:8"], ["10.0.0.2:9"]]
    assert [(spec.name, spec.group, spec.address) for spec in specs] == [
        ("worker 0", "a", "10.0.0.1:7"),
        ("worker 1", "a", "10.0.0.2:8"),
        ("worker 2", "second", "10.0.0.2:9"),
    ]
    assert all(spec.launcher is not None for spec in specs)
    # Of this machine's cores, which are not theirs, no part was taken.
    assert not any(part.startswith("--threads") for spec in specs[:2] for part in spec.command)
    assert "--threads=2" in specs[2].command
    assert "--model-roots=/m/b" in specs[2].command


async def test_one_model_more_gets_places_and_gives_them_back_if_it_cannot_be_started_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = given()
    cluster = FakeCluster(Place("10.0.0.1", 7, "x"), Place("10.0.0.2", 8, "y"))
    on_ray = placement(cluster)
    scheduler, _ = on_ray.place_first(settings, (), plan(settings)[0])
    entry = settings.of_model({"model": "/m/b", "worker_timeout": "4"}, "settings", Origin("flag", "LoadModel"))
    model = entry.build(ModelSettings, workers=["127.0.0.1:1"])
    (spec,) = await on_ray.place(entry, model, scheduler, first=5, num_others=1)
    assert (spec.name, spec.group, spec.address) == ("worker 5", "b", "10.0.0.2:8")
    assert {"--host=10.0.0.2", "--model-roots=/m/b"} <= set(spec.command)
    assert cluster.asked[-1].timeout_s == 4.0
    cluster.places.append(Place("10.0.0.3", 9, "z"))

    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise SettingsError("no such worker")

    monkeypatch.setattr("stepwire.cli.serve_ray.worker_at", refuse)
    with pytest.raises(SettingsError):
        await on_ray.place(entry, model, scheduler, first=6, num_others=2)
    assert [placed.place.host for placed in cluster.taken_back] == ["10.0.0.3"]
