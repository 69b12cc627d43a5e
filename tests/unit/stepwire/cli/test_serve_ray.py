"""What workers take of Ray nodes, and how they are started there. Nothing is placed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_plan import plan
from stepwire.cli.serve_ray import resources_of, workers_on_ray
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import Settings, gather
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


def test_ranks_of_a_group_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each would have a number of its own, there Ray gives them."""
    ray = pytest.importorskip("stepwire.placement.ray", reason="Ray is not installed (requirements/ray.txt)")

    def refuse(_address: str, _strategy: str, wishes: Sequence[Any], *, evicts: bool) -> None:
        raise PlacementError(str([dict(wish.resources) for wish in wishes]))

    monkeypatch.setattr(ray, "placed_on_ray", refuse)
    settings = given(tp="2", device="cuda")
    scheduler, workers, supervisor = plan(settings)
    with (
        pytest.raises(PlacementError, match="'GPU': 1"),
        workers_on_ray(settings, (), scheduler, workers, supervisor),
    ):
        pass


def test_several_models_have_workers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("stepwire.placement.ray", reason="Ray is not installed (requirements/ray.txt)")
    places = [Place("10.0.0.1", 7, "x"), Place("10.0.0.2", 8, "y"), Place("10.0.0.2", 9, "y")]
    asked: list[tuple[str, str, Any]] = []

    @contextmanager
    def placed(address: str, strategy: str, wishes: Sequence[Any], *, evicts: bool) -> Iterator[Any]:
        asked.extend((address, strategy, wish) for wish in wishes)
        yield [ray.PlacedActor(None, None, "first", place) for place in places]

    monkeypatch.setattr(ray, "placed_on_ray", placed)
    monkeypatch.setattr(ray, "head", lambda: Head("10.0.0.9", 6379, 60.0))
    entries = ("model=/m/a,tp=2", "model=/m/b,threads=2,served_model_name=second,worker_timeout=5")
    settings = gather(SERVE, {"models": entries, "placement": "ray", "ray_strategy": "SPREAD"}, {}, None)
    scheduler, workers, supervisor = plan(settings)
    with workers_on_ray(settings, (), scheduler, workers, supervisor) as (scheduler, specs, head):
        assert head.host == "10.0.0.9"
        assert [(wish.num_groups, wish.group_size, wish.resources, wish.timeout_s) for _, _, wish in asked] == [
            (1, 2, {"CPU": 1}, 60.0),
            (1, 1, {"CPU": 2}, 5.0),
        ]
        assert {each[:2] for each in asked} == {("auto", "SPREAD")}
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
