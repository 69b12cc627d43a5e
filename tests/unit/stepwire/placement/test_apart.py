"""Calls on threads that nobody waits for."""

import asyncio
import threading

import pytest

from stepwire.placement.apart import apart


async def test_what_a_call_answers_or_raises_is_its_outcome() -> None:
    assert await apart(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await apart(divmod, 7, 0)


def test_the_end_of_the_loop_waits_for_no_call_and_a_late_outcome_harms_nobody() -> None:
    go_on = threading.Event()
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        go_on.wait()

    async def begin() -> None:
        outcome = apart(hang)
        await asyncio.wait([outcome], timeout=0.01)
        assert not outcome.done()

    asyncio.run(begin())
    go_on.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


async def test_an_outcome_that_is_not_wanted_any_more_is_dropped() -> None:
    go_on, has_ended = threading.Event(), asyncio.Event()
    outcome = apart(go_on.wait)
    outcome.cancel()
    go_on.set()
    apart(int).add_done_callback(lambda _outcome: has_ended.set())
    await asyncio.wait_for(has_ended.wait(), 10)
    assert outcome.cancelled()
