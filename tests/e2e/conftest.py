"""Models and servers that many tests share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.fetch_demo_model import model_path
from tests.support.collector import Collector, collecting
from tests.support.processes import ServeStack, serving
from tests.support.stack import Server, serve
from tests.support.tiny_checkpoint import make_tiny_llama

if TYPE_CHECKING:
    from tests.support.reference import Reference

_QUESTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "mt-bench" / "question.jsonl"
_NUM_QUESTIONS = 20


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeStack]:
    """`stepwire serve` on the tiny model. Leave it as it is."""
    with serving(tiny_model, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="session")
def demo_model() -> Path:
    path = model_path()
    if not path.is_file():
        pytest.skip(f"the demo model is not at {path}; `make setup` fetches it")
    return path


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def demo(demo_model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`stepwire serve` on the demo model in float32. Leave it as it is."""
    sizes = ["--max-model-len=1024", "--num-kv-blocks=768", "--max-num-seqs=24", "--max-num-batched-tokens=512"]
    traces = ["--otlp-endpoint", collector.endpoint, "--log-level=debug"]
    with serve(demo_model, tmp_path_factory.mktemp("demo"), "--dtype=float32", *sizes, *traces) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """Every fourth question of MT-bench by length, the shortest first."""
    if not _QUESTIONS.is_file():
        pytest.skip(f"the MT-bench questions are not at {_QUESTIONS}")
    lines = _QUESTIONS.read_text(encoding="utf-8").splitlines()
    by_length = sorted((json.loads(line)["turns"][0] for line in lines), key=len)
    return by_length[:: len(by_length) // _NUM_QUESTIONS]


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> "Reference":
    # transformers takes seconds to import, which tests that do without it need not wait for.
    from tests.support.reference import Reference

    return Reference(demo_model)
