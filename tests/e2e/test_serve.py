"""`stepwire serve` on a tiny model, and the commands that talk to it."""

from pathlib import Path

from tests.support.processes import ServeStack, run


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
