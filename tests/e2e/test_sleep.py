"""`stepwire admin sleep` and `wake` on a server: its worker's memory goes and comes back, and answers are equal."""

from pathlib import Path

import pytest

from stepwire.client import ModelState
from tests.support.processes import run, wait_serving
from tests.support.stack import processes_of, serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

KEY = "an-admin-key-of-some-length"
PROMPT = list(range(60, 100))


def worker_bytes(mark: str) -> int:
    """What the worker's process occupies."""
    (pid,) = (pid for pid, command in processes_of(mark).items() if " worker" in command)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@pytest.mark.parametrize("native_kernels", ["--native-kernels", "--no-native-kernels"])
def test_memory_goes_and_answers_stay(tmp_path: Path, native_kernels: str) -> None:
    model = make_tiny_llama(
        tmp_path / "m", hidden_size=1024, intermediate_size=4096, max_position_count=256, dtype="float32"
    )
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    flags = ["--admin-key", KEY, native_kernels, "--sleep-running", "preempt"]
    with serve(model, tmp_path, *tiny_limits(256, 64), *flags) as server, server.client() as client:
        options = ("--target", server.target, "--admin-key", KEY)
        asked = {"max_tokens": 20, "seed": 4, "n": 3, "ignore_eos": True}
        before = client.complete(PROMPT, **asked)  # type: ignore[arg-type]
        held = worker_bytes(server.mark)
        assert run("admin", "sleep", *options).returncode == 0
        assert client.get_model().state is ModelState.SLEEPING
        assert run("admin", "sleep", "--drop-weights", *options).returncode == 0
        assert held - worker_bytes(server.mark) > 0.9 * weight_bytes
        wait_serving(server.target, server.process, server.log_path)
        done = run("admin", "wake", *options)
        assert done.returncode == 0, done.stderr
        after = client.complete(PROMPT, **asked)  # type: ignore[arg-type]
        assert [one.token_ids for one in after.sequences] == [one.token_ids for one in before.sequences]
        assert after.usage.num_cached_tokens == 0
        # Woken, it may run, be preempted by a sleep in the middle, and go on.
        with client.generate(PROMPT, max_tokens=200, seed=5, ignore_eos=True) as stream:
            events = [next(stream) for _ in range(3)]
            assert run("admin", "sleep", *options).returncode == 0
            assert run("admin", "wake", *options).returncode == 0
            events += stream
        whole = [token for event in events for token in getattr(event, "token_ids", ())]
        assert tuple(whole) == client.complete(PROMPT, max_tokens=200, seed=5, ignore_eos=True).token_ids
        server.wait_idle()
        assert "Traceback" not in server.output
