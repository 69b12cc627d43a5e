"""docker-compose.yml and what it mounts hold together, as far as that can be told without Docker."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.settings_groups import SCHEDULER, WORKER, SettingsGroup
from stepwire.cli.settings_options import gather
from tests.support.compose import interpolate, read_compose
from worker_service.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = read_compose()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = [name for name, service in SERVICES.items() if "build" in service]
ENVIRON = {"HOME": "/home/user", "STEPWIRE_CLUSTER_KEY": "a-key-of-enough-letters"}
COMMANDS: Mapping[str, tuple[SettingsGroup, type[BaseModel]]] = {
    "scheduler": (SCHEDULER, SchedulerSettings),
    "worker": (WORKER, WorkerSettings),
}
# The collector's image has nothing to check with; see the comment there.
WITHOUT_HEALTH_CHECK = {"otel-collector"}


def settings_of(name: str) -> BaseModel:
    command = SERVICES[name]["command"][0]
    group, model = COMMANDS[command]
    environment = {key: interpolate(value, ENVIRON) for key, value in SERVICES[name]["environment"].items()}
    unknown = set(environment) - {spec.variable for spec in group.specs.values()}
    assert not unknown, f"{name} sets what `stepwire {command}` does not know: {unknown}"
    return gather(group, {}, environment, None).build(model)


def test_the_services_that_the_readme_promises_are_there() -> None:
    assert {"scheduler", "worker", "worker-2", "otel-collector", "jaeger", "prometheus", "grafana"} <= set(SERVICES)
    assert {name for name, service in SERVICES.items() if service.get("profiles") == ["two"]} == {
        "scheduler-2",
        "worker-2",
    }


@pytest.mark.parametrize("name", SERVICES)
def test_the_image_is_pinned(name: str) -> None:
    tag = SERVICES[name]["image"].rpartition(":")[2]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), tag


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_on_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


def test_no_port_is_published_twice() -> None:
    published = [port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == len(set(published))


@pytest.mark.parametrize("name", sorted(set(SERVICES) - WITHOUT_HEALTH_CHECK))
def test_there_is_a_health_check(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert check["start_period"]


@pytest.mark.parametrize("name", SERVICES)
def test_dependencies_exist_and_are_gated_by_health(name: str) -> None:
    for dependency, how in SERVICES[name].get("depends_on", {}).items():
        assert set(SERVICES[dependency].get("profiles", [])) <= set(SERVICES[name].get("profiles", []))
        expected = "service_started" if dependency in WITHOUT_HEALTH_CHECK else "service_healthy"
        assert how["condition"] == expected


@pytest.mark.parametrize("name", OWN)
def test_the_settings_are_ones_that_the_command_takes(name: str) -> None:
    settings = settings_of(name)
    assert getattr(settings, "host") == "0.0.0.0"  # noqa: B009
    port = getattr(settings, "port")  # noqa: B009
    assert f"127.0.0.1:{port}" in SERVICES[name]["healthcheck"]["test"]


@pytest.mark.parametrize("name", [name for name in OWN if SERVICES[name]["command"] == ["scheduler"]])
def test_schedulers_find_their_workers(name: str) -> None:
    settings = settings_of(name)
    assert isinstance(settings, SchedulerSettings)
    for address in settings.workers:
        host, _, port = address.partition(":")
        worker = settings_of(host)
        assert isinstance(worker, WorkerSettings)
        assert worker.port == int(port)
        assert worker.cluster_key == settings.cluster_key
        assert host in SERVICES[name]["depends_on"]
        assert any(settings.model.startswith(root) for root in worker.model_roots)


@pytest.mark.parametrize("name", [name for name in OWN if SERVICES[name]["command"] == ["worker"]])
def test_workers_have_shared_memory_and_publish_nothing(name: str) -> None:
    assert SERVICES[name]["shm_size"] == "1g"
    assert "ports" not in SERVICES[name]


def test_without_a_cluster_key_nothing_starts() -> None:
    with pytest.raises(KeyError, match=r"env\.example"):
        interpolate(SERVICES["worker"]["environment"]["STEPWIRE_CLUSTER_KEY"], {"HOME": "/"})


def test_the_example_of_the_environment_names_only_what_is_used() -> None:
    names = re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert names
    used = (ROOT / "docker-compose.yml").read_text()
    for name in names:
        assert "${" + name in used


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = interpolate(volume, ENVIRON).split(":")[0]
        if source.startswith("./"):
            assert (ROOT / source).exists(), source
            assert volume.endswith(":ro")
        elif not source.startswith("/"):
            assert source in COMPOSE["volumes"]


def addresses(value: object) -> Iterator[str]:
    """Every host:port in a configuration, with or without a scheme."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from addresses(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from addresses(inner)
    elif isinstance(value, str):
        match = re.fullmatch(r"(?:http://)?([a-z][\w.-]*|\d+\.\d+\.\d+\.\d+):(\d+)", value)
        if match:
            yield f"{match[1]}:{match[2]}"


@pytest.mark.parametrize(
    "path",
    [
        "deploy/otel-collector.yaml",
        "deploy/jaeger.yaml",
        "deploy/prometheus/prometheus.yml",
        "deploy/grafana/provisioning/datasources/datasources.yaml",
    ],
)
def test_configurations_name_services_that_are_there(path: str) -> None:
    found = list(addresses(yaml.safe_load((ROOT / path).read_text())))
    assert found
    for address in found:
        host = address.partition(":")[0]
        assert host == "0.0.0.0" or host in SERVICES, address


@pytest.mark.parametrize("path", ["deploy/otel-collector.yaml", "deploy/jaeger.yaml"])
def test_pipelines_use_what_is_configured(path: str) -> None:
    config = yaml.safe_load((ROOT / path).read_text())
    connectors = set(config.get("connectors", {}))
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    for pipeline in config["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(config["receivers"]) | connectors
        assert set(pipeline["processors"]) <= set(config["processors"])
        assert set(pipeline["exporters"]) <= set(config["exporters"]) | connectors


def test_spans_go_where_the_collector_listens() -> None:
    collector = yaml.safe_load((ROOT / "deploy/otel-collector.yaml").read_text())
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for name in OWN:
        assert SERVICES[name]["environment"]["STEPWIRE_OTLP_ENDPOINT"] == f"http://otel-collector:{port}"


def test_the_image_is_built_from_the_lock() -> None:
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", base) for base in bases)
    assert "--require-hashes -r requirements/runtime.txt" in text
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert name.rstrip("/") in allowed
            assert (ROOT / name).exists()
