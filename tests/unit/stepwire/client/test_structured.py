"""The form of output, as clients say it."""

from typing import Any

import pytest

from stepwire.client import SamplingParams
from stepwire.client._convert import generate_request
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, None),
        ({"json_schema": {"type": "object"}}, pb.StructuredOutput(json_schema='{"type": "object"}')),
        ({"json_schema": '{"type":"object"}'}, pb.StructuredOutput(json_schema='{"type":"object"}')),
        ({"json_schema": {}}, pb.StructuredOutput(json_schema="{}")),
        ({"json_schema": False}, pb.StructuredOutput(json_schema="false")),
        ({"json_schema": True}, pb.StructuredOutput(json_schema="true")),
        ({"json_object": True}, pb.StructuredOutput(json_object=pb.JsonObject())),
        ({"regex": ""}, pb.StructuredOutput(regex="")),
        ({"choices": ["a", "b"]}, pb.StructuredOutput(choices=pb.Choices(choices=["a", "b"]))),
        ({"choices": []}, pb.StructuredOutput(choices=pb.Choices())),
        ({"grammar": "start: a"}, pb.StructuredOutput(grammar="start: a")),
    ],
)
def test_forms_become_messages(given: Any, sent: pb.StructuredOutput | None) -> None:
    sampling = generate_request("x", SamplingParams(**given), {}).sampling
    assert (sampling.structured_output if sampling.HasField("structured_output") else None) == sent


def test_output_has_one_form() -> None:
    with pytest.raises(StepwireError, match="one form, not 2: json_object, regex") as caught:
        generate_request("x", SamplingParams(regex="a", json_object=True), {})
    assert caught.value.reason == "FIELD_INVALID"
    with pytest.raises(TypeError):
        generate_request("x", SamplingParams(choices="ab"), {})
    with pytest.raises(TypeError):
        generate_request("x", SamplingParams(json_schema={"enum": [object()]}), {})
    with pytest.raises(StepwireError, match="regex is not text"):
        generate_request("x", SamplingParams(regex="\ud800"), {})
