"""The compose stack's own services as local processes: hosts mapped to loopback, folders to the tests'."""

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwire.supervisor.ports import free_port
from tests.support.compose import interpolate, read_compose
from tests.support.processes import run, running, wait_for_trace, wait_serving

SERVICES: dict[str, dict[str, Any]] = read_compose()["services"]
# What the file serves the model as unless told otherwise.
MODEL_NAME = interpolate(SERVICES["scheduler"]["environment"]["STEPWIRE_SERVED_MODEL_NAME"], {})


@dataclass
class LocalCompose:
    """Runs services of the compose file here, in the order of their dependencies."""

    folder: Path
    models: Path
    model: str
    otlp: str
    exits: ExitStack
    ports: dict[tuple[str, str], int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def up(self, name: str) -> None:
        """Starts a service after those that it depends on, and waits for its health check."""
        service = SERVICES[name]
        if name in self.processes or "build" not in service:
            return
        for dependency in service.get("depends_on", {}):
            self.up(dependency)
        environ = {"STEPWIRE_CLUSTER_KEY": "a-key-of-enough-letters", "STEPWIRE_MODEL": f"/models/{self.model}"}
        settings = {
            key: self._local(name, interpolate(value, environ)) for key, value in service["environment"].items()
        }
        for variable in ("STEPWIRE_PORT", "STEPWIRE_METRICS_PORT"):
            settings[variable] = str(self.port(name, settings[variable]))
        log_path = self.folder / f"{name}.log"
        process = self.exits.enter_context(running(service["command"], log_path, settings))
        self.processes[name] = process
        wait_serving(self._local(name, service["healthcheck"]["test"][-1]), process, log_path)

    def port(self, service: str, inside: str) -> int:
        """The port here of a service's port in its container."""
        return self.ports.setdefault((service, inside), free_port())

    def _local(self, name: str, value: str) -> str:
        if value.startswith("/models"):
            return value.replace("/models", str(self.models))
        if value == "0.0.0.0":
            return "127.0.0.1"
        if value == "http://otel-collector:4317":
            return self.otlp
        if match := re.fullmatch(r"([a-z0-9.-]+):(\d+)", value):
            service = name if match[1] == "127.0.0.1" else match[1]
            return f"127.0.0.1:{self.port(service, match[2])}"
        return value


@contextmanager
def local_compose(tiny_model: Path, folder: Path, otlp: str) -> Iterator[LocalCompose]:
    with ExitStack() as exits:
        yield LocalCompose(folder, tiny_model.parent, tiny_model.name, otlp, exits)


def test_the_stack_answers_and_shows_the_trace(tiny_model: Path, tmp_path: Path) -> None:
    listen, page = f"127.0.0.1:{free_port()}", free_port()
    receiver = ["traces", "--listen", listen, "--page", f"127.0.0.1:{page}"]
    with running(receiver, tmp_path / "traces.log"), local_compose(tiny_model, tmp_path, listen) as compose:
        compose.up("scheduler")
        assert list(compose.processes) == ["worker", "scheduler"]
        target = f"127.0.0.1:{compose.port('scheduler', '50051')}"
        request = ["--target", target, "--otlp-endpoint", listen, "--request-id", "composed", "--max-tokens", "4"]
        done = run("generate", "abc", "--model", MODEL_NAME, *request)
        assert done.returncode == 0, done.stderr
        trace = wait_for_trace(page, "composed")
        for name, metric in (
            ("scheduler", 'stepwire_ready{model="smollm2-135m"} 1.0'),
            ("worker", 'stepwire_worker_phase{phase="ready"} 1.0'),
        ):
            url = f"http://127.0.0.1:{compose.port(name, '9464')}/metrics"
            assert metric in urllib.request.urlopen(url, timeout=5).read().decode()
    assert trace.root.service == "stepwire-client"
    assert all(process.returncode == 0 for process in compose.processes.values())
