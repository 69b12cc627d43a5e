"""Bad input: each costs its caller one clear error with the right status, and nobody else anything."""

import asyncio
import gc
import math
from typing import Any

import grpc
import pytest

from scheduler_service.engine.values import GenerateInput
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason
from tests.support.scheduler_server import RunningScheduler, running_scheduler, tokens_of, until


def ids(*values: int) -> pb.TokenIds:
    return pb.TokenIds(ids=values)


def drafts(most: int) -> pb.Speculation:
    return pb.Speculation(max_draft_tokens=most)


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**fields)


HUGE = 2**31 - 1

BAD = [
    ("prompt missing", {}, "FIELD_INVALID", "prompt"),
    ("text empty", {"text": ""}, "PROMPT_EMPTY", "text"),
    ("ids empty", {"token_ids": ids()}, "PROMPT_EMPTY", "token_ids"),
    ("messages empty", {"messages": pb.ChatMessages()}, "PROMPT_EMPTY", "messages"),
    ("role empty", {"messages": pb.ChatMessages(messages=[pb.ChatMessage()])}, "FIELD_OUT_OF_RANGE", "role"),
    ("id negative", {"token_ids": ids(1, -1)}, "TOKEN_ID_OUT_OF_VOCABULARY", "token_ids"),
    ("id too large", {"token_ids": ids(320)}, "TOKEN_ID_OUT_OF_VOCABULARY", "token_ids"),
    ("id huge", {"token_ids": ids(HUGE)}, "TOKEN_ID_OUT_OF_VOCABULARY", "token_ids"),
    ("prompt too long", {"token_ids": ids(*[5] * 512)}, "PROMPT_TOO_LONG", None),
    (
        "prompt and output too long",
        {"token_ids": ids(*[5] * 500), "sampling": sampling(max_tokens=13)},
        "PROMPT_TOO_LONG",
        None,
    ),
    ("text absurdly long", {"text": "x" * (2 << 20)}, "PROMPT_TOO_LONG", "text"),
    ("model unknown", {"text": "x", "model": "other"}, "MODEL_NOT_FOUND", None),
    ("drafts many", {"text": "x", "speculation": drafts(17)}, "FIELD_OUT_OF_RANGE", "max_draft_tokens"),
    ("drafts negative", {"text": "x", "speculation": drafts(-HUGE)}, "FIELD_OUT_OF_RANGE", "max_draft_tokens"),
    ("interval of none", {"text": "x", "stream_interval": 0}, "FIELD_OUT_OF_RANGE", "stream_interval"),
    ("interval large", {"text": "x", "stream_interval": 513}, "FIELD_OUT_OF_RANGE", "stream_interval"),
    ("interval negative", {"text": "x", "stream_interval": -HUGE}, "FIELD_OUT_OF_RANGE", "stream_interval"),
    ("request_id long", {"text": "x", "request_id": "r" * 129}, "FIELD_OUT_OF_RANGE", "request_id"),
    ("request_id odd", {"text": "x", "request_id": "a b"}, "FIELD_INVALID", "request_id"),
    ("request_id not ascii", {"text": "x", "request_id": "é"}, "FIELD_INVALID", "request_id"),
    ("typical_p zero", {"text": "x", "sampling": sampling(typical_p=0.0)}, "FIELD_OUT_OF_RANGE", "typical_p"),
    ("typical_p nan", {"text": "x", "sampling": sampling(typical_p=math.nan)}, "FIELD_OUT_OF_RANGE", "typical_p"),
    ("best_of below n", {"text": "x", "sampling": sampling(n=3, best_of=2)}, "FIELD_OUT_OF_RANGE", "best_of"),
    ("best_of large", {"text": "x", "sampling": sampling(best_of=65)}, "FIELD_OUT_OF_RANGE", "best_of"),
    ("best_of negative", {"text": "x", "sampling": sampling(best_of=-HUGE)}, "FIELD_OUT_OF_RANGE", "best_of"),
    ("held back", {"text": "x", "sampling": sampling(best_of=64, logprobs=0)}, "FIELD_OUT_OF_RANGE", "best_of"),
    (
        "prompt_logprobs",
        {"text": "x", "sampling": sampling(prompt_logprobs=21)},
        "FIELD_OUT_OF_RANGE",
        "prompt_logprobs",
    ),
    ("bias nan", {"text": "x", "sampling": sampling(logit_bias={5: math.nan})}, "FIELD_OUT_OF_RANGE", "logit_bias"),
    ("bias large", {"text": "x", "sampling": sampling(logit_bias={5: 101.0})}, "FIELD_OUT_OF_RANGE", "logit_bias"),
    (
        "bias of no token",
        {"text": "x", "sampling": sampling(logit_bias={320: 1.0})},
        "TOKEN_ID_OUT_OF_VOCABULARY",
        "logit_bias",
    ),
    (
        "too many biases",
        {"text": "x", "sampling": sampling(logit_bias=dict.fromkeys(range(1025), 1.0))},
        "FIELD_OUT_OF_RANGE",
        "logit_bias",
    ),
    (
        "allowed no token",
        {"text": "x", "sampling": sampling(allowed_token_ids=[-1])},
        "TOKEN_ID_OUT_OF_VOCABULARY",
        "allowed_token_ids",
    ),
    (
        "allowed and banned alike",
        {"text": "x", "sampling": sampling(allowed_token_ids=[5, 6], banned_token_ids=[6, 5, 5])},
        "FIELD_INVALID",
        "allowed_token_ids",
    ),
    (
        "allowed only what min_tokens holds back",
        {"text": "x", "sampling": sampling(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)},
        "FIELD_INVALID",
        "allowed_token_ids",
    ),
    (
        "all banned",
        {"text": "x", "sampling": sampling(banned_token_ids=range(320))},
        "FIELD_INVALID",
        "banned_token_ids",
    ),
    (
        "too many banned",
        {"text": "x", "sampling": sampling(banned_token_ids=[5] * 16385)},
        "FIELD_OUT_OF_RANGE",
        "banned_token_ids",
    ),
    ("min over max", {"text": "x", "sampling": sampling(min_tokens=5, max_tokens=4)}, "FIELD_INVALID", "min_tokens"),
    ("min over context", {"text": "x", "sampling": sampling(min_tokens=512)}, "FIELD_INVALID", "min_tokens"),
    (
        "stop id",
        {"text": "x", "sampling": sampling(stop_token_ids=[320])},
        "TOKEN_ID_OUT_OF_VOCABULARY",
        "stop_token_ids",
    ),
    (
        "stop id negative",
        {"text": "x", "sampling": sampling(stop_token_ids=[-1])},
        "TOKEN_ID_OUT_OF_VOCABULARY",
        "stop_token_ids",
    ),
    (
        "stop ids many",
        {"text": "x", "sampling": sampling(stop_token_ids=[1] * 129)},
        "FIELD_OUT_OF_RANGE",
        "stop_token_ids",
    ),
    ("stops many", {"text": "x", "sampling": sampling(stop=["s"] * 17)}, "FIELD_OUT_OF_RANGE", "stop"),
    ("stop empty", {"text": "x", "sampling": sampling(stop=[""])}, "FIELD_OUT_OF_RANGE", "stop"),
    ("stop long", {"text": "x", "sampling": sampling(stop=["s" * 1025])}, "FIELD_OUT_OF_RANGE", "stop"),
] + [
    (f"{name}={value}", {"text": "x", "sampling": sampling(**{name: value})}, "FIELD_OUT_OF_RANGE", name)
    for name, values in {
        "max_tokens": (0, -1),
        "min_tokens": (-1,),
        "temperature": (-0.1, 100.5, math.nan, math.inf, -math.inf),
        "top_k": (-1,),
        "top_p": (0.0, -0.1, 1.1, math.nan, math.inf),
        "min_p": (-0.1, 1.1, math.nan),
        "repetition_penalty": (0.0, -1.0, 1e-45, 0.0009, 101.0, math.nan, math.inf),
        "presence_penalty": (-2.1, 2.1, math.nan),
        "frequency_penalty": (-2.1, 2.1, math.inf),
        "n": (0, -1, 65, HUGE),
        "logprobs": (-1, 21, HUGE),
    }.items()
    for value in values
]

CODES = {
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
}


async def test_every_bad_field_is_one_clear_error_and_running_requests_go_on() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.step_delay_s = 0.002
        running = asyncio.create_task(scheduler.generate(text="x", sampling=sampling(max_tokens=300)))
        for name, fields, reason, field in BAD:
            error = await scheduler.error_of(**fields)
            assert error.reason == reason, name
            assert error.code is CODES.get(reason, grpc.StatusCode.INVALID_ARGUMENT), name
            assert field is None or error.metadata["field"] == field, name
            assert len(error.message) > 10, name
        assert len(tokens_of(await running)) == 300
        await until(lambda: not scheduler.worker.sequences)
        assert scheduler.free_blocks() == scheduler.engine.model_info().num_blocks


async def test_max_tokens_at_its_largest_is_refused_by_the_context() -> None:
    async with running_scheduler() as scheduler:
        error = await scheduler.error_of(text="x", sampling=sampling(max_tokens=HUGE))
        assert error.reason == "PROMPT_TOO_LONG"
        assert error.metadata == {"prompt_tokens": "1", "max_model_len": "512", "max_tokens": str(HUGE)}


async def test_max_tokens_left_out_takes_what_the_context_leaves() -> None:
    async with running_scheduler(max_model_len=64) as scheduler:
        responses = await scheduler.generate(token_ids=ids(*[5] * 60), sampling=sampling(ignore_eos=True))
        assert len(tokens_of(responses)) == 4


async def test_a_request_id_is_taken_until_its_last_token_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_scheduler() as scheduler:
        pipeline: Any = next(iter(scheduler.engine.replicas)).loop._pipeline
        submit, held = pipeline.submit, []
        monkeypatch.setattr(pipeline, "submit", held.append)
        first = asyncio.create_task(scheduler.generate(text="x", request_id="same", sampling=sampling(max_tokens=1)))
        await until(lambda: bool(held) and scheduler.engine.model_info().num_running == 0)
        assert (await scheduler.error_of(text="x", request_id="same")).reason == "REQUEST_ALREADY_EXISTS"
        monkeypatch.setattr(pipeline, "submit", submit)
        for work in held:
            submit(work)
        assert len(tokens_of(await first)) == 1


async def test_a_request_id_is_taken_as_long_as_its_request_lives() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.gate.clear()
        first = asyncio.create_task(scheduler.generate(text="x", request_id="same", sampling=sampling(max_tokens=3)))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        error = await scheduler.error_of(text="x", request_id="same")
        assert (error.reason, error.code) == ("REQUEST_ALREADY_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
        scheduler.worker.gate.set()
        assert len(tokens_of(await first)) == 3
        assert (
            len(tokens_of(await scheduler.generate(text="x", request_id="same", sampling=sampling(max_tokens=3)))) == 3
        )


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async with running_scheduler(max_sequences=1, max_queued_requests=2) as scheduler:
        scheduler.worker.gate.clear()
        one = sampling(max_tokens=2)
        tasks = [asyncio.create_task(scheduler.generate(text="x", sampling=one))]
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        tasks += [asyncio.create_task(scheduler.generate(text="x", sampling=one)) for _ in range(2)]
        await until(lambda: scheduler.engine.model_info().num_waiting == 2)
        error = await scheduler.error_of(text="x")
        assert (error.reason, error.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.retry_after_s is not None and error.retry_after_s > 0
        scheduler.worker.gate.set()
        assert [len(tokens_of(responses)) for responses in await asyncio.gather(*tasks)] == [2, 2, 2]


async def test_an_empty_queue_takes_more_sequences_than_may_wait() -> None:
    async with running_scheduler(max_queued_requests=2) as scheduler:
        responses = await scheduler.generate(text="x", sampling=sampling(max_tokens=2, n=3))
        assert [len(tokens_of(responses, index)) for index in range(3)] == [2, 2, 2]


async def test_a_deadline_is_honoured_while_waiting_and_while_running() -> None:
    async with running_scheduler(max_sequences=1) as scheduler:
        scheduler.worker.step_delay_s = 0.01
        running = asyncio.create_task(scheduler.error_of(timeout=1.0, text="x", sampling=sampling(max_tokens=400)))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        waiting = asyncio.create_task(scheduler.error_of(timeout=0.3, text="x"))
        for error in await asyncio.gather(waiting, running):
            assert (error.reason, error.code) == ("DEADLINE_EXCEEDED", grpc.StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: scheduler.engine.model_info().num_running == 0)
        await until(lambda: not scheduler.worker.sequences)
        assert sum(len(step.new_sequences) for step in scheduler.worker.steps) == 1
        assert scheduler.free_blocks() == scheduler.engine.model_info().num_blocks


TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "never ends": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
    "fills the memory": ("{{ ('x' * 3000000000) | length }}", "memory"),
    "too long": ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
    "leaves the sandbox": ("{{ ().__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "is broken": ("{% if %}", "Expected"),
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_bad_template_costs_one_request_one_error(name: str) -> None:
    template, text = TEMPLATES[name]
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    async with running_scheduler(chat_template=template) as scheduler:
        scheduler.worker.step_delay_s = 0.002
        running = asyncio.create_task(scheduler.generate(text="x", sampling=sampling(max_tokens=100)))
        error = await scheduler.error_of(messages=messages)
        assert (error.reason, error.code) == ("CHAT_TEMPLATE_FAILED", grpc.StatusCode.INVALID_ARGUMENT)
        assert text in error.message
        assert len(tokens_of(await running)) == 100


async def test_messages_without_a_template_are_refused() -> None:
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    async with running_scheduler(chat_template=None) as scheduler:
        error = await scheduler.error_of(messages=messages)
        assert (error.reason, error.code) == ("CHAT_TEMPLATE_MISSING", grpc.StatusCode.FAILED_PRECONDITION)


async def test_unary_calls_refuse_bad_input_too() -> None:
    async with running_scheduler() as scheduler:
        stub = scheduler.stub
        calls = [
            (stub.Tokenize(pb.TokenizeRequest(), timeout=5), "FIELD_INVALID"),
            (stub.Tokenize(pb.TokenizeRequest(text="x", model="other"), timeout=5), "MODEL_NOT_FOUND"),
            (stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1]), timeout=5), "TOKEN_ID_OUT_OF_VOCABULARY"),
            (stub.Detokenize(pb.DetokenizeRequest(token_ids=[320]), timeout=5), "TOKEN_ID_OUT_OF_VOCABULARY"),
            (stub.GetModel(pb.GetModelRequest(model="other"), timeout=5), "MODEL_NOT_FOUND"),
        ]
        for call, reason in calls:
            assert (await _error_of(call)).reason == reason


async def test_more_ids_than_a_context_holds_are_not_detokenized() -> None:
    async with running_scheduler(max_model_len=64) as scheduler:
        stub = scheduler.stub
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[70] * 64), timeout=5)).text
        error = await _error_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[70] * 65), timeout=5))
        assert (error.reason, error.metadata["field"]) == ("FIELD_OUT_OF_RANGE", "token_ids")
        assert error.metadata["allowed"] == "at most 64 entries"


async def test_a_message_beyond_grpcs_limit_is_not_taken_for_a_full_queue() -> None:
    async with running_scheduler() as scheduler:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(scheduler.address, options=options) as channel:
            call = channel.unary_stream("/stepwire.v1.InferenceService/Generate")(bytes(65 << 20), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        error = from_rpc_error(caught.value)
        assert (error.reason, error.retry_after_s) == ("FIELD_OUT_OF_RANGE", None)
        assert "larger than max" in error.message


async def test_messages_beyond_the_most_are_refused() -> None:
    async with running_scheduler() as scheduler:
        messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 4097)
        error = await scheduler.error_of(messages=messages)
        assert (error.reason, error.metadata["field"]) == ("FIELD_OUT_OF_RANGE", "messages")


@pytest.mark.parametrize("fields", [{"model": "other"}, {"request_id": "a b"}, {"sampling": {"n": 65}}])
async def test_a_refused_request_leaves_nothing_behind(fields: dict[str, Any]) -> None:
    async with running_scheduler() as scheduler:
        gc.collect()
        gc.disable()
        try:
            await scheduler.error_of(text="x", **fields)
            await asyncio.sleep(0.05)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kept = [found for found in gc.garbage if isinstance(found, GenerateInput | StepwireError)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not kept


async def test_broken_utf8_is_refused() -> None:
    async with running_scheduler() as scheduler:
        broken = b"\x12\x02\xff\xfe"  # field 2 (text), two bytes that are no UTF-8
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            call = channel.unary_stream("/stepwire.v1.InferenceService/Generate")(broken, timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        error = from_rpc_error(caught.value)
        assert (error.reason, error.code) == ("FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
        assert "UTF-8" in error.message
        assert len(tokens_of(await scheduler.generate(text="x", sampling=sampling(max_tokens=3)))) == 3


async def test_a_sequence_that_fails_on_the_worker_ends_its_request_alone() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.sequence_failures["bad"] = "made to fail"
        good = asyncio.create_task(scheduler.generate(text="x", sampling=sampling(max_tokens=50)))
        error = await scheduler.error_of(text="y", request_id="bad", sampling=sampling(n=3))
        assert (error.reason, error.code) == ("SEQUENCE_FAILED", grpc.StatusCode.INTERNAL)
        assert "made to fail" in error.message
        assert error.metadata["request_id"] == "bad"
        assert len(tokens_of(await good)) == 50
        await until(lambda: not scheduler.worker.sequences)


async def test_a_sequence_that_fails_by_what_its_request_asks_for_is_the_callers_error() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.sequence_failures["bad"] = "its grammar leaves no token"
        scheduler.worker.failure_reason = ErrorReason.ERROR_REASON_GRAMMAR_INVALID
        error = await scheduler.error_of(text="y", request_id="bad", sampling=sampling(n=2))
        assert (error.reason, error.code) == ("GRAMMAR_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
        assert "leaves no token" in error.message and "worker" not in error.message


async def test_before_the_workers_are_ready_calls_are_refused_and_models_are_listed() -> None:
    async with running_scheduler() as scheduler:
        _unbegin(scheduler)
        error = await scheduler.error_of(text="x")
        assert (error.reason, error.code) == ("MODEL_NOT_READY", grpc.StatusCode.UNAVAILABLE)
        assert error.retry_after_s is not None
        (model,) = (await scheduler.stub.ListModels(pb.ListModelsRequest(), timeout=5)).models
        assert model.state == pb.MODEL_STATE_STARTING


def _unbegin(scheduler: RunningScheduler) -> None:
    from scheduler_service.engine.engine import EngineState

    scheduler.engine._state = EngineState.STARTING


async def _error_of(call: Any) -> StepwireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)
