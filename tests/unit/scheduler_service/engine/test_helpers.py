"""Processes that can be killed: a helper that does what a test tells it to."""

import asyncio

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
