"""Processes that can be killed: a helper that does what a test tells it to."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from scheduler_service.engine import helpers
from scheduler_service.engine.helpers import HelperDied, Helpers, HelperTimeout

MODULE = "tests.support.odd_helper"


async def test_answers_come_back_and_the_greeting_was_told() -> None:
    pool = Helpers(MODULE, time_limit_s=20, num_processes=1, greeting={"name": "x"})
    try:
        await pool.start()
        first = await pool.ask({"do": "tell"})
        assert (first["name"], (await pool.ask({"do": "tell"}))["pid"]) == ("x", first["pid"])
    finally:
        await pool.close()


@pytest.mark.parametrize("deed", ["exit", "eat_memory", "write_file"])
async def test_what_a_process_dies_of_costs_one_question(deed: str) -> None:
    pool = Helpers(MODULE, time_limit_s=20, num_processes=1)
    try:
        with pytest.raises(HelperDied):
            await pool.ask({"do": deed})
        assert (await pool.ask({"do": "tell"}))["pid"] > 0
    finally:
        await pool.close()


async def test_a_question_that_takes_too_long_costs_the_process_its_life() -> None:
    pool = Helpers(MODULE, time_limit_s=0.3, num_processes=2)
    try:
        slow = asyncio.create_task(pool.ask({"do": "sleep"}))
        others = [await pool.ask({"do": "tell"}) for _ in range(3)]
        with pytest.raises(HelperTimeout):
            await slow
        assert len({other["pid"] for other in others}) == 1
    finally:
        await pool.close()


async def test_a_process_that_cannot_start_fails_the_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "_START_LIMIT_S", 20.0)
    pool = Helpers("tests.support.no_such_module", time_limit_s=5, num_processes=1)
    try:
        await pool.start()
        with pytest.raises(HelperDied):
            await pool.ask({})
    finally:
        await pool.close()


async def test_closing_waits_for_nobody_and_leaves_no_process() -> None:
    """As when a model is unloaded while its first process still starts, or has not answered."""
    pool = Helpers(MODULE, time_limit_s=60, num_processes=2)
    await pool.ask({"do": "tell"})
    assert len(_children()) == 1
    asked = [asyncio.create_task(pool.ask({"do": "sleep"})) for _ in range(4)]
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        await asyncio.gather(pool.close(), pool.close())
        await starting
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(outcome, HelperDied)
    assert _children() == set()
    with pytest.raises(HelperDied):
        await pool.ask({"do": "tell"})
    await pool.start()
    assert _children() == set()


async def test_closing_a_pool_that_only_starts_leaves_no_process() -> None:
    for pause_s in (0, 0.002, 0.05):
        pool = Helpers(MODULE, time_limit_s=60, num_processes=1)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(pause_s)
        async with asyncio.timeout(20):
            await pool.close()
            await starting
        assert _children() == set()


def _children() -> set[str]:
    """The helpers of this process that run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and MODULE.encode() in (folder / "cmdline").read_bytes():
                found.add(folder.name)
    return found
