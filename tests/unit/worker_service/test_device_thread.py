"""Order, delivery and end of the device thread."""

import asyncio
import threading

import pytest

from worker_service.device_thread import DeviceStopped, DeviceThread


class Log:
    """A runtime that notes what is done with it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entries: list[object] = []

    def note(self, entry: object) -> object:
        self.entries.append((entry, threading.get_ident() == self.thread))
        return entry

    def fail(self, error: BaseException) -> None:
        raise error


def device(fatal: list[BaseException] | None = None, **options: object) -> DeviceThread[Log]:
    thread = DeviceThread(
        options.get("make", Log),
        is_fatal=lambda error: isinstance(error, OSError) or not isinstance(error, Exception),
        on_fatal=[].append if fatal is None else fatal.append,
    )
    thread.start()
    return thread


async def test_calls_run_in_order_on_one_other_thread() -> None:
    thread = device()
    results = await asyncio.gather(*(thread.run(lambda log, i=i: log.note(i)) for i in range(50)))
    assert results == list(range(50))
    log = thread.runtime
    assert log is not None and log.entries == [(i, True) for i in range(50)]
    assert log.thread != threading.get_ident()
    assert await thread.close(5)


async def test_outcomes_are_delivered_on_the_loop_in_order() -> None:
    thread = device()
    outcomes: list[object] = []
    here = threading.get_ident()

    def done(result: object, error: BaseException | None) -> None:
        outcomes.append((result, type(error).__name__, threading.get_ident() == here))

    thread.post(lambda log: log.note(1), done)
    thread.post(lambda log: log.fail(ValueError("no")), done)
    thread.post(lambda log: log.note(2), done)
    await thread.run(lambda log: None)
    assert outcomes == [(1, "NoneType", True), (None, "ValueError", True), (2, "NoneType", True)]
    await thread.close(5)


async def test_calls_wait_for_a_slow_runtime_and_the_loop_does_not() -> None:
    gate = threading.Event()

    def make() -> Log:
        gate.wait(10)
        return Log()

    thread = device(make=make)
    waiting = asyncio.create_task(thread.run(lambda log: log.note(1)))
    await asyncio.sleep(0.01)
    assert thread.runtime is None and not waiting.done()
    gate.set()
    assert await waiting == 1
    await thread.close(5)


async def test_an_ordinary_error_is_the_call_s_own() -> None:
    fatal: list[BaseException] = []
    thread = device(fatal)
    with pytest.raises(ValueError, match="no"):
        await thread.run(lambda log: log.fail(ValueError("no")))
    assert await thread.run(lambda log: log.note(1)) == 1
    assert not fatal
    await thread.close(5)


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit("gone"), KeyboardInterrupt("gone")])
async def test_a_fatal_error_stops_everything_after_it(error: BaseException) -> None:
    fatal: list[BaseException] = []
    thread = device(fatal)
    first = asyncio.create_task(thread.run(lambda log: log.fail(error)))
    second = asyncio.create_task(thread.run(lambda log: log.note(1)))
    with pytest.raises(OSError if isinstance(error, OSError) else DeviceStopped, match="gone"):
        await first
    with pytest.raises(DeviceStopped, match="gone") as caught:
        await second
    assert caught.value.__cause__ is error
    assert fatal == [error]
    assert thread.is_broken
    assert thread.runtime is not None and thread.runtime.entries == []
    assert await thread.close(5)


async def test_a_runtime_that_cannot_be_made_is_fatal() -> None:
    fatal: list[BaseException] = []

    def make() -> Log:
        raise ImportError("no torch")

    thread = device(fatal, make=make)
    with pytest.raises(DeviceStopped, match="no torch"):
        await thread.run(lambda log: log.note(1))
    assert [str(error) for error in fatal] == ["no torch"]
    assert thread.runtime is None
    # Whoever asks for the device is to hear why.
    assert not thread.is_broken
    assert await thread.close(5)


async def test_stop_iteration_does_not_vanish_in_a_coroutine() -> None:
    thread = device()
    with pytest.raises(DeviceStopped, match="StopIteration"):
        await thread.run(lambda log: log.fail(StopIteration()))
    await thread.close(5)


async def test_a_cancelled_wait_does_not_stop_the_call() -> None:
    gate = threading.Event()
    thread = device()
    waiting = asyncio.create_task(thread.run(lambda log: (gate.wait(10), log.note(1))))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert await thread.run(lambda log: list(log.entries)) == [(1, True)]
    await thread.close(5)


async def test_closing_runs_what_is_queued_and_refuses_the_rest() -> None:
    thread = device()
    queued = asyncio.create_task(thread.run(lambda log: log.note(1)))
    await asyncio.sleep(0)
    assert await thread.close(5)
    assert await queued == 1
    with pytest.raises(DeviceStopped, match="closed"):
        await thread.run(lambda log: log.note(2))
    assert await thread.close(5)


async def test_closing_gives_up_on_a_call_that_hangs() -> None:
    gate = threading.Event()
    thread = device()
    hanging = asyncio.create_task(thread.run(lambda log: gate.wait(10)))
    await asyncio.sleep(0)
    assert not await thread.close(0.01)
    gate.set()
    assert await hanging
    assert await thread.close(5)


async def test_closing_before_the_start_is_harmless() -> None:
    thread: DeviceThread[Log] = DeviceThread(Log, is_fatal=lambda error: False, on_fatal=lambda error: None)
    assert await thread.close(5)


async def test_an_outcome_waits_until_the_next_call_has_launched() -> None:
    """Or for nothing, when there is no next call."""
    thread = device()
    order: list[str] = []
    go = threading.Event()

    def second(log: Log) -> str:
        order.append("prepares")
        go.wait(0.2)
        order.append("computes")
        thread.launched()
        go.wait(5)
        return "second"

    def done(result: object, _error: BaseException | None) -> None:
        order.append(str(result))
        go.set()

    hold = threading.Event()
    thread.post(lambda _log: hold.wait(5) and "first", done, launches=True)
    thread.post(second, done, launches=True)
    hold.set()
    await thread.run(lambda _log: None)
    assert order == ["prepares", "computes", "first", "second"]
    alone: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    thread.post(lambda _log: "alone", lambda result, _error: alone.set_result(result), launches=True)
    assert await asyncio.wait_for(alone, 5) == "alone"
    await thread.close(5)


async def test_a_failure_delivers_what_was_held_back_first() -> None:
    thread = device()
    order: list[object] = []
    hold = threading.Event()
    thread.post(lambda _log: hold.wait(5) and "first", lambda result, _error: order.append(result), launches=True)
    thread.post(lambda log: log.fail(ValueError("no")), lambda _result, error: order.append(str(error)), launches=True)
    hold.set()
    await thread.run(lambda _log: None)
    assert order == ["first", "no"]
    await thread.close(5)
