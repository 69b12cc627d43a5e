"""Structured output over real gRPC, with a fake worker that checks what it is told."""

import asyncio
import json

import grpc
import pytest

from stepwire.grammars import grammar_key
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import RunningScheduler, running_scheduler, tokens_of, until


def asking(form: pb.StructuredOutput, **sampling: object) -> dict[str, object]:
    params = pb.SamplingParams(**{"max_tokens": 4, "structured_output": form, **sampling})  # type: ignore[arg-type]
    return {"token_ids": pb.TokenIds(ids=[10, 11]), "sampling": params}


def regex(text: str) -> pb.StructuredOutput:
    return pb.StructuredOutput(regex=text)


async def test_a_sequence_is_planned_once_all_workers_have_its_grammar() -> None:
    async with running_scheduler() as scheduler:
        worker = scheduler.worker
        worker.grammar_gate.clear()
        request = asyncio.create_task(scheduler.generate(**asking(regex("[a-z]+"), n=2)))
        await until(lambda: "PrepareGrammar" in worker.calls)
        assert len(tokens_of(await scheduler.generate(token_ids=pb.TokenIds(ids=[3]), **params(4)))) == 4
        assert not any(new.grammar_key for step in worker.steps for new in step.new_sequences)
        worker.grammar_gate.set()
        assert len(tokens_of(await request, 1)) == 4
        ((key, prepared),) = worker.grammars.items()
        assert key == grammar_key(prepared.grammar) and list(prepared.live_grammar_keys) == [key]
        keys = [new.grammar_key for step in worker.steps for new in step.new_sequences]
        assert keys == [b"", key, key]


def params(max_tokens: int) -> dict[str, object]:
    return {"sampling": pb.SamplingParams(max_tokens=max_tokens)}


async def test_a_grammar_is_released_with_its_last_request() -> None:
    async with running_scheduler() as scheduler:
        grammars = next(iter(scheduler.engine.replicas)).grammars
        assert grammars is not None
        for _ in range(3):
            await scheduler.generate(**asking(regex("a+")))
            assert grammars.num_live == 0
        assert scheduler.worker.calls.count("PrepareGrammar") == 3
        scheduler.worker.gate.clear()
        call = scheduler.stub.Generate(pb.GenerateRequest(**asking(regex("a+"))), timeout=20)  # type: ignore[arg-type]
        assert (await call.read()).HasField("started")
        assert grammars.num_live == 1
        call.cancel()
        scheduler.worker.gate.set()
        await until(lambda: grammars.num_live == 0)


async def test_a_call_that_ends_while_its_grammar_compiles_leaves_nothing() -> None:
    async with running_scheduler() as scheduler:
        grammars = next(iter(scheduler.engine.replicas)).grammars
        assert grammars is not None
        scheduler.worker.grammar_gate.clear()
        call = scheduler.stub.Generate(pb.GenerateRequest(**asking(regex("b+"))), timeout=20)  # type: ignore[arg-type]
        await until(lambda: "PrepareGrammar" in scheduler.worker.calls)
        call.cancel()
        await until(lambda: grammars.num_live == 0 and scheduler.engine.num_calls == 0)
        scheduler.worker.grammar_gate.set()
        assert len(tokens_of(await scheduler.generate(**asking(regex("b+"))))) == 4


@pytest.mark.parametrize(
    ("form", "reason", "metadata"),
    [
        (pb.StructuredOutput(), "FIELD_INVALID", {"field": "structured_output"}),
        (regex(""), "FIELD_INVALID", {"field": "regex"}),
        (regex("[a"), "GRAMMAR_INVALID", {"field": "regex"}),
        (
            pb.StructuredOutput(json_schema='{"properties": {"a": {"not": {}}}}'),
            "GRAMMAR_INVALID",
            {"field": "json_schema", "place": "#/properties/a"},
        ),
        (pb.StructuredOutput(json_schema="x" * 10_000_000), "FIELD_OUT_OF_RANGE", {"field": "json_schema"}),
        (pb.StructuredOutput(choices=pb.Choices(choices=["a"] * 5000)), "FIELD_OUT_OF_RANGE", {"field": "choices"}),
        (pb.StructuredOutput(grammar='start: "a" nobody'), "GRAMMAR_INVALID", {"field": "grammar"}),
    ],
)
async def test_refusals_are_the_callers_and_name_the_place(
    form: pb.StructuredOutput, reason: str, metadata: dict[str, str]
) -> None:
    async with running_scheduler() as scheduler:
        error = await scheduler.error_of(**asking(form))
        assert (error.reason, error.code) == (reason, grpc.StatusCode.INVALID_ARGUMENT)
        assert metadata.items() <= dict(error.metadata).items()
        assert "PrepareGrammar" not in scheduler.worker.calls


async def test_a_form_contradicts_output_without_end() -> None:
    async with running_scheduler() as scheduler:
        error = await scheduler.error_of(**asking(regex("a"), ignore_eos=True))
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "ignore_eos")


async def test_what_a_worker_says_of_a_grammar_is_the_callers_error() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.failures["PrepareGrammar"] = StepwireError("GRAMMARS_FULL", "full", retry_after_s=1.0)
        error = await scheduler.error_of(**asking(regex("a+")))
        assert (error.reason, error.code) == ("GRAMMARS_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        del scheduler.worker.failures["PrepareGrammar"]
        await scheduler.generate(**asking(regex("a+")))


async def test_a_hostile_form_harms_no_neighbour() -> None:
    nested: object = {"type": "string"}
    for _ in range(7):
        nested = {"type": "object", "properties": dict.fromkeys("abcd", nested)}
    hostile = [
        pb.StructuredOutput(json_schema=json.dumps(nested)),
        pb.StructuredOutput(json_schema='{"not":' * 5000 + "{}" + "}" * 5000),
        pb.StructuredOutput(json_schema=json.dumps({"enum": [f"value {i}" for i in range(12_000)]})),
        regex("(" * 5000 + "a" + ")" * 5000),
        regex("((a{1,1000}){1,1000}){1,1000}"),
        pb.StructuredOutput(grammar='start: "' + "a" * 200_000 + '"'),
        pb.StructuredOutput(grammar='start: s\ns: s s | s s s | "a" | ""'),
        pb.StructuredOutput(json_schema='{"$ref": "#"}'),
    ]
    async with running_scheduler(grammar_timeout_s=0.5, max_model_len=512) as scheduler:
        expected = await neighbour(scheduler)
        watched = asyncio.create_task(neighbour(scheduler))
        errors = await asyncio.gather(*(ended(scheduler, form) for form in hostile))
        assert await watched == expected
        assert {error.code for error in errors if error is not None} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert sum(error is not None for error in errors) >= 5
        assert scheduler.engine.is_healthy
        await until(lambda: scheduler.engine.model_info().num_running == 0)


async def neighbour(scheduler: RunningScheduler) -> list[int]:
    return tokens_of(
        await scheduler.generate(
            token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingParams(max_tokens=300, seed=5)
        )
    )


async def ended(scheduler: RunningScheduler, form: pb.StructuredOutput) -> StepwireError | None:
    try:
        await scheduler.generate(**asking(form))
    except StepwireError as error:
        return error
    return None
