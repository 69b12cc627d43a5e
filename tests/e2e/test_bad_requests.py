"""Requests that cannot be served: each gets one clear error, and a stream that runs beside them notices nothing."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stepwire.client import Client, Output
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.stack import Server, serve, tiny_limits
from tests.support.tiny_checkpoint import CHAT_TEMPLATE, make_tiny_llama

VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NAN, INF = float("nan"), float("inf")
GENERATE = "/stepwire.v1.InferenceService/Generate"
LONG_STREAM: dict[str, Any] = {"temperature": 1.0, "seed": 42, "max_tokens": 1500, "ignore_eos": True}

# What the checkpoint's author did wrong shows only for some messages.
TEMPLATE = (
    "{% if messages[0]['content'] == 'raise' %}{{ raise_exception('these messages are not liked') }}{% endif %}"
    "{% if messages[0]['content'] == 'undefined' %}{{ nothing.at.all }}{% endif %}"
    "{% if messages[0]['content'] == 'endless' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0]['content'] == 'huge' %}"
    "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endif %}"
) + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bad")
    model = make_tiny_llama(folder / "tiny", max_position_count=MAX_MODEL_LEN, chat_template=TEMPLATE)
    with serve(model, folder, *tiny_limits(MAX_MODEL_LEN, 512)) as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.output
        assert "Traceback" not in server.worker_log_path.read_text()


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as channel:
        yield channel


class Neighbour:
    """A long stream that begins anew when it ends, in a thread of its own. All its rounds must be equal."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self._rounds: list[list[int]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[list[int]]:
        """The tokens of every round; the last one was cut off."""
        self._stop.set()
        self._thread.join(30)
        assert self._error is None
        return self._rounds

    def wait_for_progress(self, within_s: float = 20.0) -> None:
        """Waits for its next tokens. Raises AssertionError when it has failed."""
        with self._progress:
            before = self._num_tokens
            assert self._progress.wait_for(lambda: self._error or self._num_tokens > before, within_s)
            assert self._error is None

    @property
    def _num_tokens(self) -> int:
        return sum(map(len, self._rounds))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._rounds.append([])
                with self._client.generate("neighbour", **LONG_STREAM) as stream:
                    self._follow(stream)
        except Exception as error:
            with self._progress:
                self._error = error
                self._progress.notify_all()

    def _follow(self, stream: Any) -> None:
        for event in stream:
            if self._stop.is_set():
                return
            if isinstance(event, Output):
                with self._progress:
                    self._rounds[-1].extend(event.token_ids)
                    self._progress.notify_all()


@pytest.fixture(scope="module")
def _neighbour(server: Server) -> Iterator[Neighbour]:
    with server.client() as client:
        undisturbed = list(client.complete("neighbour", **LONG_STREAM).token_ids)
        neighbour = Neighbour(client)
        neighbour.start()
        neighbour.wait_for_progress()
        try:
            yield neighbour
        finally:
            rounds = neighbour.stop()
    assert all(tokens == undisturbed[: len(tokens)] for tokens in rounds)
    assert all(len(tokens) == len(undisturbed) for tokens in rounds[:-1])


@pytest.fixture(autouse=True)
def _goes_on(_neighbour: Neighbour) -> Iterator[None]:
    """The stream beside goes on after every test."""
    yield
    _neighbour.wait_for_progress()


def error_of(channel: grpc.Channel, request: pb.GenerateRequest | bytes, timeout: float = 60) -> StepwireError:
    """The error that a call ends with, which must be its only answer."""
    call = channel.unary_stream(
        GENERATE,
        request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        response_deserializer=pb.GenerateResponse.FromString,
    )
    responses = []
    try:
        responses.extend(call(request, timeout=timeout))
    except grpc.RpcError as raised:
        error = from_rpc_error(raised)
        assert raised.code() is error.code
        assert "Traceback" not in error.message
        assert not responses
        return error
    raise AssertionError(f"the call did not fail: {responses[-1]}")


def with_sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(**{"max_tokens": 4, **fields}))


BAD_FLOATS = {
    "temperature": (-1.0, -1e-30, 100.5, 3.4e38, NAN, INF, -INF),
    "top_p": (0.0, -0.5, 1.01, 3.4e38, NAN, INF, -INF),
    "min_p": (-0.01, 1.01, -3.4e38, NAN, INF, -INF),
    "repetition_penalty": (0.0, -1.0, 1e-38, 100.5, 3.4e38, NAN, INF, -INF),
    "presence_penalty": (-2.01, 2.01, 3.4e38, NAN, INF, -INF),
    "frequency_penalty": (-2.01, 2.01, -3.4e38, NAN, INF, -INF),
    "typical_p": (0.0, -0.5, 1.01, 3.4e38, NAN, INF, -INF),
}
BAD_INTEGERS = {
    "max_tokens": (0, -1, INT32_MIN),
    "min_tokens": (-1, INT32_MIN),
    "top_k": (-1, INT32_MIN),
    "n": (0, -1, 65, INT32_MAX, INT32_MIN),
    "logprobs": (-1, 21, INT32_MAX, INT32_MIN),
    "best_of": (0, -1, 65, INT32_MAX, INT32_MIN),
    "prompt_logprobs": (-1, 21, INT32_MAX, INT32_MIN),
}
BAD_LISTS = {
    "stop": ([""], ["x" * 1025], ["x"] * 17),
    "stop_token_ids": ([1] * 129,),
    "logit_bias": ({1: 100.5}, {1: -100.5}, {1: NAN}, {1: INF}, dict.fromkeys(range(1025), 1.0)),
    "allowed_token_ids": ([1] * 16385,),
    "banned_token_ids": ([1] * 16385,),
}
# Every value of these types has a meaning.
UNBOUNDED = {"seed", "ignore_eos"}
# tests/contract/test_inference_structured.py tries what is no form of output.
ELSEWHERE = {"structured_output"}
BAD_VALUES = [
    (field, value) for table in (BAD_FLOATS, BAD_INTEGERS, BAD_LISTS) for field in table for value in table[field]
]


def test_every_sampling_field_is_tried() -> None:
    tried = {*BAD_FLOATS, *BAD_INTEGERS, *BAD_LISTS, *UNBOUNDED, *ELSEWHERE}
    assert tried == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda value: str(value)[:24])
def test_a_sampling_field_out_of_range(channel: grpc.Channel, field: str, value: Any) -> None:
    error = error_of(channel, with_sampling(**{field: value}))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE")
    assert error.metadata["field"] == field
    assert field in error.message


def test_extremes_that_are_allowed_are_served(server: Server) -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 100.0, "seed": 2**64 - 1},
        {"temperature": 1e-38, "seed": 0},
        {"top_k": INT32_MAX, "top_p": 1e-38, "min_p": 1.0},
        {"repetition_penalty": 0.001},
        {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"n": 64, "logprobs": 20},
        {"n": 2, "prompt_logprobs": 20, "best_of": 64},
        {"stop_token_ids": [VOCAB_SIZE - 1] * 128, "min_tokens": 4},
        {"typical_p": 1e-38, "logit_bias": {0: 100.0, VOCAB_SIZE - 1: -100.0}},
        {"allowed_token_ids": [VOCAB_SIZE - 1] * 16384, "n": 64},
        {"banned_token_ids": list(range(VOCAB_SIZE - 1)), "temperature": 0.0},
        {"stop": ["\U0001f469" * 1024] * 16, "min_tokens": 4},
    ]
    with server.client() as client:
        for fields in extremes:
            completion = client.complete("abc", max_tokens=4, ignore_eos=True, priority=100, **fields)
            assert len(completion.sequences) == fields.get("n", 1)
            assert {len(sequence.token_ids) for sequence in completion.sequences} == {4}, fields
            assert all(0 <= i < VOCAB_SIZE for sequence in completion.sequences for i in sequence.token_ids)


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"min_tokens": INT32_MAX}, "FIELD_INVALID", "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "FIELD_INVALID", "min_tokens"),
        ({"max_tokens": INT32_MAX}, "PROMPT_TOO_LONG", "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "PROMPT_TOO_LONG", "max_tokens"),
        ({"stop_token_ids": [-1]}, "TOKEN_ID_OUT_OF_VOCABULARY", "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "TOKEN_ID_OUT_OF_VOCABULARY", "logit_bias"),
        ({"allowed_token_ids": [INT32_MAX]}, "TOKEN_ID_OUT_OF_VOCABULARY", "allowed_token_ids"),
        ({"banned_token_ids": [VOCAB_SIZE]}, "TOKEN_ID_OUT_OF_VOCABULARY", "banned_token_ids"),
        ({"banned_token_ids": list(range(VOCAB_SIZE))}, "FIELD_INVALID", "banned_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "TOKEN_ID_OUT_OF_VOCABULARY", "stop_token_ids"),
        ({"stop_token_ids": [INT32_MIN]}, "TOKEN_ID_OUT_OF_VOCABULARY", "stop_token_ids"),
    ],
)
def test_a_sampling_field_that_does_not_fit(
    channel: grpc.Channel, fields: dict[str, Any], reason: str, named: str
) -> None:
    error = error_of(channel, with_sampling(**fields))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert named in error.message


def messages(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({}, "FIELD_INVALID"),
        ({"text": ""}, "PROMPT_EMPTY"),
        ({"token_ids": pb.TokenIds()}, "PROMPT_EMPTY"),
        ({"messages": pb.ChatMessages()}, "PROMPT_EMPTY"),
        ({"token_ids": pb.TokenIds(ids=[3, VOCAB_SIZE])}, "TOKEN_ID_OUT_OF_VOCABULARY"),
        ({"token_ids": pb.TokenIds(ids=[3, -1])}, "TOKEN_ID_OUT_OF_VOCABULARY"),
        ({"token_ids": pb.TokenIds(ids=[INT32_MAX])}, "TOKEN_ID_OUT_OF_VOCABULARY"),
        ({"token_ids": pb.TokenIds(ids=[INT32_MIN])}, "TOKEN_ID_OUT_OF_VOCABULARY"),
        ({"token_ids": pb.TokenIds(ids=[3] * MAX_MODEL_LEN)}, "PROMPT_TOO_LONG"),
        ({"text": "q" * MAX_MODEL_LEN}, "PROMPT_TOO_LONG"),
        ({"text": "q" * (2 << 20)}, "PROMPT_TOO_LONG"),
        ({"messages": messages(("user", "q" * MAX_MODEL_LEN))}, "PROMPT_TOO_LONG"),
        ({"messages": messages(("", "hello"))}, "FIELD_OUT_OF_RANGE"),
        ({"text": "abc", "priority": INT32_MIN}, "FIELD_OUT_OF_RANGE"),
        ({"text": "abc", "priority": INT32_MAX}, "FIELD_OUT_OF_RANGE"),
        ({"text": "abc", "request_id": "x" * 129}, "FIELD_OUT_OF_RANGE"),
        ({"text": "abc", "request_id": "a b"}, "FIELD_INVALID"),
        ({"text": "abc", "request_id": "\n{}"}, "FIELD_INVALID"),
    ],
)
def test_a_prompt_or_id_that_cannot_be_served(
    channel: grpc.Channel, request_fields: dict[str, Any], reason: str
) -> None:
    error = error_of(channel, pb.GenerateRequest(**request_fields))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


def test_an_unknown_model_is_not_found(channel: grpc.Channel) -> None:
    error = error_of(channel, pb.GenerateRequest(text="abc", model="gpt-\u00e4"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert error.metadata["served"] == "tiny"


def test_an_id_that_lives_already_exists(server: Server, channel: grpc.Channel) -> None:
    with server.client() as client, client.generate("abc", max_tokens=1500, ignore_eos=True, request_id="twin") as twin:
        next(twin)
        error = error_of(channel, pb.GenerateRequest(text="abc", request_id="twin"))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ALREADY_EXISTS")
        assert isinstance(next(twin), Output)


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field on the wire; its number and length below 16 and 128."""
    return bytes([number << 3 | 2, len(data)]) + data


TEXT, MESSAGES, MODEL, REQUEST_ID, STOP = 2, 4, 1, 6, 11


@pytest.mark.parametrize(
    "data",
    [
        field(TEXT, b"\xff\xfe\xfd"),
        field(TEXT, b"half a character \xe2\x82"),
        field(TEXT, b"a lone surrogate \xed\xa0\x80"),
        field(TEXT, b"abc") + field(MODEL, b"\xc3\x28"),
        field(TEXT, b"abc") + field(REQUEST_ID, b"\x80"),
        field(TEXT, b"abc") + field(5, field(STOP, b"\xed\xbf\xbf")),
        field(MESSAGES, field(1, field(1, b"user") + field(2, b"\xf0\x28\x8c\x28"))),
        b"\x12\x7fshorter than it says",
        b"\xff" * 32,
    ],
)
def test_bytes_that_are_no_message(channel: grpc.Channel, data: bytes) -> None:
    error = error_of(channel, data)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("raise", "these messages are not liked"),
        ("undefined", "nothing"),
        ("endless", "ran longer than"),
        ("huge", "characters"),
    ],
)
def test_a_template_that_fails(channel: grpc.Channel, content: str, cause: str) -> None:
    error = error_of(channel, pb.GenerateRequest(messages=messages(("user", content))))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE_FAILED")
    assert cause in error.message


def test_the_next_chat_is_served_after_a_template_failed(server: Server) -> None:
    with server.client() as client, pytest.raises(StepwireError, match="not liked"):
        client.complete([{"role": "user", "content": "raise"}])
    with server.client() as client:
        assert (
            len(client.complete([{"role": "user", "content": "hello"}], max_tokens=2, ignore_eos=True).token_ids) == 2
        )


def test_a_message_that_is_too_large(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="q" * (65 << 20)), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("token_ids", [[-1], [VOCAB_SIZE], [INT32_MIN], [INT32_MAX]])
def test_ids_that_cannot_be_detokenized(server: Server, token_ids: list[int]) -> None:
    with server.client() as client, pytest.raises(StepwireError) as caught:
        client.detokenize(token_ids)
    assert caught.value.reason == "TOKEN_ID_OUT_OF_VOCABULARY"


def test_a_client_that_asks_for_text_no_message_can_carry(server: Server) -> None:
    with server.client() as client, pytest.raises(StepwireError) as caught:
        client.complete("\ud800")
    assert caught.value.reason == "FIELD_INVALID"
