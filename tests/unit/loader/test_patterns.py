from pathlib import Path

import pytest

from loader import patterns
from loader.errors import CheckpointError
from loader.patterns import full_matches

FILE = Path("adapter_config.json")
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"]


def test_an_expression_matches_whole_names() -> None:
    assert full_matches(FILE, [r".*\.q_proj", "q_proj", r"lm_.*|.*\.1\..*"], NAMES) == [
        {NAMES[0], NAMES[1]},
        frozenset(),
        {NAMES[1], NAMES[2]},
    ]
    assert full_matches(FILE, [], NAMES) == []


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        full_matches(FILE, ["(q_proj"], NAMES)
    assert (caught.value.code, caught.value.file, caught.value.found) == ("invalid", FILE, "(q_proj")


def test_an_expression_that_would_never_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.5)
    with pytest.raises(CheckpointError, match=r"takes more than 0\.5 s"):
        full_matches(FILE, [r"(([a-z_.0-9])+)+!"], NAMES)


def test_an_expression_that_breaks_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SCRIPT", "import os; os.abort()")
    with pytest.raises(CheckpointError, match="too much to match"):
        full_matches(FILE, [".*"], NAMES)
