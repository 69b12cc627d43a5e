"""Damaged checkpoints are refused or load right: nothing else, whatever the damage.

A case that fails is run again alone: python -m tests.support.loader_fuzz KIND SEED CASE CASE+1 EMPTY-FOLDER.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loader_fuzz import KINDS

SEED = 0
FULL = bool(os.environ.get("STEPWIRE_TEST_FULL"))
NUM_CASES = (100_000 if FULL else 1_500) // len(KINDS)
TIMEOUT_S = 900 if FULL else 150
ROOT = Path(__file__).parents[2]
# Later than what tells which case hangs.
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """A process for each kind, at the same time: a crash of one ends no test but its own."""
    started = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-m", "tests.support.loader_fuzz", kind, str(SEED), "0", str(NUM_CASES), str(folder)]
        # A heap for each thread would count as memory taken.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        started[kind] = (folder, process)
    yield started
    for _, process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_harmless(runs: dict[str, tuple[Path, subprocess.Popen[str]]], kind: str) -> None:
    folder, process = runs[kind]
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{kind}: case {(folder / 'case').read_text()} of seed {SEED} hangs")
    log = (folder.parent / f"{folder.name}.log").read_text()[-3000:]
    where = f"{kind}: case {(folder / 'case').read_text() if (folder / 'case').exists() else '(none)'} of seed {SEED}"
    assert process.returncode == 0, f"{where}\n{log}"
    num_loaded = int(output.split()[0])
    assert 0 < num_loaded < NUM_CASES
