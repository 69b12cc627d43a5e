"""Structured output of the demo model: parsed, valid, and beside everything else that a request may ask for."""

import asyncio
import json
import re
from collections.abc import Iterator

import grpc
import pytest
from jsonschema import Draft202012Validator

from stepwire.client import AsyncClient, Client, FinishReason, Message, Output, StepwireError
from tests.support.stack import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED = [Message("user", "Describe a person as JSON.")]


@pytest.fixture
def client(demo: Server) -> Iterator[Client]:
    with demo.client() as client:
        yield client


def test_answers_are_valid_json_of_the_schema(client: Client) -> None:
    done = client.complete(ASKED, json_schema=PERSON, max_tokens=200, temperature=1.0, seed=1, n=3, logprobs=1)
    for sequence in done.sequences:
        assert sequence.finish_reason is FinishReason.STOP and sequence.stop_token_id is not None
        Draft202012Validator(PERSON).validate(json.loads(sequence.text))
        assert len(sequence.logprobs) == len(sequence.token_ids)
    assert len({sequence.text for sequence in done.sequences}) == 3
    again = client.complete(ASKED, json_schema=PERSON, max_tokens=200, temperature=1.0, seed=1, n=3)
    assert [one.token_ids for one in again.sequences] == [one.token_ids for one in done.sequences]


def test_the_other_forms(client: Client) -> None:
    question = [Message("user", "Is the sea salty? Answer yes or no.")]
    assert client.complete(question, choices=["yes", "no"], max_tokens=10).text in ("yes", "no")
    phone = client.complete("My number is ", regex=r"[0-9]{3}-[0-9]{4}", max_tokens=20, seed=2).text
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", phone)
    assert client.complete("x", grammar='start: "a" b\nb: /x{3}/', max_tokens=10).text == "axxx"
    cut = client.complete(ASKED, json_object=True, max_tokens=5, seed=3)
    assert cut.finish_reason is FinishReason.LENGTH and cut.text.startswith("{")


def test_a_stop_string_ends_output_of_a_form(client: Client) -> None:
    done = client.complete(ASKED, json_schema=PERSON, max_tokens=200, seed=1, stop=['"age"'])
    assert done.finish_reason is FinishReason.STOP and done.sequences[0].stop == '"age"'
    assert done.text.startswith("{") and '"age"' not in done.text


def test_contradictions_are_the_requests_own_error(client: Client) -> None:
    with pytest.raises(StepwireError, match="leave no token") as caught:
        client.complete(ASKED, choices=["yes"], banned_token_ids=client.get_model().eos_token_ids, max_tokens=10)
    assert (caught.value.reason, caught.value.code) == ("GRAMMAR_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(StepwireError, match="#/properties/a") as caught:
        client.complete(ASKED, json_schema={"properties": {"a": {"not": {}}}}, max_tokens=10)
    assert caught.value.reason == "GRAMMAR_INVALID"


async def test_hostile_forms_harm_no_neighbour(demo: Server) -> None:
    nested: object = {"type": "string"}
    for _ in range(6):
        nested = {"type": "object", "properties": dict.fromkeys("abcd", nested)}
    hostile = (
        {"json_schema": json.dumps(nested)},
        {"json_schema": '{"not":' * 3000 + "{}" + "}" * 3000},
        {"json_schema": {"enum": [f"value {i}" for i in range(12_000)]}},
        {"regex": "([a-z]*[aeiou][a-z]{0,20}){8}"},
        {"regex": "(.*a){12}.{30}"},
        {"grammar": 'start: "' + "a" * 200_000 + '"'},
        {"grammar": 'start: s\ns: s s | s s s | "a" | "b" | ""'},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": "x" * 10_000_000},
    )
    async with AsyncClient(demo.target) as client:
        undisturbed = await story(client)
        watched = asyncio.create_task(story(client))
        await asyncio.gather(*(ended(client, form) for form in hostile))
        assert await watched == undisturbed


async def story(client: AsyncClient) -> list[int]:
    token_ids: list[int] = []
    async with client.generate("Once upon a time", max_tokens=120, seed=7, ignore_eos=True) as stream:
        async for event in stream:
            if isinstance(event, Output):
                token_ids += event.token_ids
    return token_ids


async def ended(client: AsyncClient, form: dict[str, object]) -> None:
    try:
        await client.complete("x", max_tokens=12, seed=1, timeout=60, **form)  # type: ignore[arg-type]
    except StepwireError as error:
        assert error.reason in ("GRAMMAR_INVALID", "GRAMMAR_TOO_COMPLEX", "FIELD_OUT_OF_RANGE")
