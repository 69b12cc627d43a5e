"""Work that goes on though whoever asked for it has gone."""

import asyncio

import pytest

from scheduler_service.engine.changes import Changes, all_of


async def test_a_change_is_finished_though_its_caller_leaves() -> None:
    changes, gate, done = Changes("c", takes_errors=True), asyncio.Event(), asyncio.Event()

    async def change() -> int:
        await gate.wait()
        done.set()
        return 7

    caller = asyncio.create_task(changes.run(change()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    gate.set()
    await asyncio.wait_for(done.wait(), 5)
    assert await changes.run(change()) == 7


async def test_close_ends_what_goes_on() -> None:
    changes, ended = Changes("c", takes_errors=True), asyncio.Event()

    async def change() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = changes.begin(change())
    await asyncio.sleep(0)
    await changes.close()
    assert ended.is_set() and task.cancelled()


@pytest.mark.parametrize("takes_errors", [True, False])
async def test_an_error_that_nobody_waits_for_is_told_of_unless_it_is_taken(takes_errors: bool) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    changes = Changes("c", takes_errors=takes_errors)

    async def change() -> None:
        raise ValueError("broken")

    changes.begin(change())
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(told) == (not takes_errors)


async def test_all_calls_are_made_before_the_first_error_is_raised() -> None:
    made: list[int] = []

    async def call(number: int) -> None:
        await asyncio.sleep(0.001 * (3 - number))
        made.append(number)
        if number:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        await all_of(call(number) for number in range(3))
    assert sorted(made) == [0, 1, 2]
