"""Tenants and priorities over real gRPC: who shares what with whom, and who may go first."""

import asyncio

import pytest

from scheduler_service.engine.tenants import TenantRules
from stepwire.client import AsyncClient, Finished, Started
from stepwire.rpc.errors import StepwireError
from tests.support.scheduler_server import RunningScheduler, running_scheduler, until

PROMPT = [10 + i for i in range(40)]


async def cached_tokens(scheduler: RunningScheduler, tenant: str | None, **fields: int) -> int:
    """Prompt tokens that one request of a tenant found in the prefix cache."""
    async with AsyncClient(scheduler.address, tenant=tenant) as client:
        async for event in client.generate(PROMPT, max_tokens=2, **fields):  # type: ignore[arg-type]
            if isinstance(event, Finished):
                return event.usage.num_cached_tokens
    raise AssertionError("the stream had no end")


async def test_a_tenant_finds_its_own_prefixes_and_nobody_elses() -> None:
    async with running_scheduler() as scheduler:
        assert await cached_tokens(scheduler, "a") == 0
        assert await cached_tokens(scheduler, "a") == 32
        assert await cached_tokens(scheduler, "b") == 0
        assert await cached_tokens(scheduler, None) == 0


async def test_a_priority_above_what_the_tenant_may_ask_for_is_refused() -> None:
    rules = TenantRules(max_priorities={"gold": 5}, max_priority=0)
    async with running_scheduler(tenants=rules) as scheduler:
        assert await cached_tokens(scheduler, "gold", priority=5) == 0
        with pytest.raises(StepwireError) as caught:
            await cached_tokens(scheduler, "other", priority=1)
        assert caught.value.reason == "FIELD_OUT_OF_RANGE"
        assert caught.value.metadata["field"] == "priority"


async def test_a_request_of_higher_priority_takes_the_place_of_a_running_one() -> None:
    async with running_scheduler(max_sequences=1) as scheduler, AsyncClient(scheduler.address) as client:
        scheduler.worker.step_delay_s = 0.01
        ends: list[str] = []

        async def complete(name: str, priority: int, max_tokens: int) -> None:
            async for event in client.generate(PROMPT, max_tokens=max_tokens, priority=priority, ignore_eos=True):
                if isinstance(event, Started):
                    ends.append(f"{name} accepted")
            ends.append(f"{name} ended")

        low = asyncio.create_task(complete("low", 0, 100))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        await complete("high", 1, 5)
        await low
        assert ends == ["low accepted", "high accepted", "high ended", "low ended"]
        assert scheduler.free_blocks() == scheduler.engine.model_info().num_blocks
