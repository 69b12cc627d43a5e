import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwire.cli.sampling_options import DEFAULT_MAX_TOKENS
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2


def test_standard_output_is_the_answer_alone(command: Any) -> None:
    done = command("generate", "The capital of France is")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Paris.\n", "")
    assert command.service.requests[0].text == "The capital of France is"


def test_chat_sends_messages(command: Any) -> None:
    command("generate", "--chat", "Hi")
    command("generate", "--system", "Be brief.", "Hi")
    chat, with_system = command.service.requests
    assert [(turn.role, turn.content) for turn in chat.messages.messages] == [("user", "Hi")]
    assert [turn.role for turn in with_system.messages.messages] == ["system", "user"]


def test_the_tenant_goes_as_metadata(command: Any) -> None:
    command("generate", "x", "--tenant", "blue")
    command("generate", "x")
    blue, nobody = command.service.metadata
    assert (blue["stepwire-tenant"], "stepwire-tenant" in nobody) == ("blue", False)


def test_a_dash_reads_standard_input(command: Any) -> None:
    command("generate", "-", stdin="from a pipe\n")
    assert command.service.requests[0].text == "from a pipe\n"


def test_forms_of_output_reach_the_request(command: Any, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "text.lark").write_text('start: "a"')
    arguments = (
        ("--json-schema", str(tmp_path / "schema.json")),
        ("--json-object",),
        ("--regex", "a+"),
        ("--choice", "yes", "--choice", "no"),
        ("--grammar", str(tmp_path / "text.lark")),
    )
    for flags in arguments:
        assert command("generate", "x", *flags).exit_code == 0
    forms = [request.sampling.structured_output for request in command.service.requests]
    assert [form.WhichOneof("form") for form in forms] == ["json_schema", "json_object", "regex", "choices", "grammar"]
    assert (forms[0].json_schema, forms[2].regex, forms[4].grammar) == ('{"type": "object"}', "a+", 'start: "a"')
    assert list(forms[3].choices.choices) == ["yes", "no"]
    done = command("generate", "x", "--regex", "a", "--json-object")
    assert done.exit_code != 0 and "one form" in done.stderr


def test_every_sampling_flag_reaches_the_request(command: Any) -> None:
    flags = {
        "max-tokens": 9,
        "min-tokens": 1,
        "temperature": 0.5,
        "top-k": 4,
        "top-p": 0.75,
        "min-p": 0.25,
        "seed": 2**64 - 1,
        "repetition-penalty": 1.5,
        "presence-penalty": 0.5,
        "frequency-penalty": -0.5,
        "n": 1,
        "best-of": 3,
        "prompt-logprobs": 2,
        "logprobs": 1,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command("generate", "x", *arguments, "--stop", "a", "--stop", "b", "--stop-token-id", "3", "--ignore-eos")
    sampling = command.service.requests[0].sampling
    for name, value in flags.items():
        assert getattr(sampling, name.replace("-", "_")) == value
    assert (list(sampling.stop), list(sampling.stop_token_ids), sampling.ignore_eos) == (["a", "b"], [3], True)


def test_what_is_not_asked_for_is_not_sent(command: Any) -> None:
    command("generate", "x")
    assert [(field.name, value) for field, value in command.service.requests[0].sampling.ListFields()] == [
        ("max_tokens", DEFAULT_MAX_TOKENS)
    ]


@pytest.mark.parametrize(
    ("flags", "asked", "note"),
    [
        ((), DEFAULT_MAX_TOKENS, "[the answer ended after 512 tokens: --max-tokens allows more, 0 all that fit]\n"),
        (
            ("--min-tokens", "600"),
            600,
            "[the answer ended after 600 tokens: --max-tokens allows more, 0 all that fit]\n",
        ),
        (("--max-tokens", "0"), None, "[the answer ended where the context is full]\n"),
        (("--max-tokens", "9"), 9, ""),
    ],
)
def test_the_length_that_ended_an_answer_is_told_unless_it_was_asked_for(
    command: Any, flags: tuple[str, ...], asked: int | None, note: str
) -> None:
    command.service.finish_reason = inference_pb2.FINISH_REASON_LENGTH
    done = command("generate", "x", *flags)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Paris.\n", note)
    sampling = command.service.requests[0].sampling
    assert (sampling.max_tokens if sampling.HasField("max_tokens") else None) == asked


def test_a_context_that_leaves_less_than_the_default_is_the_bound(command: Any) -> None:
    command.service.room = 100
    done = command("generate", "x", "--json")
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()].count("started") == 1
    assert [request.sampling.HasField("max_tokens") for request in command.service.requests] == [True, False]
    refused = command("generate", "x", "--max-tokens", "101")
    assert (refused.exit_code, refused.stderr) == (1, "Error: more than the context holds (PROMPT_TOO_LONG)\n")
    assert len(command.service.requests) == 3


def test_several_answers_are_printed_whole(command: Any) -> None:
    assert command("generate", "x", "--n", "2").stdout == "[0] Paris.\n[1] Paris.\n"


def test_log_probabilities_go_to_standard_error(command: Any) -> None:
    done = command("generate", "x", "--logprobs", "1")
    assert done.stdout == "Paris.\n"
    assert done.stderr.splitlines()[0] == "[0]     0      100   -0.2500  100:-0.2500"
    assert len(done.stderr.splitlines()) == 3


def test_json_has_every_event(command: Any) -> None:
    done = command("generate", "x", "--json", "--logprobs", "0")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "output", "output", "output", "finished"]
    assert "".join(event["text"] for event in events[1:-1]) == "Paris."
    assert events[1]["logprobs"][0]["sampled"] == {"token_id": 100, "logprob": -0.25}
    assert events[-1]["usage"]["num_prompt_tokens"] == 5


def test_stats_go_to_standard_error(command: Any) -> None:
    done = command("generate", "x", "--stats")
    assert done.stdout == "Paris.\n"
    assert "5 prompt tokens (2 cached), 3 output tokens" in done.stderr


def test_a_refusal_is_one_line_with_its_reason(command: Any) -> None:
    command.service.error = StepwireError("QUEUE_FULL", "the queue is full", retry_after_s=1.0)
    done = command("generate", "x")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "Error: the queue is full (QUEUE_FULL)\n")


def test_nobody_there_says_what_to_do(command: Any) -> None:
    command.target = "127.0.0.1:1"
    done = command("generate", "x")
    assert "nobody listens on 127.0.0.1:1: start `stepwire serve`" in done.stderr
    assert (done.exit_code, done.stdout) == (1, "")


def test_a_wrong_otlp_endpoint_is_named(command: Any) -> None:
    done = command("generate", "x", "--otlp-endpoint", "ftp://x")
    assert "--otlp-endpoint" in done.stderr


def test_a_sampled_traceparent_is_sent(command: Any) -> None:
    command("generate", "x", "--otlp-endpoint", "127.0.0.1:1")
    flags = command.service.metadata[0]["traceparent"].rpartition("-")[2]
    assert int(flags, 16) & 1


@pytest.mark.parametrize("chatty", [["generate", "x"], ["generate", "x", "--json"]])
def test_ctrl_c_cancels_the_request(command: Any, chatty: list[str]) -> None:
    command.service.hang_after = 1
    arguments = [sys.executable, "-m", "stepwire.cli.main", *chatty, "--target", command.target]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The request runs once its first output is here.
        while "Par" not in (read := process.stdout.read(1)) and read != "P" and read:
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert command.service.cancelled.wait(10)


def test_a_timeout_is_told_as_one(command: Any) -> None:
    command.service.hang_after = 0
    done = command("generate", "x", "--timeout", "0.2")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "had not answered when --timeout was over" in done.stderr
