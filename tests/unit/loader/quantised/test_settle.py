"""What becomes of weights, as it is asked for."""

from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.inspection import Wish, inspect_checkpoint
from loader.quantised.schemes import BlockScheme
from loader.quantised.settle import QUANTIZE, Quantize, settle
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_quantised_models import gptq, make_tiny_quantised


def test_a_gguf_is_kept_unless_something_else_is_asked_for(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", quantisation="Q4_1", types={"ffn_up": "F16", "token_embd": "Q8_0"})
    checkpoint = open_checkpoint(path)
    kept, rounding = settle(checkpoint, "auto")
    assert kept.config.quantisation is not None and rounding is None
    assert kept.config.quantisation.method == "gguf"
    schemes = kept.config.quantisation.schemes
    assert schemes["model.layers.1.self_attn.k_proj"] == BlockScheme("Q4_1")
    assert schemes["model.embed_tokens"] == BlockScheme("Q8_0")
    assert "model.layers.0.mlp.up_proj" not in schemes and "model.norm" not in schemes
    assert kept.config.dtype == checkpoint.config.dtype == "bfloat16"
    # It can be settled anew.
    assert settle(kept, "auto") == (kept, None)
    for quantize in QUANTIZE[1:]:
        assert settle(kept, quantize) == (checkpoint, None if quantize == "none" else quantize)


def test_of_unquantised_weights_there_is_nothing_to_keep(tmp_path: Path) -> None:
    for checkpoint in (
        open_checkpoint(make_tiny_llama(tmp_path / "m")),
        open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation="F16")),
    ):
        for quantize in QUANTIZE:
            assert settle(checkpoint, quantize) == (checkpoint, None if quantize in ("auto", "none") else quantize)


@pytest.mark.parametrize(("quantize", "what"), [("none", "made whole"), ("int8", "rounded to int8 too")])
def test_weights_of_other_forms_are_what_they_are(tmp_path: Path, quantize: Quantize, what: str) -> None:
    checkpoint = open_checkpoint(make_tiny_quantised(tmp_path, gptq()))
    assert settle(checkpoint, "auto") == (checkpoint, None)
    with pytest.raises(CheckpointError, match=f"quantised by gptq: its weights cannot be {what}") as caught:
        settle(checkpoint, quantize)
    assert caught.value.code == "unsupported" and "leave out quantize" in caught.value.remedy
    problems = inspect_checkpoint(checkpoint, Wish(quantize=quantize)).problems
    assert "unsupported" in [problem.code for problem in problems]


def test_headers_tell_what_is_held_either_way(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation="Q4_1", tie=True))
    wishes: tuple[Quantize, ...] = ("auto", "none", "int4")
    kept, whole, rounded = (inspect_checkpoint(checkpoint, Wish(quantize=wish)) for wish in wishes)
    assert kept.quantisation is not None and whole.quantisation is None and rounded.quantisation is None
    sizes = [found.ranks[0].weight_bytes for found in (kept, whole, rounded)]
    assert sizes[0] < 0.4 * sizes[1] and sizes[2] < 0.5 * sizes[1]
    # What is kept is held once, also where it is embedding and head.
    assert kept.ranks[0].resident_bytes == kept.ranks[0].weight_bytes
    assert len({found.ranks[0].read_bytes for found in (kept, whole, rounded)}) == 1
