import os
import pty
import signal
import subprocess
import sys
from typing import Any

from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2


def turns(request: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in request.messages.messages]


def test_a_piped_conversation_keeps_its_history(command: Any) -> None:
    done = command("chat", "--system", "Be brief.", stdin="Hi\n\nAnd?\n")
    assert (done.exit_code, done.stdout) == (0, "Paris.\nParis.\n")
    first, second = command.service.requests
    assert turns(first) == [("system", "Be brief."), ("user", "Hi")]
    assert turns(second) == [*turns(first), ("assistant", "Paris."), ("user", "And?")]


def test_reset_forgets_and_exit_leaves(command: Any) -> None:
    command("chat", stdin="Hi\n/reset\nAgain\n/exit\nNever\n")
    assert [turns(request) for request in command.service.requests] == [[("user", "Hi")], [("user", "Again")]]


def test_an_unknown_command_gets_help_and_is_not_sent(command: Any) -> None:
    done = command("chat", stdin="/what\n")
    assert "/exit" in done.stderr
    assert command.service.requests == []


def test_a_refused_turn_is_told_and_forgotten(command: Any) -> None:
    command.service.error = StepwireError("PROMPT_TOO_LONG", "the prompt is too long")
    done = command("chat", stdin="Hi\n")
    assert (done.exit_code, done.stderr) == (0, "Error: the prompt is too long\n")


def test_an_answer_that_was_cut_is_told_and_kept(command: Any) -> None:
    command.service.finish_reason = inference_pb2.FINISH_REASON_LENGTH
    done = command("chat", stdin="Hi\nAnd?\n")
    assert (done.stdout, done.stderr.count("[the answer ended after 512 tokens")) == ("Paris.\nParis.\n", 2)
    assert [request.sampling.max_tokens for request in command.service.requests] == [512, 512]
    assert turns(command.service.requests[1])[1] == ("assistant", "Paris.")


def test_nobody_there_is_told_before_the_first_line(command: Any) -> None:
    command.target = "127.0.0.1:1"
    done = command("chat", stdin="Hi\n")
    assert done.exit_code == 1
    assert "nobody listens on 127.0.0.1:1" in done.stderr


def test_ctrl_c_cancels_the_answer_and_keeps_what_came(command: Any) -> None:
    command.service.hang_after = 1
    arguments = [sys.executable, "-m", "stepwire.cli.main", "chat", "--target", command.target]
    ours, theirs = pty.openpty()
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        _read_until(ours, b"> ")
        os.write(ours, b"Hi\n")
        _read_until(ours, b"Par")
        process.send_signal(signal.SIGINT)
        _read_until(ours, b"[cancelled]")
        command.service.hang_after = None
        os.write(ours, b"And?\n")
        _read_until(ours, b"Paris.")
        os.write(ours, b"/exit\n")
        _drain(ours)
        assert process.wait(30) == 0
    assert turns(command.service.requests[1]) == [("user", "Hi"), ("assistant", "Par"), ("user", "And?")]


def _read_until(handle: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        seen += os.read(handle, 1024)


def _drain(handle: int) -> None:
    """Reads until the other side has closed the terminal, which Linux tells by an error."""
    try:
        while os.read(handle, 1024):
            pass
    except OSError:
        os.close(handle)
