"""A rank's part of an adapter, against slices of the whole."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loader.adapters import load
from loader.adapters.adapter import Adapter, adapter_fingerprint, open_adapter
from loader.adapters.load import LoadedAdapter, load_adapter
from loader.adapters.parts import adapter_bytes
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from tests.support.tiny_adapter import PREFIX, adapter_tensors, layer_modules, make_tiny_adapter, write_adapter
from tests.support.tiny_quantised_models import awq, make_tiny_quantised

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ALL_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def whole_adapter(folder: Path, base: Checkpoint, **changes: Any) -> Adapter:
    """Factors for every module, and a full weight of the last norm and of one product of each kind of split."""
    full = {
        "model.norm.weight": np.arange(64, dtype=np.float32),
        "model.layers.1.mlp.up_proj.weight": np.arange(128 * 64, dtype=np.float32).reshape(128, 64),
        "model.layers.1.mlp.down_proj.weight": np.arange(64 * 128, dtype=np.float32).reshape(64, 128),
    }
    saved = [name.removesuffix(".weight") for name in full]
    modules = [name for name in layer_modules(base.config, *ALL_KINDS) if name not in saved] + [EMBEDDING, HEAD]
    tensors = adapter_tensors(base.config, dict.fromkeys(modules, 4))
    tensors |= {PREFIX + name: tensor for name, tensor in full.items()}
    targets = [*ALL_KINDS, "embed_tokens", "lm_head"]
    path = write_adapter(folder, tensors, target_modules=targets, modules_to_save=saved, **changes)
    return open_adapter(path, base.config)


def places(tp: int, pp: int) -> list[RankPlace]:
    return [RankPlace(rank, tp, stage, pp) for stage in range(pp) for rank in range(tp)]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_hold_what_their_weights_need(
    tmp_path: Path, base: Checkpoint, tied: Checkpoint, tp: int, pp: int, tie: bool
) -> None:
    model = tied if tie else base
    adapter = whole_adapter(tmp_path / "a", model)
    stored = load_file(adapter.weights_file)
    seen = set()
    for place in places(tp, pp):
        loaded = load_adapter(adapter, place)
        assert loaded.num_bytes == adapter_bytes(adapter, place)
        slices = {want.name: want for want in weight_slices(model.config, place)}
        for name, factors in loaded.factors.items():
            own = slices[f"{EMBEDDING if name == HEAD and tie else name}.weight"]
            if factors.is_embedding:
                a, b = (stored[f"{PREFIX}{name}.lora_embedding_{part}"] for part in "AB")
                a = a[:, own.start : own.stop]
            else:
                a, b = (stored[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
                if own.dim == 0:
                    b = b[own.start : own.stop]
                else:
                    a = a[:, own.start : own.stop]
            assert torch.equal(factors.a, a) and torch.equal(factors.b, b), (name, place)
            assert factors.a.is_contiguous() and factors.scaling == 2.0
        for name, tensor in loaded.full_weights.items():
            own, whole = slices[name], stored[PREFIX + name]
            expected = whole if own.dim is None else whole.narrow(own.dim, own.start, own.stop - own.start)
            assert torch.equal(tensor, expected)
        seen |= loaded.factors.keys() | loaded.full_weights.keys()
    assert seen == adapter.modules.keys() | adapter.full_weights.keys()


def test_stages_hold_their_own_layers_embedding_and_head(tmp_path: Path, tied: Checkpoint) -> None:
    first, last = (load_adapter(whole_adapter(tmp_path / "a", tied), place) for place in places(1, 2))
    assert EMBEDDING in first.factors and HEAD not in first.factors
    assert HEAD in last.factors and EMBEDDING not in last.factors
    assert all(".layers.0." in name for name in first.factors if "layers" in name)
    assert "model.norm.weight" in last.full_weights and not first.full_weights


def test_the_weight_of_a_shared_embedding_reaches_the_stage_with_the_head(tmp_path: Path, tied: Checkpoint) -> None:
    name = f"{PREFIX}{EMBEDDING}.base_layer.weight"
    whole = np.arange(320 * 64, dtype=np.float32).reshape(320, 64)
    tensors = {**adapter_tensors(tied.config, {EMBEDDING: 4}), name: whole}
    path = write_adapter(tmp_path / "a", tensors, target_modules=["embed_tokens"])
    for place in places(2, 2):
        loaded = load_adapter(open_adapter(path, tied.config), place)
        rows = torch.from_numpy(whole)[160 * place.tensor_rank :][:160]
        assert torch.equal(loaded.full_weights[f"{EMBEDDING}.weight"], rows)
        assert (EMBEDDING in loaded.factors) == place.is_first_stage


def test_a_quantised_base_takes_the_same_factors(tmp_path: Path, base: Checkpoint) -> None:
    quantised = open_checkpoint(make_tiny_quantised(tmp_path / "q", awq()))
    assert quantised.config.quantisation is not None
    path = make_tiny_adapter(tmp_path / "a", base.config)
    for place in places(2, 1):
        own, other = (load_adapter(open_adapter(path, model.config), place) for model in (base, quantised))
        assert own.factors.keys() == other.factors.keys()
        for name, factors in own.factors.items():
            assert torch.equal(factors.a, other.factors[name].a) and torch.equal(factors.b, other.factors[name].b)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_factors_stay_in_the_type_they_are_stored_in(tmp_path: Path, base: Checkpoint, dtype: str) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config, dtype=dtype), base.config)
    loaded: LoadedAdapter = load_adapter(adapter, RankPlace())
    assert {str(factors.a.dtype) for factors in loaded.factors.values()} == {f"torch.{dtype}"}
    assert loaded.num_bytes == adapter.total_bytes
    assert loaded.fingerprint == adapter_fingerprint(adapter)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_changes_after_it_was_opened_is_an_error(
    tmp_path: Path, base: Checkpoint, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config), base.config)

    def change(*_: object) -> str:
        os.utime(adapter.weights_file, ns=(1, 1))
        return ""

    if when == "before":
        change()
    else:
        monkeypatch.setattr(load, "content_fingerprint", change)
    with pytest.raises(CheckpointError, match="changed after it was opened") as caught:
        load_adapter(adapter, RankPlace())
    assert caught.value.file == adapter.weights_file


def test_a_size_that_cannot_split_the_base_is_refused(tmp_path: Path, base: Checkpoint) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config), base.config)
    with pytest.raises(ValueError, match="the number of heads"):
        adapter_bytes(adapter, RankPlace(0, 3))
