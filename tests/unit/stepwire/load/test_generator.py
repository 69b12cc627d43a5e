import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from stepwire.client.types import Event, Finished, FinishReason, Output, SamplingParams, Started, Usage
from stepwire.load import generator as module
from stepwire.load.generator import Bounds, LoadGenerator
from stepwire.rpc.errors import StepwireError
from stepwire.simulation.arrivals import Arrival


class VirtualClock:
    """Makes the running loop's time jump to whatever is next as soon as nothing else is to be done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        select = loop._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout:
                self.now += timeout
            return select(0)

        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop._selector, "select", jump)  # type: ignore[attr-defined]


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop(), monkeypatch)


class Service:
    """A service in virtual time. `hold_s(index)` says how long a request waits before its first token."""

    def __init__(self, clock: VirtualClock, hold_s: Callable[[int], float] = lambda _index: 1.0) -> None:
        self.clock = clock
        self.hold_s = hold_s
        self.sent: list[tuple[float, list[int], SamplingParams, int, float | None]] = []
        self.num_open = 0
        self.most_open = 0

    async def generate(
        self, prompt: Sequence[int], *, sampling: SamplingParams, priority: int, timeout: float | None
    ) -> AsyncIterator[Event]:
        index = len(self.sent)
        self.sent.append((self.clock.now, list(prompt), sampling, priority, timeout))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield Started("r", 1, "m", len(prompt))
            await asyncio.sleep(self.hold_s(index))
            if timeout is not None and self.hold_s(index) > timeout:
                raise StepwireError("DEADLINE_EXCEEDED", "too late")
            num = sampling.max_tokens or 0
            for position in range(num):
                yield Output(0, position, (7,), "x", finish_reason=FinishReason.LENGTH if position == num - 1 else None)
                if position < num - 1:
                    await asyncio.sleep(0.1)
            yield Finished(Usage(len(prompt), num, 3), 0.25)
        finally:
            self.num_open -= 1


def make(index: int, arrival: Arrival) -> list[int]:
    return [index] * arrival.num_prompt_tokens


def generator(service: Service, **bounds: float) -> LoadGenerator:
    return LoadGenerator(service.generate, make, Bounds(**bounds))  # type: ignore[arg-type]


async def test_a_request_is_measured_from_its_own_time(clock: VirtualClock) -> None:
    service = Service(clock)
    arrival = Arrival(2.0, 4, 3, priority=5, deadline_s=9.0)
    (record,) = (await generator(service).open_loop([arrival])).records
    sent_s, prompt, sampling, priority, timeout = service.sent[0]
    assert (sent_s, prompt, priority, timeout) == (2.0, [0] * 4, 5, pytest.approx(9.0))
    assert (sampling.max_tokens, sampling.ignore_eos) == (3, True)
    assert (record.arrival_s, record.ttft_s, record.wait_s) == (2.0, pytest.approx(1.0), pytest.approx(0.25))
    assert (record.latency_s, record.tpot_s) == (pytest.approx(1.2), pytest.approx(0.1))
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (4, 3, 3)


async def test_an_open_loop_never_waits_for_the_service(clock: VirtualClock) -> None:
    """A service that hangs for 100 s still gets every request at its time, and each counts from that time."""
    service = Service(clock, hold_s=lambda index: 100.0 - index)
    result = await generator(service, drain_s=200.0).open_loop([Arrival(float(i), 1, 1) for i in range(50)])
    assert [sent[0] for sent in service.sent] == pytest.approx([float(i) for i in range(50)])
    assert service.most_open == 50
    assert [record.ttft_s for record in result.records] == pytest.approx([100.0 - i for i in range(50)])


async def test_a_late_generator_blames_nobody_else(clock: VirtualClock) -> None:
    """When this process is held up, latency still counts from when a request was due, and the lag is reported."""
    service = Service(clock, hold_s=lambda _index: 0.0)

    def slow(index: int, arrival: Arrival) -> list[int]:
        if index == 0:
            clock.now += 5.0  # the whole process stands still
        return [1]

    load = LoadGenerator(service.generate, slow, Bounds())
    result = await load.open_loop([Arrival(1.0, 1, 1), Arrival(2.0, 1, 1)])
    assert result.lags_s == pytest.approx([0.0, 4.0])
    assert result.records[1].ttft_s == pytest.approx(4.0)


async def test_a_closed_loop_keeps_just_so_many_open(clock: VirtualClock) -> None:
    service = Service(clock)
    arrivals = (Arrival(0.0, 1, 1) for _ in itertools.count())
    result = await generator(service, max_requests=10).closed_loop(arrivals, 3)
    assert service.most_open == 3
    assert [sent[0] for sent in service.sent] == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    assert all(record.latency_s == pytest.approx(1.0) for record in result.records)


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_run_is_bounded_in_requests_and_in_time(clock: VirtualClock, concurrency: int | None) -> None:
    async def run(**bounds: float) -> int:
        service = Service(clock)
        load = generator(service, **bounds)
        endless = (Arrival(i * 0.5, 1, 1) for i in itertools.count())
        await (load.open_loop(endless) if concurrency is None else load.closed_loop(endless, concurrency))
        return len(service.sent)

    assert await run(max_requests=7) == 7
    assert await run(max_seconds=3.0) == (7 if concurrency is None else 6)


async def test_what_is_open_in_the_end_is_cancelled_and_counted(clock: VirtualClock) -> None:
    service = Service(clock, hold_s=lambda index: 1e9 if index else 0.0)
    result = await generator(service, drain_s=5.0).open_loop([Arrival(0.0, 1, 1), Arrival(1.0, 1, 1)])
    assert [record.error for record in result.records] == [None, "UNFINISHED"]
    assert clock.now == pytest.approx(6.0)
    assert service.num_open == 0


async def test_failures_are_kept_by_their_reason(clock: VirtualClock) -> None:
    async def broken(prompt: Sequence[int], **_: Any) -> AsyncIterator[Event]:
        yield Started("r", 1, "m", 1)
        if prompt == [0]:
            raise StepwireError("QUEUE_FULL", "full")
        raise ValueError("a defect")

    load = LoadGenerator(broken, make, Bounds())
    result = await load.open_loop([Arrival(0.0, 1, 1), Arrival(0.0, 1, 1)])
    assert [record.error for record in result.records] == ["QUEUE_FULL", "ValueError"]


async def test_a_deadline_that_passed_here_is_not_sent(clock: VirtualClock) -> None:
    service = Service(clock)

    def slow(index: int, arrival: Arrival) -> list[int]:
        clock.now += 2.0
        return [1]

    load = LoadGenerator(service.generate, slow, Bounds())
    result = await load.open_loop([Arrival(0.0, 1, 1, deadline_s=1.5), Arrival(0.1, 1, 1, deadline_s=0.5)])
    assert [record.error for record in result.records] == [None, "DEADLINE_EXCEEDED"]
    assert len(service.sent) == 1


async def test_warm_up_is_sent_and_left_out(clock: VirtualClock) -> None:
    service = Service(clock)
    result = await generator(service, warm_up_s=2.0).open_loop([Arrival(float(i), 1, 1) for i in range(5)])
    assert len(service.sent) == 5
    assert result.num_warm_up == 2
    assert [record.arrival_s for record in result.records] == [2.0, 3.0, 4.0]


async def test_more_than_this_process_can_follow_is_its_own_error(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_REQUESTS", 2)
    result = await generator(Service(clock)).open_loop([Arrival(0.0, 1, 1) for _ in range(3)])
    assert [record.error for record in result.records] == [None, None, "CLIENT_OVERLOADED"]
