"""Adapters over real gRPC, from the admin's door to a fake worker: loaded, chosen, replaced and taken away while
requests run."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from scheduler_service.rpc.admin.roots import Roots
from stepwire.client.admin_types import Adapter
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry.spans import SpanRecorder
from stepwire.v1 import inference_pb2 as pb
from tests.support.fake_worker import expected_tokens
from tests.support.scheduler_server import ADMIN_KEY, RunningScheduler, running_scheduler, tokens_of, until
from tests.support.spans import Kept

PROMPT = list(range(60, 100))


def fingerprint(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class Operator:
    """A scheduler with its admin client, and requests of eight greedy tokens."""

    def __init__(self, scheduler: RunningScheduler) -> None:
        self.scheduler = scheduler
        self.worker = scheduler.worker
        self.worker.adapter_contents |= {f"/adapters/{name}": name for name in "abc"}

    async def load(self, name: str, path: str = "") -> Adapter:
        return await self.scheduler.operate(
            lambda client: client.load_adapter(name, path or f"/adapters/{name}", timeout=10)
        )

    async def unload(self, name: str, *, wait: bool = False) -> None:
        await self.scheduler.operate(lambda client: client.unload_adapter(name, wait=wait, timeout=10))

    async def adapters(self) -> tuple[Adapter, ...]:
        return await self.scheduler.operate(lambda client: client.list_adapters())

    async def error_of(self, call: Any) -> StepwireError:
        with pytest.raises(StepwireError) as caught:
            await call
        return caught.value

    def request(self, adapter: str = "", max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        sampling = pb.SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
        return {"token_ids": pb.TokenIds(ids=PROMPT), "adapter": adapter, "sampling": sampling, **fields}

    async def generate(self, adapter: str = "", **fields: Any) -> list[pb.GenerateResponse]:
        return await self.scheduler.generate(**self.request(adapter, **fields))

    def expected(self, content: str | None, num: int = 8) -> list[int]:
        adapter = "" if content is None else fingerprint(content)
        return expected_tokens(PROMPT, num, self.worker.choices, seed=3, adapter=adapter)


def cached(responses: list[pb.GenerateResponse]) -> int:
    return responses[-1].finished.usage.cached_token_count


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    async with running_scheduler(admin_key=ADMIN_KEY) as scheduler:
        yield Operator(scheduler)


async def test_requests_choose_their_adapter(operator: Operator) -> None:
    loaded = await operator.load("a")
    assert (loaded.name, loaded.fingerprint, loaded.rank, loaded.num_bytes) == ("a", fingerprint("a"), 4, 100)
    await operator.load("b")
    answers = await asyncio.gather(*(operator.generate(name) for name in ("", "a", "b", "a")))
    expected = [operator.expected(content) for content in (None, "a", "b", "a")]
    assert [tokens_of(answer) for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [(adapter.name, adapter.num_requests) for adapter in await operator.adapters()] == [("a", 0), ("b", 0)]


async def test_an_unknown_adapter_is_not_found_and_the_loaded_ones_are_named(operator: Operator) -> None:
    error = await operator.scheduler.error_of(**operator.request("x"))
    assert (error.reason, error.message) == ("ADAPTER_NOT_FOUND", "no adapter 'x' is loaded; none is")
    for name in "ba":
        await operator.load(name)
    error = await operator.scheduler.error_of(**operator.request("x" * 1000))
    assert (error.code.name, error.metadata["loaded"]) == ("NOT_FOUND", "a, b")
    assert len(error.metadata["adapter"]) == 128
    error = await operator.error_of(operator.unload("x"))
    assert error.reason == "ADAPTER_NOT_FOUND"


async def test_a_load_leaves_a_stream_alone(operator: Operator) -> None:
    operator.worker.step_delay_s = 0.002
    stream = asyncio.create_task(operator.generate(max_tokens=100))
    await until(lambda: operator.worker.last_step_id > 3)
    operator.worker.adapter_gate.clear()
    loading = asyncio.create_task(operator.load("a"))
    await until(lambda: "AddAdapter" in operator.worker.calls)
    step_id = operator.worker.last_step_id
    await until(lambda: operator.worker.last_step_id > step_id + 5)
    error = await operator.scheduler.error_of(**operator.request("a"))
    assert error.reason == "ADAPTER_NOT_FOUND"
    operator.worker.adapter_gate.set()
    await loading
    assert tokens_of(await operator.generate("a")) == operator.expected("a")
    assert tokens_of(await stream) == operator.expected(None, 100)


async def test_one_with_users_is_kept_or_waited_for(operator: Operator) -> None:
    await operator.load("a")
    operator.worker.gate.clear()
    running = asyncio.create_task(operator.generate("a", max_tokens=20))
    await until(lambda: operator.scheduler.engine.model_info().num_running == 1)
    error = await operator.error_of(operator.unload("a"))
    assert (error.reason, error.code.name, error.metadata["requests"]) == ("ADAPTER_IN_USE", "FAILED_PRECONDITION", "1")
    leaving = asyncio.create_task(operator.unload("a", wait=True))
    await until(lambda: operator.scheduler.engine.adapters.infos()[0].is_leaving)
    assert (await operator.scheduler.error_of(**operator.request("a"))).reason == "ADAPTER_NOT_FOUND"
    assert operator.worker.adapters and not leaving.done()
    operator.worker.gate.set()
    assert tokens_of(await running) == operator.expected("a", 20)
    await leaving
    assert not operator.worker.adapters
    assert await operator.adapters() == ()


async def test_an_unload_goes_on_when_its_caller_leaves(operator: Operator) -> None:
    await operator.load("a")
    operator.worker.gate.clear()
    call = operator.scheduler.stub.Generate(pb.GenerateRequest(**operator.request("a")))
    await until(lambda: operator.scheduler.engine.model_info().num_running == 1)
    error = await operator.error_of(
        operator.scheduler.operate(lambda client: client.unload_adapter("a", wait=True, timeout=0.5))
    )
    assert error.reason == "DEADLINE_EXCEEDED"
    call.cancel()
    operator.worker.gate.set()
    await until(lambda: not operator.worker.adapters)


async def test_a_name_with_other_content_shares_no_blocks(operator: Operator) -> None:
    await operator.load("it", "/adapters/a")
    assert cached(await operator.generate("it")) == 0
    assert cached(await operator.generate("it")) == 32
    operator.worker.gate.clear()
    running = asyncio.create_task(operator.generate("it", max_tokens=20))
    await until(lambda: operator.scheduler.engine.model_info().num_running == 1)
    await operator.load("it", "/adapters/b")
    operator.worker.gate.set()
    fresh = await operator.generate("it")
    assert (tokens_of(fresh), cached(fresh)) == (operator.expected("b"), 0)
    assert tokens_of(await running) == operator.expected("a", 20)
    # The old content is gone with its last request, and comes back under any name with the blocks it had.
    await until(lambda: set(operator.worker.adapters) == {fingerprint("b")})
    await operator.load("other", "/adapters/a")
    again = await operator.generate("other")
    assert (tokens_of(again), cached(again)) == (operator.expected("a"), 32)
    assert cached(await operator.generate()) == 0


async def test_content_that_two_names_have_stays_for_the_other(operator: Operator) -> None:
    operator.worker.adapter_contents["/adapters/copy"] = "a"
    await operator.load("a")
    await operator.load("copy")
    assert (await operator.load("a")).fingerprint == fingerprint("a")
    await operator.unload("a")
    assert tokens_of(await operator.generate("copy")) == operator.expected("a")


async def test_no_more_adapters_run_at_once_than_workers_have_places_for(operator: Operator) -> None:
    """The fake worker refuses a step with a third."""
    for name in "abc":
        await operator.load(name)
    wanted = ["a", "b", "c", "", "c", "b", "a", "c"]
    answers = await asyncio.gather(
        *(operator.generate(name, priority=number % 3) for number, name in enumerate(wanted))
    )
    assert [tokens_of(answer) for answer in answers] == [operator.expected(name or None) for name in wanted]


async def test_a_preempted_sequence_comes_back_with_its_adapter() -> None:
    async with running_scheduler(admin_key=ADMIN_KEY, num_blocks=12, max_model_len=160) as scheduler:
        operator = Operator(scheduler)
        await operator.load("a")
        answers = await asyncio.gather(*(operator.generate("a", max_tokens=90) for _ in range(4)))
        assert [tokens_of(answer) for answer in answers] == [operator.expected("a", 90)] * 4
        (replica,) = scheduler.engine.replicas
        assert replica.scheduler.stats.num_preemptions > 0


async def test_a_worker_that_comes_back_is_given_the_adapters_again(operator: Operator) -> None:
    for name in "abc":
        await operator.load(name)
    operator.worker.step_delay_s = 0.01
    running = asyncio.create_task(operator.generate("a", max_tokens=60))
    failing = asyncio.create_task(operator.scheduler.error_of(**operator.request("b", max_tokens=60)))
    await until(lambda: operator.scheduler.engine.model_info().num_running == 2)
    await operator.scheduler.worker_server.kill()
    operator.worker.forget()
    operator.worker.adapter_contents["/adapters/b"] = "something else"
    operator.worker.step_delay_s = 0.0
    await operator.scheduler.worker_server.start()
    assert tokens_of(await running) == operator.expected("a", 60)
    # Nobody else fails for one whose files are others now.
    assert (await failing).reason == "SEQUENCE_FAILED"
    assert [adapter.name for adapter in await operator.adapters()] == ["a", "c"]
    assert set(operator.worker.adapters) == {fingerprint("a"), fingerprint("c")}


async def test_what_a_worker_refuses_is_not_loaded(operator: Operator) -> None:
    error = await operator.error_of(operator.load("a", "/adapters/missing"))
    assert (error.reason, error.metadata["file"]) == ("CHECKPOINT_NOT_FOUND", "/adapters/missing")
    operator.worker.failures["AddAdapter"] = StepwireError("ADAPTER_UNSUPPORTED", "no adapters here")
    error = await operator.error_of(operator.load("a"))
    assert (error.reason, error.code.name) == ("ADAPTER_UNSUPPORTED", "FAILED_PRECONDITION")
    assert await operator.adapters() == ()


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [
        ("", "/a", "name"),
        ("n" * 129, "/a", "name"),
        ("with space", "/a", "name"),
        ("a,b", "/a", "name"),
        ("a=b", "/a", "name"),
        ("\x1b[31m", "/a", "name"),
        ("a", "", "path"),
        ("a", "relative/path", "path"),
        ("a", "/" + "x" * 4096, "path"),
        ("a", "/nul\0byte", "path"),
        ("a", "http://host/a", "path"),
    ],
)
async def test_names_and_paths_are_bounded(operator: Operator, name: str, path: str, field: str) -> None:
    error = await operator.error_of(
        operator.scheduler.operate(lambda client: client.load_adapter(name, path, timeout=10))
    )
    assert (error.code.name, error.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert "AddAdapter" not in operator.worker.calls


@pytest.mark.parametrize("path", ["/adapters/../etc", "/adapters", "/adaptersx/a", "/other/a", "/adapters/./../b"])
async def test_paths_lie_below_the_roots(path: str) -> None:
    async with running_scheduler(
        admin_key=ADMIN_KEY, adapter_roots=Roots("adapter_roots", ["/adapters/"], "0.0.0.0")
    ) as scheduler:
        operator = Operator(scheduler)
        error = await operator.error_of(operator.load("a", path))
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "path")
        assert (await operator.load("a", "/adapters/./b/../a")).path == "/adapters/a"


def test_off_loopback_nothing_is_allowed_without_roots() -> None:
    with pytest.raises(StepwireError, match="reachable from other machines"):
        Roots("adapter_roots", [], "10.0.0.1").check("/adapters/a")


async def test_the_number_of_adapters_is_bounded() -> None:
    async with running_scheduler(admin_key=ADMIN_KEY, max_adapters=1) as scheduler:
        operator = Operator(scheduler)
        await operator.load("a")
        error = await operator.error_of(operator.load("b"))
        assert (error.reason, error.code.name) == ("ADAPTER_LIMIT", "RESOURCE_EXHAUSTED")
        await operator.load("a", "/adapters/b")


async def test_a_change_is_a_trace_though_no_request_is_sampled() -> None:
    kept = Kept()
    async with running_scheduler(admin_key=ADMIN_KEY, tracer_provider=SpanRecorder(kept, 0.0)) as scheduler:
        operator = Operator(scheduler)
        await operator.load("a")
        await operator.generate("a")
        await operator.adapters()
    (call,) = kept.named("stepwire.v1.AdminService/LoadAdapter")
    add = {span.kind: span for span in kept.named("stepwire.v1.WorkerService/AddAdapter")}
    parents = [call.parent_id, add[SpanKind.CLIENT].parent_id, add[SpanKind.SERVER].parent_id]
    assert parents == [0, call.context.span_id, add[SpanKind.CLIENT].context.span_id]
    assert not kept.named("stepwire.v1.InferenceService/Generate")
    assert not kept.named("stepwire.v1.AdminService/ListAdapters")
