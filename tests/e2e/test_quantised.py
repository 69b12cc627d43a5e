"""Quantised models through the whole of `stepwire serve`: the tokens are those that the runtime computes by itself."""

from pathlib import Path

import pytest

from loader.quantised.roundings import Rounding
from tests.support.stack import serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_quantised_models import gptq, make_tiny_quantised
from tests.support.tiny_runner import Driver, load_tiny, make_runner, one_thread

PROMPT = [5, 9, 200, 31, 77, 120]
NUM_TOKENS = 8


@pytest.mark.parametrize("rounding", [None, "int4"])
def test_serves_the_tokens_of_the_runtime(tmp_path: Path, rounding: Rounding | None) -> None:
    folder = tmp_path / "model"
    if rounding is None:
        make_tiny_quantised(folder, gptq(act_order=True))
    else:
        make_tiny_llama(folder)
    with one_thread():
        driver = Driver(*make_runner(load_tiny(folder, rounding=rounding)))
        driven = driver.add(1, PROMPT)
        driver.run(NUM_TOKENS)
    flags = tiny_limits(64, 64, "--dtype=float32", f"--quantize={rounding or 'auto'}", "--restart-store=off")
    with serve(folder, tmp_path / "logs", *flags) as server, server.client() as client:
        answer = client.complete(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert list(answer.token_ids) == driven.output
