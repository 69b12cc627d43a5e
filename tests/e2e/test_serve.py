"""`stepwire serve` on a tiny model, and the commands that talk to it."""

import json
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
    answers = [_token_ids(run(*arguments).stdout) for _ in range(2)]
    assert answers[0]
    assert answers[0] == answers[1]


def _token_ids(lines: str) -> list[int]:
    """All tokens; how many of them one event holds depends on how quick its reader is."""
    events = map(json.loads, lines.splitlines())
    return [token_id for event in events if event["event"] == "output" for token_id in event["token_ids"]]


def test_the_scheduler_has_no_torch_and_the_worker_has(tiny_stack: ServeStack) -> None:
    loaded = {name: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for name, pid in tiny_stack.pids.items()}
    assert loaded == {"scheduler": False, "worker": True}


def test_keys_are_on_no_command_line(tiny_stack: ServeStack) -> None:
    for pid in tiny_stack.pids.values():
        assert b"cluster-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_logs_of_a_start_name_one_trace_even_when_none_is_collected(tiny_stack: ServeStack) -> None:
    (worker_log,) = (tiny_stack.log_path.parent / "logs").glob("worker-0.*.log")
    trace_ids = [_trace_id(path, "model_loaded") for path in (tiny_stack.log_path, worker_log)]
    assert trace_ids[0] == trace_ids[1]


def _trace_id(log_path: Path, message: str) -> str:
    records = [json.loads(line) for line in log_path.read_text().splitlines() if line.startswith("{")]
    (record,) = (record for record in records if record["message"] == message)
    return str(record["trace_id"])
