"""Models that others were reported to split over ranks wrongly, each under its project and number."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.inspection import Wish, inspect_checkpoint
from loader.layout import weight_slices
from loader.reading.extents import Extent
from loader.reading.files import DataFile
from loader.reading.tuning import Method, Storage, Tuner
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama

LAYER = "model.layers.0.self_attn"


def loaded(checkpoint: Checkpoint, place: RankPlace) -> dict[str, torch.Tensor]:
    wanted = weight_slices(checkpoint.config, place)
    return load_weights(checkpoint, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)


@pytest.mark.parametrize("stage", [0, 1])
def test_sglang_15890_the_last_stage_of_a_tied_model_has_the_embedding(tmp_path: Path, stage: int) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, tie=True))
    part = loaded(checkpoint, RankPlace(pipeline_rank=stage, pipeline_parallel_size=2))
    whole = loaded(checkpoint, RankPlace())
    assert torch.equal(part["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])


def test_vllm_5405_and_6127_a_rank_reads_what_it_holds_and_not_the_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, num_layers=8, hidden_size=128, intermediate_size=512)
    checkpoint = open_checkpoint(folder)
    before = bytes_that_were_read()
    loaded(checkpoint, RankPlace(pipeline_rank=1, pipeline_parallel_size=4))
    share = (bytes_that_were_read() - before) / (folder / "model.safetensors").stat().st_size
    assert 0.1 < share < 0.35


def test_vllm_39030_the_disk_reads_once_what_lies_between_the_rows_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that read the same files in the same order waited for each other's reads, some for minutes."""
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, hidden_size=128, intermediate_size=512))
    direct_only = Storage(disk=Tuner(("direct", "buffered"), 1), cache=Tuner(("cached",), 1))
    monkeypatch.setattr("loader.reading.files.storage_of", lambda _: direct_only)
    monkeypatch.setattr("loader.reading.files.is_resident", lambda *_: False)
    past_the_cache = Counter[tuple[int, int]]()
    choose = DataFile.choose

    def noted(file: DataFile, extent: Extent) -> Method:
        method = choose(file, extent)
        past_the_cache.update((f.start, f.stop) for f in extent.fragments if method == "direct")
        return method

    monkeypatch.setattr(DataFile, "choose", noted)
    for rank in range(2):
        loaded(checkpoint, RankPlace(tensor_rank=rank, tensor_parallel_size=2))
    twice = [(start, stop) for (start, stop), count in past_the_cache.items() if count > 1]
    assert len(past_the_cache) > len(twice) > 0
    # Norms, which every rank holds whole: no more than a row of any matrix.
    assert {stop - start for start, stop in twice} == {128 * 4}
    once = sorted(each for each, count in past_the_cache.items() if count == 1)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(once))


def bytes_that_were_read() -> int:
    """By this process so far, from wherever."""
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])


def test_vllm_414_heads_that_ranks_do_not_divide(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, hidden_size=104, heads=52, kv_heads=52, intermediate_size=96, num_layers=1)
    found = inspect_checkpoint(open_checkpoint(folder), Wish(tensor_parallel_size=3))
    (problem,) = found.problems
    assert "tp 3 does not work: the number of heads, 52" in problem.message
    assert problem.remedy == "use one of tp 1, 2, 4"
    assert not found.is_usable


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_transformers_48307_more_ranks_than_key_value_heads(tmp_path: Path, kv_heads: int) -> None:
    """Each rank has the whole head that its queries attend with."""
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, heads=8, kv_heads=kv_heads))
    whole = loaded(checkpoint, RankPlace())
    assert inspect_checkpoint(checkpoint, Wish(tensor_parallel_size=8)).is_usable
    for rank in range(8):
        part = loaded(checkpoint, RankPlace(tensor_rank=rank, tensor_parallel_size=8))
        head = rank * kv_heads // 8
        for name in (f"{LAYER}.k_proj.weight", f"{LAYER}.v_proj.weight"):
            assert torch.equal(part[name], whole[name][head * 8 : head * 8 + 8])
        assert torch.equal(part[f"{LAYER}.q_proj.weight"], whole[f"{LAYER}.q_proj.weight"][rank * 8 : rank * 8 + 8])


def test_sglang_20967_norms_of_a_head_are_whole_on_every_rank(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, heads=16, kv_heads=8, config_overrides=TINY_FAMILIES["qwen3"])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.qk_norm
    whole = loaded(checkpoint, RankPlace())
    for rank in range(16):
        part = loaded(checkpoint, RankPlace(tensor_rank=rank, tensor_parallel_size=16))
        for name in (f"{LAYER}.q_norm.weight", f"{LAYER}.k_norm.weight"):
            assert torch.equal(part[name], whole[name])
        heads = whole[f"{LAYER}.k_proj.weight"].view(8, checkpoint.config.head_dim, -1)
        assert torch.equal(part[f"{LAYER}.k_proj.weight"], heads[rank // 2])
