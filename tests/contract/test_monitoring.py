"""Dashboards and alerts ask for what live services export, and Prometheus understands both."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stepwire.supervisor.ports import free_port
from stepwire.telemetry import names
from stepwire.telemetry.metrics import Metrics
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import running_scheduler
from tests.support.worker_server import first_step, new_sequence, running_worker

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
PROMETHEUS = ROOT / "deploy/prometheus"
NAME = re.compile(r"\b(?:stepwire|gen_ai|process)_[a-z0-9_]+")


def queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the expression."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                if "expr" in target:
                    yield f"{path.stem}: {panel['title']}", target["expr"]
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def promtool(*command: str) -> None:
    done = subprocess.run(["promtool", *command], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def exported(metrics: Metrics) -> dict[str, set[str]]:
    """Names of samples with the names of their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_that_is_asked_for_is_exported_with_its_labels() -> None:
    async with running_scheduler() as scheduler, running_worker() as worker:
        await scheduler.generate(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=3))
        await scheduler.error_of(text="")
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        await stream.execute(first_step(1, new_sequence(1, [5, 6])))
        found = exported(scheduler.metrics)
        for name, labels in exported(worker.worker.metrics).items():
            found.setdefault(name, set()).update(labels)
    asked = list(queries())
    assert len(asked) > 40
    for where, expression in asked:
        wanted = set(NAME.findall(expression))
        assert wanted or expression.startswith("up"), where
        assert wanted <= found.keys(), f"{where} asks for {wanted - found.keys()}"
        known = {"instance", "job", "le"}.union(*(found[name] for name in wanted))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= known, f"{where}: {group}"


def test_every_metric_of_ours_is_asked_for() -> None:
    asked = " ".join(expression for _, expression in queries())
    ours = {value for name, value in vars(names).items() if name.startswith("METRIC_")}
    assert not {name for name in ours if not re.search(rf"\b{name}(?:_bucket|_sum|_count)?\b", asked)}


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert len(rule["annotations"]["runbook"]) > 80, rule["alert"]
            assert rule["labels"]["severity"] in ("page", "warn")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_configuration_rules_and_queries(tmp_path: Path) -> None:
    for command in (["config", str(PROMETHEUS / "prometheus.yml")], ["rules", str(PROMETHEUS / "alerts.yml")]):
        promtool("check", *command)
    # A query is checked as the expression of a rule; Grafana fills in the interval.
    rules = [
        {"record": f"query:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression) in enumerate(queries())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
async def test_prometheus_scrapes_a_scheduler_and_a_worker(tmp_path: Path) -> None:
    async with running_scheduler() as scheduler, running_worker() as worker:
        await scheduler.generate(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=3))
        ports = {"scheduler": scheduler.metrics.serve("127.0.0.1", 0)}
        ports["worker"] = worker.worker.metrics.serve("127.0.0.1", 0)
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for name, port in ports.items()
        ]
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        with prometheus(config, tmp_path / "data") as ask:
            async with asyncio.timeout(30):
                while (await asyncio.to_thread(ask, 'count(up{job=~"scheduler|worker"} == 1)')) != [2.0]:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.2)
            assert await asyncio.to_thread(ask, "stepwire_ready") == [1.0]
            assert await asyncio.to_thread(ask, "sum(stepwire_requests_total)") == [1.0]
            assert await asyncio.to_thread(ask, 'stepwire_worker_phase{phase="starting"}') == [1.0]


@contextmanager
def prometheus(config: Path, data: Path) -> Iterator[Callable[[str], list[float]]]:
    """Runs Prometheus; yields what answers a query, with no values while it cannot."""
    address = f"127.0.0.1:{free_port()}"
    command = [f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address={address}"]

    def ask(query: str) -> list[float]:
        url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                result = json.load(response)["data"]["result"]
        except OSError:
            return []
        return [float(sample["value"][1]) for sample in result]

    with subprocess.Popen(["prometheus", *command, "--log.level=error"]) as process:
        try:
            yield ask
        finally:
            process.terminate()
