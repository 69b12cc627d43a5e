"""deploy/kubernetes holds together, and is what the published schemas of Kubernetes allow."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.settings_groups import SCHEDULER, WORKER, SettingsGroup
from stepwire.cli.settings_options import gather
from stepwire.rpc.server import LIVE
from tests.support.kustomize import build, generator, kustomization
from tests.support.leader_worker_set import SCHEMA
from worker_service.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/kustomization.yaml"))
KEY = "a-key-of-enough-letters"
COMMANDS: Mapping[str, tuple[SettingsGroup, type[BaseModel]]] = {
    "scheduler": (SCHEDULER, SchedulerSettings),
    "worker": (WORKER, WorkerSettings),
}


def shared_settings(folder: Path) -> dict[str, str]:
    """What every container gets by its config map."""
    place, generated = generator(folder)
    lines = [line for name in generated["envs"] for line in (place / name).read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "LeaderWorkerSet":
        template = document["spec"]["leaderWorkerTemplate"]
        return [template[name] for name in ("leaderTemplate", "workerTemplate") if name in template]
    return [document["spec"]["template"]] if document["kind"] in ("Deployment", "StatefulSet") else []


def pods(folder: Path) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name of the workload, pod template, its one container."""
    return [
        (document["metadata"]["name"], template, template["spec"]["containers"][0])
        for document in build(folder)
        for template in pod_templates(document)
    ]


def settings_of(folder: Path, container: dict[str, Any]) -> BaseModel:
    """The settings that a container starts with, refused where the command does not know or allow them."""
    group, model = COMMANDS[container["args"][0]]
    environment = shared_settings(folder)
    for entry in container["env"]:
        if "valueFrom" in entry:
            secret = entry["valueFrom"].get("secretKeyRef")
            environment[entry["name"]] = KEY if secret else "0"
        else:
            environment[entry["name"]] = entry["value"]
    own = {name: value for name, value in environment.items() if name.startswith("STEPWIRE_")}
    assert not set(own) - {spec.variable for spec in group.specs.values()}
    return gather(group, {}, own, None).build(model)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_published_schemas_allow_every_document(folder: Path) -> None:
    documents = build(folder)
    assert documents
    for document in documents:
        if document["apiVersion"].startswith("leaderworkerset."):
            jsonschema.validate(document, SCHEMA)
            for template in pod_templates(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
                kubernetes_validate.validate(pod, "1.37", strict=True)
        else:
            kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_names_are_unique_and_selectors_find_pods(folder: Path) -> None:
    documents = build(folder)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    labels = [template["metadata"]["labels"] for _, template, _ in pods(folder)]
    for document in documents:
        spec = document["spec"]
        selectors = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels")}
        if selector := selectors.get(document["kind"]):
            assert any(selector.items() <= found.items() for found in labels), document["metadata"]["name"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_containers_start_with_settings_that_are_allowed(folder: Path) -> None:
    schedulers = workers = 0
    for _, template, container in pods(folder):
        settings = settings_of(folder, container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": getattr(settings, "port"), "metrics": getattr(settings, "metrics_port")}  # noqa: B009
        # Variables of Services begin with STEPWIRE_ too.
        assert template["spec"]["enableServiceLinks"] is False
        if isinstance(settings, SchedulerSettings):
            schedulers += 1
            assert template["spec"]["terminationGracePeriodSeconds"] > settings.shutdown_timeout
            assert settings.model.startswith("/models/")
        else:
            workers += 1
            assert isinstance(settings, WorkerSettings)
            assert settings.model_roots == ["/models"]
            assert settings.restart_store.startswith("/dev/shm/")
    assert schedulers == 1
    assert workers


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_probes_ask_the_port_and_a_service_that_there_is(folder: Path) -> None:
    for name, _, container in pods(folder):
        port = next(port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == port, name
        assert container["startupProbe"]["grpc"]["service"] == LIVE
        assert container["livenessProbe"]["grpc"]["service"] == LIVE
        assert "service" not in container["readinessProbe"]["grpc"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_pods_may_do_nothing_that_they_need_not(folder: Path) -> None:
    for name, template, container in pods(folder):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert mounts["models"]["readOnly"] is True


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_scheduler_names_workers_that_there_are(folder: Path) -> None:
    scheduler = next(
        found
        for _, _, container in pods(folder)
        if isinstance(found := settings_of(folder, container), SchedulerSettings)
    )
    expected = []
    services = {document["metadata"]["name"] for document in build(folder) if document["kind"] == "Service"}
    for document in build(folder):
        name = document["metadata"]["name"]
        if document["kind"] == "StatefulSet":
            assert document["spec"]["serviceName"] in services
            expected += [
                f"{name}-{i}.{document['spec']['serviceName']}:50061" for i in range(document["spec"]["replicas"])
            ]
        elif document["kind"] == "LeaderWorkerSet":
            # Its controller names pods so: leader NAME-GROUP, the others NAME-GROUP-INDEX; all are in a headless
            # Service of the set's name, which it makes only where there is none.
            assert name in services
            size = document["spec"]["leaderWorkerTemplate"]["size"]
            expected += [f"{name}-0.{name}:50061", *(f"{name}-0-{i}.{name}:50061" for i in range(1, size))]
    assert scheduler.workers == expected


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_scheduler_has_as_many_workers_as_its_groups_have_ranks(folder: Path) -> None:
    """SchedulerSettings refuse any other number; a set's size is that of a group."""
    sizes = [
        document["spec"]["leaderWorkerTemplate"]["size"]
        for document in build(folder)
        if document["kind"] == "LeaderWorkerSet"
    ]
    found = [settings_of(folder, container) for _, _, container in pods(folder)]
    (scheduler,) = [settings for settings in found if isinstance(settings, SchedulerSettings)]
    assert sizes in ([], [scheduler.tp * scheduler.pp])
    if scheduler.tp * scheduler.pp > 1:
        workers = [settings for settings in found if isinstance(settings, WorkerSettings)]
        assert all(worker.collective_interface != "lo" for worker in workers)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomize_makes_the_same_of_a_folder(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    (settings,) = [document for document in found if document["kind"] == "ConfigMap"]
    assert settings["data"] == shared_settings(folder)
    version = kustomization(folder)["images"][0]["newTag"]
    named = done.stdout.replace(settings["metadata"]["name"], "stepwire").replace(f"stepwire:{version}", "stepwire")
    found = [document for document in yaml.safe_load_all(named) if document["kind"] != "ConfigMap"]
    assert sorted(found, key=_name) == sorted(build(folder), key=_name)


def _name(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_the_image_is_the_release() -> None:
    text = (ROOT.parents[1] / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    assert version is not None
    for folder in FOLDERS:
        for image in kustomization(folder).get("images", []):
            assert image == {"name": "stepwire", "newTag": version[1]}
