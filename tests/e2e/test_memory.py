"""Memory from settings to a server that serves, or says why it does not."""

from pathlib import Path

import pytest

from stepwire.client import Client
from stepwire.rpc.errors import StepwireError
from tests.support.processes import run
from tests.support.stack import serve
from tests.support.tiny_checkpoint import make_tiny_llama


def test_a_context_is_fitted_and_said_to_whoever_asks(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    flags = ["--num-kv-blocks=8", "--block-size=16", "--fit-max-model-len", "--max-num-batched-tokens=64"]
    with serve(model, tmp_path / "logs", *flags) as server:
        assert server.model().max_model_len == 128
        assert "max_model_len_fitted" in server.output
        with Client(server.target) as client:
            assert client.complete([5] * 120, max_tokens=8, ignore_eos=True).usage.num_output_tokens == 8
            with pytest.raises(StepwireError, match="128"):
                client.complete([5] * 128, max_tokens=8)
        said = server.worker_log_path.read_text()
    # One line each for the plan from headers, for the load and for what is left to run with.
    assert [said.count(event) for event in ("memory_reserved", "model_loaded", "memory_measured")] == [1, 1, 1]


def test_weights_beyond_a_hard_limit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    done = run("serve", f"--model={model}", "--port=0", f"--log-dir={tmp_path}", "--memory-limit-bytes=100KiB")
    assert done.returncode == 1
    line = next(line for line in done.stderr.splitlines() if "the weights of" in line and not line.startswith("{"))
    assert "this process may use 0.1 MiB of cpu; raise memory_fraction or memory_limit_bytes" in line
