"""Messages of InferenceService to values and back."""

import pytest

from scheduler_service.core.request import FinishReason
from scheduler_service.engine.values import Finished, Output, SamplingInput, StructuredOutput, TextPrompt, TokenPrompt
from scheduler_service.rpc.convert import generate_input, generate_response, prompt_of
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb


def test_what_the_client_left_out_stays_unsaid() -> None:
    call = generate_input(pb.GenerateRequest(text="x"), None, "")
    lists = ("stop", "stop_token_ids", "allowed_token_ids", "banned_token_ids")
    assert call.sampling == SamplingInput(logit_bias={}, **{name: [] for name in lists})
    assert (call.prompt, call.deadline_s) == (TextPrompt("x"), None)


def test_zeros_that_the_client_said_are_kept() -> None:
    fields = pb.SamplingParams.DESCRIPTOR.fields
    names = [field.name for field in fields if field.has_presence and field.message_type is None]
    sampling = pb.SamplingParams(**dict.fromkeys(names, 0))  # type: ignore[arg-type]
    given = generate_input(pb.GenerateRequest(text="x", sampling=sampling), 2.5, "").sampling
    assert {name: getattr(given, name) for name in names} == dict.fromkeys(names, 0)
    assert len(names) >= 14


def test_prompts_are_told_apart_even_when_empty() -> None:
    assert prompt_of(pb.GenerateRequest()) is None
    assert prompt_of(pb.GenerateRequest(text="")) == TextPrompt("")
    assert prompt_of(pb.GenerateRequest(token_ids=pb.TokenIds())) == TokenPrompt([])


def test_lists_are_not_copied_before_anybody_has_seen_their_length() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]), sampling=pb.SamplingParams(stop=["a"], stop_token_ids=[3])
    )
    call = generate_input(request, None, "")
    assert isinstance(call.prompt, TokenPrompt)
    for passed_on in (call.prompt.token_ids, call.sampling.stop, call.sampling.stop_token_ids):
        assert not isinstance(passed_on, list | tuple)
    assert (list(call.prompt.token_ids), list(call.sampling.stop), list(call.sampling.stop_token_ids)) == (
        [1, 2],
        ["a"],
        [3],
    )


def test_a_form_of_output_is_one_of_five() -> None:
    def form_of(**form: object) -> StructuredOutput | None:
        message = pb.StructuredOutput(**form)  # type: ignore[arg-type]
        sampling = pb.SamplingParams(structured_output=message)
        return generate_input(pb.GenerateRequest(text="x", sampling=sampling), None, "").sampling.structured_output

    assert form_of(json_schema="{}") == StructuredOutput("json_schema", "{}")
    assert form_of(regex="") == StructuredOutput("regex")
    assert form_of(grammar="g") == StructuredOutput("grammar", "g")
    assert form_of(json_object=pb.JsonObject()) == StructuredOutput("json_object")
    choices = form_of(choices=pb.Choices(choices=["a"]))
    assert choices is not None and list(choices.choices) == ["a"]
    with pytest.raises(StepwireError, match="says no form"):
        form_of()


def test_an_output_says_what_ended_it() -> None:
    by_string = generate_response(Output(1, 3, [7], "t", [], FinishReason.STOP, stop="x")).output
    assert (by_string.WhichOneof("matched_stop"), by_string.finish_reason) == ("stop", pb.FINISH_REASON_STOP)
    by_token = generate_response(Output(0, 0, [0], "", [], FinishReason.STOP, stop_token_id=0)).output
    assert (by_token.WhichOneof("matched_stop"), by_token.stop_token_id) == ("stop_token_id", 0)
    going_on = generate_response(Output(0, 0, [7], "t")).output
    assert going_on.finish_reason == pb.FINISH_REASON_UNSPECIFIED


def test_the_last_message_has_usage_and_queue_time() -> None:
    finished = generate_response(Finished(1, 2, 3, 1.5)).finished
    assert finished.usage == pb.Usage(prompt_token_count=1, output_token_count=2, cached_token_count=3)
    assert finished.queue_duration.ToTimedelta().total_seconds() == 1.5
