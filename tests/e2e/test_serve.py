"""`stepwire serve` as a whole: real processes, a real worker, a tiny model."""

import os
import signal
import time
from pathlib import Path

import pytest

from stepwire.client import Client, FinishReason, Output, StepwireError
from tests.support.processes import ServeStack, run, serving, wait_gone


def test_the_command_line_gets_an_answer(tiny_stack: ServeStack) -> None:
    done = run(
        "generate", "Once upon a time", "--target", tiny_stack.target, "--max-tokens", "5", "--ignore-eos", "--stats"
    )
    assert (done.returncode, "5 output tokens" in done.stderr) == (0, True), done.stderr
    assert done.stdout.strip("\n") != ""


def test_greedy_answers_are_equal(tiny_stack: ServeStack) -> None:
    arguments = ("generate", "abc", "--target", tiny_stack.target, "--max-tokens", "8", "--temperature", "0", "--json")
    texts = [[line for line in run(*arguments).stdout.splitlines() if '"output"' in line] for _ in range(2)]
    assert texts[0]
    assert texts[0] == texts[1]


def test_the_scheduler_has_no_torch_and_the_worker_has(tiny_stack: ServeStack) -> None:
    loaded = {name: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for name, pid in tiny_stack.pids.items()}
    assert loaded == {"scheduler": False, "worker": True}


def test_keys_are_on_no_command_line(tiny_stack: ServeStack) -> None:
    for pid in tiny_stack.pids.values():
        assert b"cluster-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_sigterm_lets_running_requests_end(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as stack, Client(stack.target) as client:
        pids = list(stack.pids.values())
        outputs = []
        with client.generate("abc", max_tokens=300, ignore_eos=True) as stream:
            for event in stream:
                if isinstance(event, Output):
                    outputs.append(event)
                    if len(outputs) == 1:
                        stack.send(signal.SIGTERM)
        positions = [position for output in outputs for position in output.positions]
        assert positions == list(range(300))
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert stack.process.wait(60) == 0, stack.output
        wait_gone(pids)
        with pytest.raises(StepwireError):
            client.complete("abc", max_tokens=1, timeout=5)


def test_a_second_signal_ends_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as stack, Client(stack.target) as client:
        pids = list(stack.pids.values())
        with client.generate("abc", max_tokens=400, ignore_eos=True) as stream:
            next(stream)
            stack.send(signal.SIGINT)
            _wait_for_output(stack, "SIGINT")
            stack.send(signal.SIGINT)
            assert stack.process.wait(10) == 128 + signal.SIGINT
            wait_gone(pids)
            with pytest.raises(StepwireError):
                list(stream)


def test_a_worker_that_dies_is_named_and_takes_all_with_it(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as stack:
        pids = stack.pids
        _kill(pids["worker"])
        assert stack.process.wait(30) == 1
        wait_gone(list(pids.values()))
        assert "worker 0 was killed by SIGKILL" in stack.output
        assert str(tmp_path / "logs") in stack.output


def test_nothing_is_left_of_a_supervisor_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as stack:
        pids = list(stack.pids.values())
        stack.process.kill()
        stack.process.wait()
        wait_gone(pids)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _wait_for_output(stack: ServeStack, text: str) -> None:
    """The test's own timeout bounds it."""
    while text not in stack.output:
        time.sleep(0.01)
