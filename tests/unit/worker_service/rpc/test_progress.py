"""Progress is thinned, and its last state belongs to the result."""

import asyncio

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.progress import REPORT_INTERVAL_S, LoadProgress, WarmUpProgress, changes


async def test_a_busy_reporter_is_heard_ten_times_a_second() -> None:
    progress = LoadProgress()

    async def work() -> None:
        for i in range(35):
            progress.report("read", i, 35)
            await asyncio.sleep(0.01)

    loop = asyncio.get_running_loop()
    begin = loop.time()
    seen = [now async for now in changes(progress, asyncio.create_task(work()))]
    assert 1 <= len(seen) <= (loop.time() - begin) / REPORT_INTERVAL_S
    assert seen == sorted(set(seen))


async def test_nothing_new_is_not_said_again() -> None:
    progress = WarmUpProgress()
    progress.report(1, 3)
    seen = [now async for now in changes(progress, asyncio.create_task(asyncio.sleep(0.35)))]
    assert seen == [(1, 3)]


async def test_quick_work_reports_nothing() -> None:
    assert [now async for now in changes(LoadProgress(), asyncio.create_task(asyncio.sleep(0)))] == []


def test_a_reason_cancels() -> None:
    progress = LoadProgress()
    assert not progress.is_cancelled()
    progress.cancel_reason = StepwireError("CANCELLED", "enough")
    assert progress.is_cancelled()
