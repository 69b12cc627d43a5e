"""What an inspection tells, against the files, the model and the scheduler's own rules."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.inspection import Inspection, Wish, inspect_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_adapter import make_tiny_adapter
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.models.decoder import Decoder
from worker_service.runtime.kv_cache import CacheShape


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Checkpoint]:
    def build(**options: Any) -> Checkpoint:
        return open_checkpoint(make_tiny_llama(tmp_path / "m", **options))

    return build


def codes(found: Inspection) -> list[str]:
    return [problem.code for problem in found.problems]


def test_a_whole_checkpoint_is_usable_and_described(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make(sharded=True, dtype="bfloat16")
    found = inspect_checkpoint(checkpoint, Wish())
    assert found.is_usable
    assert found.warnings == ()
    assert (found.num_files, found.dtype, found.max_model_len) == (2, "bfloat16", 512)
    assert found.stored_dtypes == {"BF16": checkpoint.total_bytes}
    assert found.num_parameters * 2 == checkpoint.total_bytes
    assert (found.has_tokenizer, found.has_chat_template) == (True, True)
    assert found.tensor_parallel_sizes == (1, 2, 4)
    assert found.max_pipeline_parallel_size == 2
    (rank,) = found.ranks
    assert rank.read_bytes == rank.weight_bytes == rank.resident_bytes == checkpoint.total_bytes
    assert found.fit is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
def test_every_rank_needs_what_its_model_takes(make: Callable[..., Checkpoint], tp: int, pp: int, tied: bool) -> None:
    checkpoint = make(tie=tied)
    found = inspect_checkpoint(checkpoint, Wish(tp, pp, dtype="bfloat16"))
    assert [(rank.pipeline_rank, rank.tensor_rank) for rank in found.ranks] == [
        (stage, rank) for stage in range(pp) for rank in range(tp)
    ]
    for needs in found.ranks:
        place = RankPlace(needs.tensor_rank, tp, needs.pipeline_rank, pp)
        model = Decoder(checkpoint.config, place, None)
        tensors = load_weights(
            checkpoint,
            weight_slices(checkpoint.config, place),
            dtype=torch.bfloat16,
            progress=lambda _: None,
            cancelled=lambda: False,
        )
        assert needs.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert needs.resident_bytes >= model.place_weights(tensors) >= needs.weight_bytes
        assert needs.host_peak_bytes > needs.resident_bytes
        shape = CacheShape(len(model.layers), model.num_kv_heads, checkpoint.config.head_dim, torch.bfloat16)
        assert needs.kv_bytes_per_token == shape.bytes_per_token


def test_what_fits_is_what_memory_leaves(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    (rank,) = inspect_checkpoint(checkpoint, Wish()).ranks
    block = rank.kv_bytes_per_token * 16
    memory = rank.resident_bytes + 5 * block
    for extra, blocks in ((-1, 4), (0, 5), (block - 1, 5)):
        found = inspect_checkpoint(checkpoint, Wish(memory_bytes=memory + extra, max_model_len=64))
        assert found.fit is not None
        assert (found.fit.num_blocks, found.fit.max_model_len) == (blocks, 16 * blocks)
        assert found.is_usable
    plenty = inspect_checkpoint(checkpoint, Wish(memory_bytes=1 << 40)).fit
    assert plenty is not None
    assert plenty.max_model_len == 512


def test_too_little_memory_says_what_would_fit(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    (rank,) = inspect_checkpoint(checkpoint, Wish()).ranks
    memory = rank.resident_bytes + 5 * 16 * rank.kv_bytes_per_token
    short = inspect_checkpoint(checkpoint, Wish(memory_bytes=memory, max_model_len=81))
    assert codes(short) == ["out_of_memory"]
    assert "needs 6 KV blocks" in short.problems[0].message
    assert "at most 80" in short.problems[0].remedy
    assert inspect_checkpoint(checkpoint, Wish(memory_bytes=memory, max_model_len=80)).is_usable
    none = inspect_checkpoint(checkpoint, Wish(memory_bytes=1000))
    assert codes(none) == ["out_of_memory"]
    assert "hold no KV block" in none.problems[0].message


@pytest.mark.parametrize(
    ("wish", "blocks", "words"),
    [
        ({"num_kv_blocks": 5}, 5, "num_kv_blocks asks for 5"),
        ({"kv_cache_bytes": 5 * 16 * 512}, 5, "5 blocks"),
        ({"kv_cache_bytes": 5 * 16 * 512, "num_kv_blocks": 4}, 4, "num_kv_blocks asks for 4"),
        ({"kv_cache_bytes": 4 * 16 * 512, "num_kv_blocks": 5, "memory_bytes": 1 << 30}, 4, "hold 4"),
        ({"kv_cache_bytes": 10}, 0, "kv_cache_bytes hold 0"),
    ],
)
def test_settings_of_the_cache_bound_it_too(
    make: Callable[..., Checkpoint], wish: dict[str, int], blocks: int, words: str
) -> None:
    checkpoint = make()
    (rank,) = inspect_checkpoint(checkpoint, Wish()).ranks
    assert rank.kv_bytes_per_token == 512
    found = inspect_checkpoint(checkpoint, Wish(max_model_len=81, **wish))
    assert found.fit is not None
    assert found.fit.num_blocks == blocks
    (problem,) = found.problems
    assert (problem.code, problem.expected, problem.found) == ("out_of_memory", "6 blocks", f"{blocks} blocks")
    assert words in problem.message + str(problem.found)
    assert ("lower max_model_len to at most" in problem.remedy) == (blocks > 0)


def test_adapters_take_their_part_of_the_memory(make: Callable[..., Checkpoint], tmp_path: Path) -> None:
    checkpoint = make()
    path = make_tiny_adapter(tmp_path / "a", checkpoint.config)
    plain = inspect_checkpoint(checkpoint, Wish(2, memory_bytes=1 << 20))
    found = inspect_checkpoint(checkpoint, Wish(2, memory_bytes=1 << 20, adapters=(path, path)))
    assert found.is_usable
    assert [adapter.path for adapter in found.adapters] == [path, path]
    assert plain.fit is not None and found.fit is not None
    for before, after in zip(plain.ranks, found.ranks, strict=True):
        # Of each layer's two modules one factor is halved, the other whole.
        assert after.adapter_bytes == 2 * 2 * 4 * 4 * ((64 + 32) + (64 + 64))
        assert after.resident_bytes == before.resident_bytes + after.adapter_bytes
        assert after.host_peak_bytes == before.host_peak_bytes + after.adapter_bytes
    assert found.fit.num_blocks < plain.fit.num_blocks


def test_an_adapter_that_cannot_be_used_is_a_problem_with_its_file(
    make: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    checkpoint = make()
    good = make_tiny_adapter(tmp_path / "a", checkpoint.config)
    found = inspect_checkpoint(checkpoint, Wish(adapters=(tmp_path / "none", good), max_adapter_rank=3))
    assert codes(found) == ["not_found", "unsupported"]
    assert [problem.file for problem in found.problems] == [str(tmp_path / "none"), str(good / "adapter_config.json")]
    assert (found.problems[1].expected, found.problems[1].found, found.adapters) == ("at most 3", "4", ())


def test_a_part_that_is_not_there_is_a_problem_that_names_the_tensor(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {other: info for other, info in checkpoint.tensors.items() if other != name}
    found = inspect_checkpoint(dataclasses.replace(checkpoint, tensors=rest), Wish(2))
    (problem,) = found.problems
    assert (problem.code, problem.tensor, problem.found, found.ranks) == ("invalid", name, "nothing", ())


def test_a_context_longer_than_the_models_is_refused(make: Callable[..., Checkpoint]) -> None:
    found = inspect_checkpoint(make(), Wish(max_model_len=513))
    assert codes(found) == ["max_model_len"]
    assert "at most 512" in found.problems[0].remedy


def test_a_split_that_does_not_work_names_those_that_do(make: Callable[..., Checkpoint]) -> None:
    found = inspect_checkpoint(make(), Wish(3, 3, memory_bytes=1 << 30))
    assert codes(found) == ["tensor_parallel", "pipeline_parallel"]
    assert "tp 3 does not work: the number of heads, 4" in found.problems[0].message
    assert found.problems[0].remedy == "use one of tp 1, 2, 4"
    assert found.problems[1].remedy == "use a pp of 1 to 2"
    assert (found.ranks, found.fit) == ((), None)


@pytest.mark.parametrize(
    ("options", "wish", "words"),
    [
        ({}, Wish(4), "is held by 2 ranks"),
        ({"vocab_size": 321}, Wish(2), "padded to 322"),
        ({"num_layers": 3}, Wish(1, 2), "3 layers do not divide"),
        ({"tie": True}, Wish(1, 2), "both hold the shared embedding"),
        ({"dtype": "bfloat16"}, Wish(dtype="float16"), "65504"),
    ],
)
def test_what_is_surprising_is_a_warning(
    make: Callable[..., Checkpoint], options: dict[str, Any], wish: Wish, words: str
) -> None:
    found = inspect_checkpoint(make(**options), wish)
    assert found.is_usable
    assert [warning for warning in found.warnings if words in warning]
    assert len(found.warnings) == 1


def test_a_model_without_end_or_template_is_usable_with_warnings(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make(eos_token_ids=())
    config = checkpoint.path / "tokenizer_config.json"
    config.write_text("{}")
    found = inspect_checkpoint(checkpoint, Wish())
    assert found.is_usable
    assert not found.has_chat_template
    assert ["no chat template" in found.warnings[0], "end token" in found.warnings[1]] == [True, True]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, "not_found", "has no tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1\n", "invalid", "git-LFS pointer"),
        (b'{"model": {"vocab": {"a": 1, ', "invalid", "cut off"),
        (b"", "invalid", "cut off"),
    ],
)
def test_a_tokenizer_that_is_missing_or_damaged_is_a_problem(
    make: Callable[..., Checkpoint], content: bytes | None, code: str, words: str
) -> None:
    checkpoint = make()
    file = checkpoint.path / "tokenizer.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    found = inspect_checkpoint(checkpoint, Wish())
    assert codes(found) == [code]
    assert words in found.problems[0].message
    assert (found.has_tokenizer, found.has_chat_template) == (False, True)


def test_a_damaged_tokenizer_config_is_a_problem(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make()
    (checkpoint.path / "tokenizer_config.json").write_text("{")
    found = inspect_checkpoint(checkpoint, Wish())
    assert codes(found) == ["invalid"]
    assert "tokenizer_config.json" in found.problems[0].message


def test_a_gguf_has_its_tokenizer_in_its_metadata(make: Callable[..., Checkpoint]) -> None:
    checkpoint = dataclasses.replace(make(), format="gguf", gguf_metadata={})
    assert codes(inspect_checkpoint(checkpoint, Wish())) == ["not_found"]
    metadata = {"tokenizer.ggml.tokens": ["a"], "tokenizer.chat_template": "{{ messages }}"}
    found = inspect_checkpoint(dataclasses.replace(checkpoint, gguf_metadata=metadata), Wish())
    assert (found.has_tokenizer, found.has_chat_template, found.is_usable) == (True, True, True)


def test_a_shared_embedding_that_is_stored_twice_is_a_warning(make: Callable[..., Checkpoint]) -> None:
    checkpoint = make(tie=True)
    tensors = dict(checkpoint.tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    found = inspect_checkpoint(dataclasses.replace(checkpoint, tensors=tensors), Wish())
    assert found.is_usable
    assert "stored twice" in found.warnings[0]


@pytest.mark.parametrize(
    "wrong",
    [{"tensor_parallel_size": 0}, {"num_kv_blocks": 0}, {"memory_bytes": 0}, {"dtype": "int3"}, {"quantize": "int3"}],
)
def test_a_senseless_wish_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Wish(**wrong)
