"""The models to compare on: one folder and one GGUF file with the same weights."""

import dataclasses
import json
from pathlib import Path

import gguf
import pytest
import torch

from benchmarks.peers import models
from benchmarks.peers.models import BIG, byte_tokenizer, gguf_name, pairwise_rows, random_tensors
from loader.checkpoint import open_checkpoint
from loader.layout import expected_tensors
from loader.tensors import WeightSlice
from loader.weights import load_weights

SMALL = dataclasses.replace(
    BIG, vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.Model:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "BIG", SMALL)
    return models.big_model()


def weights(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    wanted = [WeightSlice(name, shape) for name, shape in expected_tensors(checkpoint.config).items()]
    return load_weights(checkpoint, wanted, dtype=torch.bfloat16, progress=lambda _bytes: None, cancelled=lambda: False)


def test_both_files_hold_the_same_model(small: models.Model) -> None:
    found = open_checkpoint(small.folder).config
    assert dataclasses.replace(found, eos_token_ids=SMALL.eos_token_ids) == SMALL
    from_folder, from_gguf, made = weights(small.folder), weights(small.gguf), random_tensors(SMALL, seed=0)
    assert from_folder.keys() == from_gguf.keys() == made.keys()
    for name, tensor in made.items():
        assert torch.equal(from_folder[name], tensor), name
        assert torch.equal(from_gguf[name], tensor), name


def test_matrices_are_stored_in_bfloat16_and_norms_in_float32(small: models.Model) -> None:
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(small.gguf).tensors}
    assert {name: kind for name, kind in types.items() if kind != "BF16"} == {
        name: "F32" for name in types if "norm" in name
    }
    assert set(types) == {gguf_name(name) for name in expected_tensors(SMALL)}


def test_what_is_there_is_not_made_again(small: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "random_tensors", None)
    (small.folder / "config.json").write_text(json.dumps({"mine": True}))
    assert models.big_model() == small
    assert json.loads((small.folder / "config.json").read_text()) == {"mine": True}


def test_what_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "BIG", SMALL)
    monkeypatch.setattr(models, "write_gguf", fail)
    with pytest.raises(OSError, match="no space"):
        models.big_model()
    assert list((tmp_path / "compare").iterdir()) == []


def test_halves_of_a_head_are_interleaved() -> None:
    rows = torch.arange(8).view(8, 1)
    assert pairwise_rows(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_step_reads_all_but_an_embedding_of_its_own() -> None:
    folder = Path("unused")
    embedding = 2 * SMALL.vocab_size * SMALL.hidden_size
    apart = models.Model(SMALL, folder, folder).step_bytes
    tied = models.Model(dataclasses.replace(SMALL, tie_word_embeddings=True), folder, folder).step_bytes
    assert apart == tied == sum(2 * t.numel() for t in random_tensors(SMALL, 0).values()) - embedding


def test_the_tokenizer_takes_any_text_and_fills_the_vocabulary() -> None:
    tokenizer = byte_tokenizer(300)
    assert tokenizer.get_vocab_size() == 300
    text = "Grüße, 世界"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
