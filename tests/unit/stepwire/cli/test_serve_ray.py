"""What a worker takes of a Ray node."""

import pytest

from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_ray import resources_of, workers_on_ray
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import gather


def test_a_gpu_each_or_the_threads_that_it_computes_with() -> None:
    assert resources_of("cuda", None) == {"CPU": 1, "GPU": 1}
    assert (resources_of("cpu", 3), resources_of("cpu", None)) == ({"CPU": 3}, {"CPU": 1})
    with pytest.raises(SettingsError, match="set --device cuda"):
        resources_of("cuda:1", None)


def test_ranks_of_a_group_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each would have a number of its own, there Ray gives them."""
    pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")
    from stepwire.cli.serve_plan import plan
    from stepwire.placement import ray
    from stepwire.placement.place import PlacementError

    def refuse(wish: ray.RayWish, *, evicts: bool) -> None:
        raise PlacementError(str(dict(wish.resources)))

    monkeypatch.setattr(ray, "placed_on_ray", refuse)
    settings = gather(SERVE, {"model": "/m", "tp": "2", "device": "cuda", "placement": "ray"}, {}, None)
    scheduler, workers, supervisor = plan(settings)
    with (
        pytest.raises(PlacementError, match="'GPU': 1"),
        workers_on_ray(settings, (), scheduler, workers[0], supervisor),
    ):
        pass
