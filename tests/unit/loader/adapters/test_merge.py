"""Merged weights against the sum written out, and against the product added at run time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loader.adapters import merge
from loader.adapters.adapter import Adapter, open_adapter
from loader.adapters.load import load_adapter
from loader.adapters.merge import merge_adapter
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.quantised.config import Quantisation
from loader.quantised.schemes import AwqScheme
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_adapter import PREFIX, adapter_tensors, layer_modules, make_tiny_adapter, write_adapter
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ALL_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def loaded_weights(base: Checkpoint, place: RankPlace, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(
        base, weight_slices(base.config, place), dtype=dtype, progress=lambda _: None, cancelled=lambda: False
    )


def every_module(folder: Path, base: Checkpoint, **changes: Any) -> Adapter:
    tensors = adapter_tensors(base.config, dict.fromkeys([*layer_modules(base.config, *ALL_KINDS), EMBEDDING, HEAD], 4))
    path = write_adapter(folder, tensors, target_modules=[*ALL_KINDS, "embed_tokens", "lm_head"], **changes)
    return open_adapter(path, base.config)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_weights_are_the_sum(tmp_path: Path, base: Checkpoint, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_CHUNK_VALUES", 1000)  # several chunks for each weight
    adapter = every_module(tmp_path / "a", base, use_rslora=True)
    whole, factors = loaded_weights(base, RankPlace()), load_adapter(adapter, RankPlace()).factors
    for name, module in factors.items():
        product = module.b.double() @ module.a.double() * (8 / 4**0.5)
        whole[f"{name}.weight"] = whole[f"{name}.weight"].double() + (product.T if module.is_embedding else product)
    for rank in range(tp):
        place = RankPlace(rank, tp)
        weights = loaded_weights(base, place)
        merge_adapter(weights, load_adapter(adapter, place))
        for want in weight_slices(base.config, place):
            expected = whole[want.name]
            if want.dim is not None:
                expected = expected.narrow(want.dim, want.start, want.stop - want.start)
            torch.testing.assert_close(weights[want.name], expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_merged_is_what_factors_add_at_run_time(tmp_path: Path, base: Checkpoint, tp: int) -> None:
    """A product split by rows is summed over the ranks, with each rank's own part of the change."""
    adapter = every_module(tmp_path / "a", base)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    name = "model.layers.0.mlp.down_proj"
    merged, added = torch.zeros(5, 64), torch.zeros(5, 64)
    for rank in range(tp):
        place = RankPlace(rank, tp)
        own = x[:, 128 // tp * rank : 128 // tp * (rank + 1)]
        loaded = load_adapter(adapter, place)
        weights, factors = loaded_weights(base, place), loaded.factors[name]
        added += own @ weights[f"{name}.weight"].T + factors.scaling * (own @ factors.a.T) @ factors.b.T
        merge_adapter(weights, loaded)
        merged += own @ weights[f"{name}.weight"].T
    torch.testing.assert_close(merged, added, rtol=1e-5, atol=1e-5)


def test_products_that_a_family_joins_get_their_rows_of_the_second_factor(tmp_path: Path) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES["phi3"]))
    rng = np.random.default_rng(0)
    outer, parts = "model.layers.1.self_attn", ("q_proj", "k_proj", "v_proj")
    a, b = rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((128, 4)).astype(np.float32)
    head = rng.standard_normal((256, 64)).astype(np.float32)
    tensors = {
        f"{PREFIX}{outer}.qkv_proj.lora_A.weight": a,
        f"{PREFIX}{outer}.qkv_proj.lora_B.weight": b,
        f"{PREFIX}model.layers.0.mlp.gate_up_proj.weight": head,
    }
    options = {"target_modules": ["layers.1.self_attn.qkv_proj"], "modules_to_save": ["layers.0.mlp.gate_up_proj"]}
    adapter = open_adapter(write_adapter(tmp_path / "a", tensors, **options), base.config)
    assert adapter.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    plain, merged = loaded_weights(base, RankPlace()), loaded_weights(base, RankPlace())
    merge_adapter(merged, load_adapter(adapter, RankPlace()))
    change = torch.from_numpy(2.0 * b.astype(np.float64) @ a)
    found = torch.cat([merged[f"{outer}.{part}.weight"] - plain[f"{outer}.{part}.weight"] for part in parts])
    torch.testing.assert_close(found, change.float(), rtol=1e-4, atol=1e-5)
    saved = torch.cat([merged[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(saved, torch.from_numpy(head))


def test_experts_are_named_as_their_family_names_them(tmp_path: Path) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES["mixtral"]))
    ours = {"model.layers.0.mlp.experts.1.up_proj": 4, "model.layers.0.self_attn.q_proj": 4}
    tensors = {
        name.replace("mlp.experts.1.up_proj", "block_sparse_moe.experts.1.w3"): tensor
        for name, tensor in adapter_tensors(base.config, ours).items()
    }
    targets = ["layers.0.block_sparse_moe.experts.1.w3", "layers.0.self_attn.q_proj"]
    adapter = open_adapter(write_adapter(tmp_path / "a", tensors, target_modules=targets), base.config)
    assert adapter.modules.keys() == ours.keys()


def test_a_quantised_weight_is_not_merged(tmp_path: Path, base: Checkpoint) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config), base.config)
    name = next(iter(adapter.modules))
    quantisation = Quantisation("awq", {name: AwqScheme(group_size=32)})
    quantised = replace(adapter, base=replace(base.config, quantisation=quantisation))
    loaded = replace(load_adapter(adapter, RankPlace()), adapter=quantised)
    with pytest.raises(CheckpointError, match=f"changes {name}, whose weight is quantised"):
        merge_adapter(loaded_weights(base, RankPlace()), loaded)


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """1 + 2^-8 lies between two values of bfloat16: the 2^-20 beside it decides, and is lost where the change is
    rounded before it is added."""
    base = open_checkpoint(make_tiny_llama(tmp_path / "base", dtype="bfloat16"))
    name = "model.layers.0.self_attn.q_proj"
    a, b = np.ones((2, 64), np.float32), np.tile(np.array([2.0**-8, 2.0**-20], np.float32), (64, 1))
    tensors = {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    path = write_adapter(tmp_path / "a", tensors, r=2, lora_alpha=2, target_modules=[name])
    weights = loaded_weights(base, RankPlace(), torch.bfloat16)
    weights[f"{name}.weight"].fill_(1.0)
    merge_adapter(weights, load_adapter(open_adapter(path, base.config), RankPlace()))
    assert torch.equal(weights[f"{name}.weight"].float(), torch.full((64, 64), 1 + 2.0**-7))


def test_a_full_weight_takes_the_place_of_the_bases(tmp_path: Path, base: Checkpoint) -> None:
    norm = np.arange(64, dtype=np.float32)
    tensors = adapter_tensors(base.config, dict.fromkeys(layer_modules(base.config, "q_proj", "down_proj"), 4))
    tensors[f"{PREFIX}model.norm.weight"] = norm
    path = write_adapter(tmp_path / "a", tensors, modules_to_save=["model.norm"])
    weights = loaded_weights(base, RankPlace(), torch.bfloat16)
    merge_adapter(weights, load_adapter(open_adapter(path, base.config), RankPlace()))
    assert torch.equal(weights["model.norm.weight"], torch.from_numpy(norm).bfloat16())


@pytest.mark.parametrize("module", [EMBEDDING, HEAD])
def test_half_of_a_shared_weight_is_not_merged(tmp_path: Path, tied: Checkpoint, module: str) -> None:
    tensors = adapter_tensors(tied.config, {module: 4})
    adapter = open_adapter(write_adapter(tmp_path / "a", tensors, target_modules=[module]), tied.config)
    weights = loaded_weights(tied, RankPlace())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with pytest.raises(CheckpointError, match="embedding is also its head"):
        merge_adapter(weights, load_adapter(adapter, RankPlace()))
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def test_a_sum_that_float16_cannot_hold_is_an_error(tmp_path: Path, base: Checkpoint) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config, lora_alpha=1_000_000), base.config)
    with pytest.raises(CheckpointError, match="float16"):
        merge_adapter(loaded_weights(base, RankPlace(), torch.float16), load_adapter(adapter, RankPlace()))


def test_weights_of_another_rank_are_refused(tmp_path: Path, base: Checkpoint) -> None:
    adapter = open_adapter(make_tiny_adapter(tmp_path / "a", base.config), base.config)
    with pytest.raises(ValueError, match=r"must be a weight of the shape"):
        merge_adapter(loaded_weights(base, RankPlace(0, 2)), load_adapter(adapter, RankPlace()))
