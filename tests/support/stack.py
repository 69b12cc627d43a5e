"""Whole servers for end-to-end tests: real processes that are all gone when a test is done with them."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepwire.client import Client, Model
from stepwire.supervisor.ports import free_port
from tests.support.processes import ServeStack, running, wait_serving

# In the environment of every process of one server, so that none can hide by leaving its parent or its session.
MARK_VARIABLE = "TEST_SERVER_ID"
_POLL_S = 0.02
_GONE_TIMEOUT_S = 15.0


def processes_of(mark: str) -> dict[int, str]:
    """Command lines of the running processes that carry a mark, by process id."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # It has ended meanwhile, or is another user's.
            continue
    return found


def assert_none_left(mark: str, within_s: float = _GONE_TIMEOUT_S) -> None:
    """Waits until no process carries the mark. Raises AssertionError naming those that stay."""
    deadline = time.monotonic() + within_s
    while left := processes_of(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_POLL_S)


@contextmanager
def marked() -> Iterator[str]:
    """A mark for processes; afterwards none with it may be left."""
    mark = uuid.uuid4().hex
    yield mark
    assert_none_left(mark)


@dataclass(frozen=True)
class Server(ServeStack):
    """`stepwire serve`, ready. `log_path` holds what supervisor and scheduler say."""

    mark: str
    worker_log_path: Path

    def client(self) -> Client:
        """A client of its own for whoever asks."""
        return Client(self.target)

    def model(self) -> Model:
        """The model and how it stands."""
        with self.client() as client:
            return client.get_model()

    def wait_idle(self, within_s: float = 10.0) -> Model:
        """Waits until nothing runs or waits. Raises AssertionError with what is left."""
        deadline = time.monotonic() + within_s
        with self.client() as client:
            while not is_idle(model := client.get_model()):
                assert time.monotonic() < deadline, f"not idle: {model}"
                time.sleep(_POLL_S)
        return model


def is_idle(model: Model) -> bool:
    """Whether no request holds anything."""
    return (model.num_running, model.num_waiting, model.num_free_blocks) == (0, 0, model.num_blocks)


@contextmanager
def serve(model: Path | None, folder: Path, *flags: str, prefix: Sequence[str] = ()) -> Iterator[Server]:
    """`stepwire serve` on a free port, ready; afterwards none of its processes may be left. `flags` name the models
    where `model` is None.

    One CPU thread, since tests share their cores with the server. `prefix` is a command that becomes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, log_path = free_port(), folder / "serve.log"
    arguments = [
        "serve",
        *(() if model is None else ("--model", str(model))),
        "--port",
        str(port),
        "--log-dir",
        str(folder),
        "--threads",
        "1",
    ]
    # A process that stands by costs the imports of another: only tests of restarts pay for it.
    arguments += ["--no-standby"]
    with marked() as mark, running([*arguments, *flags], log_path, {MARK_VARIABLE: mark}, prefix=prefix) as process:
        worker_log_path = folder / f"worker-0.{port}.log"
        server = Server(process, f"127.0.0.1:{port}", log_path, mark, worker_log_path)
        wait_serving(server.target, process, log_path)
        yield server


def tiny_limits(max_model_len: int, num_kv_blocks: int, *more: str) -> Sequence[str]:
    """Flags with which a tiny model starts quickly."""
    sizes = {"max-model-len": max_model_len, "num-kv-blocks": num_kv_blocks, "max-num-seqs": 8}
    return [f"--{name}={value}" for name, value in {**sizes, "max-num-batched-tokens": 64}.items()] + list(more)
