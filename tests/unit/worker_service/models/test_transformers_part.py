"""Definitions of transformers over a group of ranks: their tokens are those of one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.shares import RankPlace
from tests.support.mixture import mixed_prompts
from tests.support.rank_threads import rank_threads
from tests.support.tiny_others import SERVED, make_tiny_other
from tests.support.tiny_runner import Driver, one_thread
from worker_service.models.registry import build_model
from worker_service.models.transformers_part import DefinitionPart
from worker_service.models.transformers_path import TransformersModel

SOME = torch.zeros(1, 4)
VOCAB_SIZE = 321
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "granite": {"vocab_size": VOCAB_SIZE},  # an embedding that is multiplied between embedding and layers
    "gpt_neox": {},
    "phi": {"vocab_size": VOCAB_SIZE},  # a head with a bias
    "cohere": {"num_hidden_layers": 3},  # a head that is the embedding
    "olmoe": {},
    "glm": {},
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    logging.disable_progress_bar()
    with one_thread():
        yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("others")
    return {name: make_tiny_other(folder / name, name, {**SERVED[name], **more}) for name, more in MODELS.items()}


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[int]]]:
    return {}


def outputs(path: Path, tp: int, pp: int) -> list[list[int]]:
    with rank_threads(tp, pp) as ranks:
        ranks.start(path)
        assert all(isinstance(r._need_model().engine._model, TransformersModel) for r in ranks.runtimes)  # type: ignore[attr-defined]
        driver = Driver(ranks, ranks)  # type: ignore[arg-type]
        for number, prompt in enumerate(mixed_prompts(320, (3, 17, 31))):
            driver.add(number, prompt)
        driver.run(16)
        return [driver.sequences[number].output for number in range(3)]


@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        ("gpt2", 1, 2),
        ("granite", 4, 1),  # two key-value heads: each is on two ranks
        ("granite", 1, 2),
        ("gpt_neox", 2, 2),
        ("phi", 2, 1),
        ("cohere", 2, 2),
        ("olmoe", 2, 1),
        ("glm", 2, 2),
    ],
)
def test_a_group_says_what_one_rank_says(
    paths: dict[str, Path], known: dict[str, list[list[int]]], model: str, tp: int, pp: int
) -> None:
    if model not in known:
        known[model] = outputs(paths[model], 1, 1)
    assert outputs(paths[model], tp, pp) == known[model]


def test_layers_that_take_more_than_hidden_states_are_refused(paths: dict[str, Path]) -> None:
    config = open_checkpoint(paths["granite"]).config
    part = DefinitionPart(config, RankPlace(0, 1, 1, 2), None)
    with pytest.raises(ValueError, match="its layers take embeddings_of_each_layer, which only the first stage"):
        part._enter(["hidden_states"], (SOME,), {"embeddings_of_each_layer": SOME})
    with pytest.raises(ValueError, match="given no hidden states"):
        part._enter(["hidden_states"], (SOME,), {"position_ids": SOME})


def test_a_list_of_layers_that_the_definition_has_not_is_refused(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_checkpoint(paths["gpt2"]).config
    model = build_model(config, RankPlace(0, 1, 0, 2), None)
    monkeypatch.setattr(model._part, "_num_layers", 7)  # type: ignore[attr-defined]
    assert config.other is not None
    with pytest.raises(CheckpointError, match="it has no list of 7 layers"):
        model.place_weights({name: SOME for name in config.other.tensors})
