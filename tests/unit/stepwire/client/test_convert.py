from typing import Any

import pytest

from stepwire.client import FinishReason, Message, Output, PositionLogprobs, SamplingParams, TokenLogprob
from stepwire.client._calls import in_whole
from stepwire.client._convert import event, generate_request, tokenize
from stepwire.client._structured import FIELDS
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import common_pb2
from stepwire.v1 import inference_pb2 as pb


def test_what_is_not_given_is_absent() -> None:
    assert generate_request("", None, {}) == pb.GenerateRequest(text="", sampling=pb.SamplingParams())
    assert generate_request("", None, {}).WhichOneof("prompt") == "text"


def test_every_sampling_field_travels() -> None:
    wire = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {"structured_output"}
    assert wire == set(SamplingParams.__dataclass_fields__) - set(FIELDS)
    lists = {"stop": ["x"], "stop_token_ids": [1], "allowed_token_ids": [1], "banned_token_ids": [1]}
    values: dict[str, Any] = {name: 1 for name in wire} | lists | {"ignore_eos": True, "logit_bias": {1: 0.5}}
    sent = generate_request("x", SamplingParams(**values), {}).sampling
    assert {field.name for field, _ in sent.ListFields()} == wire


def test_zeros_are_sent() -> None:
    sampling = generate_request("x", SamplingParams(temperature=0, seed=0, logprobs=0), {}).sampling
    assert all(sampling.HasField(name) for name in ("temperature", "seed", "logprobs"))


def test_drafts_are_asked_for_where_a_number_is_given() -> None:
    assert not generate_request("x", None, {}).HasField("speculation")
    assert not generate_request("x", None, {"max_draft_tokens": None}).HasField("speculation")
    for num in (0, 5):
        sent = generate_request("x", None, {"max_draft_tokens": num}).speculation
        assert sent.HasField("max_draft_tokens") and sent.max_draft_tokens == num
    with pytest.raises(StepwireError, match="max_draft_tokens"):
        generate_request("x", None, {"max_draft_tokens": 2**40})


def test_messages_of_several_tokens_are_asked_for_where_a_number_is_given() -> None:
    assert not generate_request("x", None, {}).HasField("stream_interval")
    assert not generate_request("x", None, {"stream_interval": None}).HasField("stream_interval")
    assert generate_request("x", None, {"stream_interval": 8}).stream_interval == 8
    with pytest.raises(StepwireError, match="stream_interval"):
        generate_request("x", None, {"stream_interval": 2**40})


def test_whole_answers_come_in_large_messages_unless_the_caller_says_otherwise() -> None:
    assert generate_request("x", None, in_whole({"timeout": 1})).stream_interval == 512
    assert generate_request("x", None, in_whole({"stream_interval": 4})).stream_interval == 4


def test_keywords_win_over_sampling() -> None:
    request = generate_request("x", SamplingParams(temperature=1.0, top_k=3), {"temperature": 0.5, "timeout": 1})
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", pb.GenerateRequest(text="text")),
        ([], pb.GenerateRequest(token_ids=pb.TokenIds())),
        ((1, 2), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        (range(2), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 1]))),
    ],
)
def test_prompts(prompt: Any, expected: pb.GenerateRequest) -> None:
    expected.sampling.SetInParent()
    assert generate_request(prompt, None, {}) == expected


def test_messages_of_both_forms() -> None:
    turns = pb.ChatMessages(messages=[pb.ChatMessage(role="system", content="a"), pb.ChatMessage(role="user")])
    mixed: Any = [Message("system", "a"), {"role": "user", "content": ""}]
    assert generate_request(mixed, None, {}).messages == turns
    assert tokenize(mixed, "m").request == pb.TokenizeRequest(model="m", messages=turns)


@pytest.mark.parametrize("prompt", [b"bytes", {"role": "user", "content": "x"}, [{"role": "user"}], [1.5], ["a"]])
def test_what_is_no_prompt_is_a_type_error(prompt: Any) -> None:
    with pytest.raises(TypeError):
        generate_request(prompt, None, {})


@pytest.mark.parametrize(
    ("keywords", "field", "reason"),
    [
        ({"max_tokens": 2**31}, "max_tokens", "FIELD_OUT_OF_RANGE"),
        ({"seed": -1}, "seed", "FIELD_OUT_OF_RANGE"),
        ({"priority": -(2**31) - 1}, "priority", "FIELD_OUT_OF_RANGE"),
        ({"stop": ["\ud800"]}, "stop", "FIELD_INVALID"),
        ({"request_id": "\udfff"}, "request_id", "FIELD_INVALID"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids", "FIELD_OUT_OF_RANGE"),
    ],
)
def test_what_no_message_can_carry_is_named(keywords: Any, field: str, reason: str) -> None:
    with pytest.raises(StepwireError, match=field) as caught:
        generate_request("x", None, keywords)
    assert (caught.value.reason, caught.value.metadata) == (reason, {"field": field})


@pytest.mark.parametrize("keywords", [{"temperature": "hot"}, {"stop": "a"}, {"tempature": 1}, {"max_tokens": 1.5}])
def test_wrong_types_are_type_errors(keywords: Any) -> None:
    with pytest.raises(TypeError):
        generate_request("x", None, keywords)


def test_an_output_with_everything() -> None:
    entry = common_pb2.PositionLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=4, logprob=-0.5),
        top=[common_pb2.TokenLogprob(token_id=5, logprob=-0.25)],
    )
    message = pb.GenerateOutput(
        sequence_index=1, position=7, token_ids=[4, 5], text="é", logprobs=[entry], finish_reason=1, stop=""
    )
    found = event(pb.GenerateResponse(output=message))
    logprobs = (PositionLogprobs(TokenLogprob(4, -0.5), (TokenLogprob(5, -0.25),)),)
    assert found == Output(1, 7, (4, 5), "é", logprobs, FinishReason.STOP, "", None)
    assert isinstance(found, Output) and list(found.positions) == [7, 8]


def test_what_a_newer_service_adds_is_tolerated() -> None:
    newer = pb.GenerateResponse(output=pb.GenerateOutput())
    newer.output.finish_reason = 99  # type: ignore[assignment]
    found = event(newer)
    assert isinstance(found, Output) and found.finish_reason is FinishReason.UNKNOWN
    assert event(pb.GenerateResponse()) is None
