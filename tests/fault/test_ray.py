"""A group of ranks over the nodes of a Ray cluster: placed, served, and taken up again when a node loses its worker.

Two raylets on this machine, with an address each.
"""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwire.client import AsyncClient, ModelState
from tests.support.processes import run
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.stack import MARK_VARIABLE, Server, marked, processes_of, serve, tiny_limits
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (requirements/ray.txt)"),
    pytest.mark.timeout(300),
]

KEY = "a-key-of-enough-letters"
JOBS = [Job("lorem ipsum " * (1 + 4 * i), 200 + 20 * i, seed=i, temperature=(i % 2) * 1.0) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=1024)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with marked() as mark, ray_cluster(2, {MARK_VARIABLE: mark}) as cluster:
        yield cluster


def placed(cluster: RayCluster, *more: str) -> list[str]:
    ray = ["--placement=ray", f"--ray-address={cluster.address}", "--ray-strategy=STRICT_SPREAD", "--tp=2"]
    return [*ray, "--dtype=float32", *tiny_limits(1024, 256), *more]


def workers(folder: Path) -> dict[str, int]:
    """Process ids of the running workers whose logs are in `folder`, by the address of their node."""
    raise NotImplementedError
