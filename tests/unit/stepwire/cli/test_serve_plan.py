"""What `stepwire serve` plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.checks.memory import Memory
from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_plan import check_models, child_spec, plan, shares_of, without_settings
from stepwire.cli.settings_groups import SCHEDULER, SERVE, WORKER, SettingsGroup
from stepwire.cli.settings_options import Settings, gather
from stepwire.placement.place import Place
from stepwire.rpc.errors import StepwireError
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.settings import WorkerSettings


def given(**flags: object) -> Settings:
    return gather(SERVE, {"model": "/m", **flags}, {}, None)


def parsed(group: SettingsGroup, command: tuple[str, ...], environment: Mapping[str, str]) -> Settings:
    """What a child makes of its command line."""
    flags: dict[str, object] = {}
    for argument in command:
        name, _, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--no-"):
            flags[argument.removeprefix("--no-").replace("-", "_")] = False
        elif argument.startswith("--"):
            flags[name.replace("-", "_")] = value
    return gather(group, flags, environment, None)


def test_the_scheduler_finds_its_worker_and_both_share_a_fresh_key() -> None:
    scheduler, (worker,), _ = plan(given())
    assert scheduler.workers == [f"127.0.0.1:{worker.port}"]
    assert worker.host == "127.0.0.1"
    assert scheduler.cluster_key == worker.cluster_key
    assert len(scheduler.cluster_key or "") >= 32
    assert plan(given())[0].cluster_key != scheduler.cluster_key


def test_each_process_gets_its_settings() -> None:
    key = "a-key-of-enough-letters"
    flags = {
        "port": "7",
        "host": "0.0.0.0",
        "threads": "2",
        "log_level": "debug",
        "cluster_key": key,
        "dtype": "float32",
    }
    scheduler, (worker,), supervisor = plan(given(**flags, log_dir="/l"))
    assert (scheduler.port, scheduler.host, scheduler.dtype, scheduler.log_level) == (7, "0.0.0.0", "float32", "debug")
    assert (worker.threads, worker.log_level, worker.host) == (2, "debug", "127.0.0.1")
    assert scheduler.cluster_key == worker.cluster_key == key
    assert supervisor.log_dir == "/l"


def test_a_group_gets_a_worker_a_rank_and_divides_the_machine() -> None:
    scheduler, workers, _ = plan(given(tp="2", pp="3", metrics_port="9000"))
    assert len(workers) == 6
    assert scheduler.workers == [f"127.0.0.1:{worker.port}" for worker in workers]
    assert len(set(scheduler.workers)) == 6
    assert [worker.metrics_port for worker in workers] == [*range(9001, 9007)]
    assert {worker.local_ranks for worker in workers} == {6}
    assert [w.device for w in plan(given(tp="2", device="cuda"))[1]] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(("flags", "text"), [({"tp": "0"}, "--tp"), ({"tp": "x"}, "--tp"), ({"pp": "9999"}, "--pp")])
def test_a_size_that_is_none_names_its_flag(flags: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        plan(given(**flags))


def test_the_worker_has_places_for_the_adapters_that_are_named() -> None:
    named = ("one=/a", "two=/b")
    assert [worker.adapter_slots for worker in plan(given())[1]] == [0]
    assert [worker.adapter_slots for worker in plan(given(adapter=named, tp="2"))[1]] == [2, 2]
    scheduler, (worker,), _ = plan(given(adapter=named, adapter_slots="5", max_adapter_rank="8"))
    assert (worker.adapter_slots, worker.max_adapter_rank) == (5, 8)
    assert scheduler.adapters == {"one": "/a", "two": "/b"}


def test_a_free_port_is_chosen_before_the_start() -> None:
    assert plan(given(port="0"))[0].port > 0


def test_a_relative_path_means_the_same_to_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(given(model="models/x"))[0].model == str(tmp_path / "models" / "x")


def test_a_wrong_setting_of_the_worker_names_its_flag() -> None:
    with pytest.raises(SettingsError, match="--memory-fraction"):
        plan(given(memory_fraction="2"))


def test_children_read_back_exactly_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWIRE_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("STEPWIRE_CONFIG", "/not/there.toml")
    flags = {"prefix_caching": False, "shutdown_timeout": "1.5", "kv_cache_bytes": "2GiB", "served_model_name": "-x y"}
    scheduler, (worker,), _ = plan(given(**flags))
    for group, model, values in (
        (SCHEDULER, SchedulerSettings, scheduler),
        (WORKER, WorkerSettings, worker),
    ):
        spec = child_spec("name", group.name, values)
        assert parsed(group, tuple(spec.command), spec.environment).build(model) == values


def test_a_key_is_never_on_a_command_line() -> None:
    scheduler, (worker,), _ = plan(given(cluster_key="a-key-of-enough-letters"))
    for values in (scheduler, worker):
        spec = child_spec("name", "scheduler", values)
        assert not any("a-key" in argument for argument in spec.command)
        assert spec.environment["STEPWIRE_CLUSTER_KEY"] == "a-key-of-enough-letters"


def test_only_settings_are_taken_out_of_the_environment() -> None:
    environ = {"STEPWIRE_PORT": "1", "STEPWIRE_CONFIG": "c", "STEPWIRE_CACHE": "kept", "PATH": "kept"}
    assert without_settings(environ) == {"STEPWIRE_CACHE": "kept", "PATH": "kept"}


SEVERAL = ("model=/m/a,served_model_name=one,tp=2,memory_fraction=0.5", "model=b,prefix_caching=false,threads=3")


def several(**flags: object) -> Settings:
    return gather(SERVE, {"models": SEVERAL, **flags}, {}, None)


def test_each_model_gets_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwire.cli.serve_plan.usable_cores", lambda: (9, 6.5))
    scheduler, workers, _ = plan(several(metrics_port="9000", memory_fraction="0.25"))
    assert [model.name for model in scheduler.models] == ["one", "b"]
    assert [len(model.workers) for model in scheduler.models] == [2, 1]
    addresses = [address for model in scheduler.models for address in model.workers]
    assert addresses == [f"127.0.0.1:{worker.port}" for worker in workers]
    assert [worker.memory_fraction for worker in workers] == [0.5, 0.5, 0.25]
    assert [worker.local_ranks for worker in workers] == [2, 2, 1]
    assert [worker.metrics_port for worker in workers] == [9001, 9002, 9003]
    # All of them share the cores.
    assert [worker.threads for worker in workers] == [2, 2, 3]
    assert [model.prefix_caching for model in scheduler.models] == [True, False]


def test_a_scheduler_of_several_models_reads_back_exactly_what_was_planned() -> None:
    scheduler, _, _ = plan(several(tp="4", max_num_seqs="3"))
    command = list(child_spec("name", "scheduler", scheduler).command)
    entries = [part.removeprefix("--models=") for part in command if part.startswith("--models=")]
    assert len(entries) == 2
    rest = tuple(part for part in command if not part.startswith("--models="))
    environment = {**child_spec("name", "scheduler", scheduler).environment, "STEPWIRE_MODELS": "\n".join(entries)}
    built = parsed(SCHEDULER, rest, environment).build(SchedulerSettings)
    assert built.models == scheduler.models
    assert (built.max_num_seqs, built.tp, built.port) == (3, 4, scheduler.port)


def worker(device: str, fraction: float, **more: Any) -> WorkerSettings:
    return WorkerSettings(device=device, memory_fraction=fraction, **more)


def parts(workers: list[WorkerSettings]) -> list[tuple[str, float]]:
    model = ModelSettings(model="m", replicas=len(workers), workers=[f"h:{i}" for i in range(len(workers))])
    return [(share.device, round(share.part, 3)) for share in shares_of(model, workers)]


def test_a_share_is_a_part_of_a_device_and_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwire.cli.serve_plan.read_memory", lambda: Memory(2000, 0, 1000, 0))
    cpu, gpu = "cpu of this machine", "cuda:0 of this machine"
    assert parts([worker("cpu", 0.8, local_ranks=2)] * 2) == [(cpu, 0.4), (cpu, 0.4)]
    assert parts([worker("cpu", 0.8, memory_limit_bytes=100)]) == [(cpu, 0.1)]
    assert parts([worker("cpu", 0.05, memory_limit_bytes=100)]) == [(cpu, 0.05)]
    assert parts([worker("cuda", 0.8), worker("cuda:1", 0.3)]) == [(gpu, 0.8), ("cuda:1 of this machine", 0.3)]
    # Each simulated device is its worker's own.
    assert parts([worker("sim", 0.8)]) == []


def test_a_share_that_holds_no_weights_is_told_naming_the_model(tmp_path: Path) -> None:
    paths = [make_tiny_llama(tmp_path / name) for name in "ab"]
    entries = (f"model={paths[0]},memory_fraction=0.5", f"model={paths[1]},memory_limit_bytes=1000")
    scheduler, workers, _ = plan(gather(SERVE, {"models": entries}, {}, None))
    with pytest.raises(StepwireError) as caught:
        check_models(scheduler.models, workers)
    assert caught.value.reason == "OUT_OF_MEMORY"
    assert "b: the weights of a rank take" in caught.value.message


def test_workers_on_other_machines_listen_there_and_may_load_what_is_named() -> None:
    places = [Place("10.0.0.1", 7, "a"), Place("10.0.0.2", 8, "b"), Place("10.0.0.2", 9, "b")]
    settings = given(pp="3", adapter=("one=/x/a",), device="cuda", ray_strategy="SPREAD", placement="ray")
    scheduler, workers, supervisor = plan(settings, places=places)
    assert scheduler.workers == ["10.0.0.1:7", "10.0.0.2:8", "10.0.0.2:9"]
    assert [(worker.host, worker.collective_interface) for worker in workers] == [(p.host, p.host) for p in places]
    assert [worker.local_ranks for worker in workers] == [1, 2, 2]
    assert {(worker.device, *worker.model_roots) for worker in workers} == {("cuda", "/m", "/x/a")}
    assert {worker.cluster_key for worker in workers} == {scheduler.cluster_key}
    assert (supervisor.placement, supervisor.ray_strategy) == ("ray", "SPREAD")


def test_workers_on_other_machines_may_load_what_the_links_of_a_model_lead_to(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    model = tmp_path / "snapshot"
    model.mkdir()
    (model / "config.json").symlink_to("../blob")
    _, (worker,), _ = plan(given(model=str(model)), places=[Place("10.0.0.1", 7, "a")])
    assert worker.model_roots == [str(model), str(tmp_path / "blob")]


def test_a_head_that_is_no_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="--ray-address"):
        plan(given(ray_address="ray://head:10001"))
