"""The processes of `stepwire serve` as models come and go; a supervisor is noted, not run."""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.serve_models import Fleet
from stepwire.cli.serve_plan import plan
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import Settings, gather
from stepwire.placement.place import PlacementError
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.line import Record
from tests.support.tiny_checkpoint import make_tiny_llama


class FakeSupervisor:
    """What the fleet has asked for."""

    def __init__(self) -> None:
        self.added: list[ChildSpec] = []
        self.ended: list[Collection[str]] = []
        self.schedulers: list[ChildSpec] = []
        self.said: list[Record] = []
        self.failure: Exception | None = None
        self.heard = asyncio.Event()

    async def add_workers(self, specs: Sequence[ChildSpec]) -> None:
        if self.failure is not None:
            raise self.failure
        self.added += specs

    async def end_workers(self, addresses: Collection[str]) -> None:
        self.ended.append(addresses)
        self.heard.set()

    def change_scheduler(self, spec: ChildSpec) -> None:
        self.schedulers.append(spec)

    def tell_scheduler(self, record: Record) -> None:
        self.said.append(record)
        self.heard.set()


class FakePlacement:
    """Places of workers on a cluster, as long as there are any."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.num_free = 9

    async def place(
        self, settings: Settings, model: ModelSettings, scheduler: SchedulerSettings, *, first: int, num_others: int
    ) -> list[ChildSpec]:
        self.asked.append((model.name, first, num_others))
        self.num_free -= len(model.workers)
        if self.num_free < 0:
            raise PlacementError("the Ray cluster has no room; add nodes")
        return self.specs(model, first, f"10.0.0.{len(self.asked)}")

    @staticmethod
    def specs(model: ModelSettings, first: int, host: str) -> list[ChildSpec]:
        launcher: Any = object()
        return [
            ChildSpec(f"worker {n}", (), {}, Path(f"{n}.log"), f"{host}:{n}", launcher=launcher, group=model.name)
            for n in range(first, first + len(model.workers))
        ]


class Rig:
    """A fleet that serves one model, "a", and what becomes of what it is told."""

    def __init__(self, folder: Path, on_ray: FakePlacement | None = None) -> None:
        self.folder = folder
        settings = gather(SERVE, {"model": str(folder / "a"), "max_num_seqs": "7", "memory_fraction": "0.5"}, {}, None)
        scheduler, workers, supervisor = plan(settings)
        self.lines: list[str] = []
        self.scheduler = scheduler
        self.supervisor = FakeSupervisor()
        self.fleet = Fleet(settings, scheduler, supervisor, folder / "logs", self.lines.append, on_ray)  # type: ignore[arg-type]
        self.fleet.supervisor = self.supervisor  # type: ignore[assignment]
        if on_ray is None:
            self.first = self.fleet.worker_specs(scheduler, workers)
        else:
            self.first = on_ray.specs(scheduler, 0, "10.0.0.0")
            self.fleet.hold_placed(self.first)

    async def tell(self, record: Record | None) -> None:
        self.supervisor.heard.clear()
        self.fleet.take(record)
        await asyncio.wait_for(self.supervisor.heard.wait(), 10)

    async def load(self, name: str, **settings: str) -> dict[str, Any]:
        await self.tell({"start_workers": "q", "model": {"model": str(self.folder / name), **settings}})
        return dict(self.supervisor.said[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in "ab":
        make_tiny_llama(folder / name)
    return folder


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


async def test_workers_of_one_model_more_are_started_by_its_settings_and_those_of_all(rig: Rig) -> None:
    answer = await rig.load("b", tp="2", memory_fraction="0.4", threads="3")
    assert answer["answers"] == "q"
    model = ModelSettings(**answer["model"])
    assert (model.name, model.tp, model.max_num_seqs) == ("b", 2, 7)
    specs = rig.supervisor.added
    assert [spec.address for spec in specs] == model.workers
    assert [(spec.name, spec.group) for spec in specs] == [("worker 1", "b"), ("worker 2", "b")]
    assert {"--threads=3", "--memory-fraction=0.4", "--local-ranks=2"} <= set(specs[0].command)
    assert rig.lines[-1].startswith("worker 2 of b logs to")
    assert rig.first[0].group == "a"


@pytest.mark.parametrize(
    ("name", "settings", "reason", "text"),
    [
        ("b", {"memory_fraction": "0.6"}, "OUT_OF_MEMORY", "a 0.50 (memory_fraction 0.5), b 0.60"),
        ("b", {"memory_fraction": "2"}, "FIELD_INVALID", "memory_fraction of settings (LoadModel): '2' is not allowed"),
        ("b", {"port": "1"}, "FIELD_INVALID", "port of settings (LoadModel): no such setting"),
        ("none", {"memory_fraction": "0.4"}, "CHECKPOINT_NOT_FOUND", "none does not exist"),
        # Not what memory it would share.
        ("none", {}, "CHECKPOINT_NOT_FOUND", "none does not exist"),
        ("b", {"memory_fraction": "0.4", "tp": "3"}, "FIELD_INVALID", "tp 3 does not work"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_starts(
    rig: Rig, name: str, settings: dict[str, str], reason: str, text: str
) -> None:
    answer = await rig.load(name, **settings)
    assert (answer["answers"], answer["reason"]) == ("q", reason)
    assert text in answer["error"]
    assert rig.supervisor.added == []


async def test_a_start_that_fails_leaves_no_share_behind(rig: Rig) -> None:
    rig.supervisor.failure = OSError(12, "Cannot allocate memory")
    answer = await rig.load("b", memory_fraction="0.5")
    assert (answer["reason"], "Cannot allocate memory" in answer["error"]) == ("WORKER_FAILED", True)
    rig.supervisor.failure = None
    assert "model" in await rig.load("b", memory_fraction="0.5")


async def test_the_share_of_a_model_that_ends_is_free(rig: Rig) -> None:
    workers = (await rig.load("b", memory_fraction="0.5"))["model"]["workers"]
    assert (await rig.load("b", memory_fraction="0.5", served_model_name="c"))["reason"] == "OUT_OF_MEMORY"
    await rig.tell({"end_workers": workers})
    assert rig.supervisor.ended == [set(workers)]
    assert "model" in await rig.load("b", memory_fraction="0.5", served_model_name="c")


async def test_a_scheduler_that_takes_anothers_place_serves_what_was_told(rig: Rig) -> None:
    loaded = (await rig.load("b", memory_fraction="0.4"))["model"]
    first = {"model": rig.scheduler.model, "workers": rig.scheduler.workers, "max_num_seqs": 7}
    rig.fleet.take({"models": [first, loaded]})
    (spec,) = rig.supervisor.schedulers
    entries = [part for part in spec.command if part.startswith("--models=")]
    assert [f"model={rig.folder / name}" in entry for name, entry in zip("ab", entries, strict=True)] == [True, True]
    assert not any(part.startswith("--model=") for part in spec.command)


async def test_workers_of_a_load_that_nobody_waits_for_any_more_are_ended(rig: Rig) -> None:
    workers = (await rig.load("b", memory_fraction="0.4"))["model"]["workers"]
    await rig.tell(None)
    assert rig.supervisor.ended == [set(workers)]


async def test_workers_for_a_scheduler_that_has_ended_meanwhile_are_ended_at_once(rig: Rig) -> None:
    rig.fleet.take({"start_workers": "q", "model": {"model": str(rig.folder / "b"), "memory_fraction": "0.4"}})
    rig.fleet.take(None)
    while not (rig.supervisor.ended and rig.supervisor.ended[-1]):
        rig.supervisor.heard.clear()
        await asyncio.wait_for(rig.supervisor.heard.wait(), 10)
    assert rig.supervisor.ended[-1] == {spec.address for spec in rig.supervisor.added}
    assert rig.supervisor.said == []


async def test_a_defect_is_answered_too_since_all_changes_wait_for_an_answer(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.supervisor.failure = ValueError("embedded null byte")
    answer = await rig.load("b", memory_fraction="0.5")
    assert (answer["answers"], answer["reason"]) == ("q", "INTERNAL")
    assert "embedded null byte" not in answer["error"]
    assert "ValueError: embedded null byte" in capsys.readouterr().err
    rig.supervisor.failure = None
    assert "model" in await rig.load("b", memory_fraction="0.5")


async def test_a_scheduler_with_no_model_to_serve_serves_what_there_was_at_first_on_workers_anew(rig: Rig) -> None:
    first = rig.fleet.scheduler_spec()
    await rig.load("b", memory_fraction="0.4")
    await rig.tell({"end_workers": rig.scheduler.workers})
    rig.fleet.take({"models": []})
    assert rig.supervisor.schedulers == [first]
    rig.supervisor.added.clear()
    await rig.tell(None)
    await asyncio.sleep(0)
    assert [(spec.address, spec.group) for spec in rig.supervisor.added] == [(rig.first[0].address, "a")]
    assert "model" in await rig.load("b", memory_fraction="0.5")
    assert (await rig.load("b", memory_fraction="0.1", served_model_name="c"))["reason"] == "OUT_OF_MEMORY"
    rig.supervisor.added.clear()
    await rig.tell(None)
    assert rig.supervisor.added == []


async def test_on_a_cluster_one_model_more_is_placed_and_its_shares_are_the_nodes(folder: Path) -> None:
    on_ray = FakePlacement()
    rig = Rig(folder, on_ray)
    assert rig.lines == ["worker 0 at 10.0.0.0:0 logs to 0.log"]
    # More than there is here beside the first.
    answer = await rig.load("b", tp="2", memory_fraction="0.9")
    assert answer["model"]["workers"] == ["10.0.0.1:1", "10.0.0.1:2"]
    assert [(spec.address, spec.group) for spec in rig.supervisor.added] == [("10.0.0.1:1", "b"), ("10.0.0.1:2", "b")]
    assert on_ray.asked == [("b", 1, 1)]
    assert rig.lines[-1] == "worker 2 of b at 10.0.0.1:2 logs to 2.log"
    await rig.tell({"end_workers": ["10.0.0.1:1", "10.0.0.1:2"]})
    await rig.load("b")
    assert on_ray.asked[-1] == ("b", 3, 1)


async def test_on_a_cluster_what_cannot_be_is_refused_before_it_is_asked(folder: Path) -> None:
    on_ray = FakePlacement()
    rig = Rig(folder, on_ray)
    assert (await rig.load("none"))["reason"] == "CHECKPOINT_NOT_FOUND"
    assert (await rig.load("b", tp="3"))["reason"] == "FIELD_INVALID"
    assert on_ray.asked == []


async def test_a_cluster_without_room_is_an_error_of_the_load_alone(folder: Path) -> None:
    on_ray = FakePlacement()
    rig = Rig(folder, on_ray)
    on_ray.num_free = 0
    answer = await rig.load("b")
    assert (answer["reason"], answer["error"]) == ("DEVICE_UNAVAILABLE", "the Ray cluster has no room; add nodes")
    assert (rig.supervisor.added, rig.supervisor.ended) == ([], [])
    on_ray.num_free = 1
    assert "model" in await rig.load("b")


async def test_on_a_cluster_the_first_models_are_placed_anew_under_the_addresses_that_are_known(folder: Path) -> None:
    on_ray = FakePlacement()
    rig = Rig(folder, on_ray)
    names = list(rig.scheduler.workers)
    await rig.tell({"end_workers": names})
    rig.fleet.take({"models": []})
    await rig.tell(None)
    await asyncio.sleep(0)
    assert [(spec.address, spec.name) for spec in rig.supervisor.added] == [(names[0], "worker 1")]
    assert on_ray.asked == [("a", 1, 0)]
    await rig.tell({"end_workers": names})
    rig.fleet.take({"models": []})
    on_ray.num_free = 0
    await rig.tell(None)
    await asyncio.sleep(0)
    assert rig.lines[-1] == "workers cannot be placed: the Ray cluster has no room; add nodes"
