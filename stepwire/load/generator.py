"""Sends requests to a running service as the world would, and notes what became of each.

In an open loop a request goes out when its time has come, whatever became of those before it, and its
times count from that moment even when this process was late to send it. A generator that waits for
answers sends less just when the service is slow, and so measures too little ("coordinated omission").
In a closed loop each of a fixed number of users sends its next request when the last has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwire.client.types import Event, Finished, Output, SamplingParams
from stepwire.rpc.errors import StepwireError
from stepwire.simulation.arrivals import Arrival
from stepwire.simulation.records import RequestRecord

# More than a client process can follow: beyond it the figures would be its own.
MAX_OPEN_REQUESTS = 16_384


class GenerateCall(Protocol):
    """How a request is sent, as AsyncClient.generate does it."""

    def __call__(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams,
        priority: int,
        timeout: float | None,
    ) -> AsyncIterator[Event]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a run ends. After `max_seconds` nothing more is sent; what is still open `drain_s` later is cancelled.

    What arrives in the first `warm_up_s` is sent, and left out of the records.
    """

    max_requests: int = 1000
    max_seconds: float = 60.0
    drain_s: float = 30.0
    warm_up_s: float = 0.0


@dataclass(slots=True)
class LoadResult:
    """What a run brought. `lags_s`: how much later than its time each request was sent, in an open loop."""

    records: list[RequestRecord] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    token_times_s: list[tuple[float, int]] = field(default_factory=list)
    num_warm_up: int = 0


class LoadGenerator:
    """One run of load. `make_prompt(index, arrival)` gives the token ids of a prompt.

    With `ignore_eos` answers are as long as the arrival says; without, at most that long.
    """

    def __init__(
        self,
        generate: GenerateCall,
        make_prompt: Callable[[int, Arrival], Sequence[int]],
        bounds: Bounds,
        *,
        ignore_eos: bool = True,
    ) -> None:
        self._generate = generate
        self._make_prompt = make_prompt
        self._bounds = bounds
        self._ignore_eos = ignore_eos
        self._result = LoadResult()
        self._open: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        self._began = 0.0

    async def open_loop(self, arrivals: Iterable[Arrival]) -> LoadResult:
        """Sends each request at its time. `arrivals` may be without end."""
        self._began = self._now()
        for arrival in arrivals:
            if self._num_sent >= self._bounds.max_requests or arrival.time_s > self._bounds.max_seconds:
                break
            await self._sleep_until(self._began + arrival.time_s)
            self._result.lags_s.append(self._elapsed() - arrival.time_s)
            self._send(arrival, arrival.time_s)
        return await self._drain()

    async def closed_loop(self, arrivals: Iterable[Arrival], concurrency: int) -> LoadResult:
        """Keeps `concurrency` requests open; the times of the arrivals are ignored. `arrivals` may be without end."""
        self._began = self._now()
        source = iter(arrivals)
        for _ in range(concurrency):
            self._keep(asyncio.create_task(self._user(source)))
        return await self._drain(self._bounds.max_seconds)

    def _send(self, arrival: Arrival, arrival_s: float) -> None:
        record = self._record(arrival, arrival_s)
        index = self._num_sent
        self._num_sent += 1
        if len(self._open) >= MAX_OPEN_REQUESTS:
            record.end_s, record.error = arrival_s, "CLIENT_OVERLOADED"
            return
        self._keep(asyncio.create_task(self._request(index, arrival, record)))

    async def _user(self, source: Iterator[Arrival]) -> None:
        while self._num_sent < self._bounds.max_requests and self._elapsed() < self._bounds.max_seconds:
            arrival = next(source, None)
            if arrival is None:
                return
            record = self._record(arrival, self._elapsed())
            index = self._num_sent
            self._num_sent += 1
            await self._request(index, arrival, record)

    async def _request(self, index: int, arrival: Arrival, record: RequestRecord) -> None:
        sampling = SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=self._ignore_eos, seed=index)
        timeout = None if arrival.deadline_s is None else record.arrival_s + arrival.deadline_s - self._elapsed()
        try:
            if timeout is not None and timeout <= 0:
                raise StepwireError("DEADLINE_EXCEEDED", "the deadline passed before the request was sent")
            events = self._generate(
                self._make_prompt(index, arrival), sampling=sampling, priority=arrival.priority, timeout=timeout
            )
            async for event in events:
                self._note(event, record)
        except StepwireError as error:
            record.error = error.reason
        except asyncio.CancelledError:
            record.error = "UNFINISHED"
            raise
        except Exception as error:
            record.error = type(error).__name__
        finally:
            record.end_s = self._elapsed()

    def _note(self, event: Event, record: RequestRecord) -> None:
        if isinstance(event, Output):
            now = self._elapsed()
            if record.first_token_s is None:
                record.first_token_s = now
            record.num_output_tokens += len(event.token_ids)
            self._result.token_times_s.append((now, len(event.token_ids)))
        elif isinstance(event, Finished):
            record.started_s = record.arrival_s + event.queue_s
            record.num_prompt_tokens = event.usage.num_prompt_tokens
            record.num_cached_tokens = event.usage.num_cached_tokens

    def _record(self, arrival: Arrival, arrival_s: float) -> RequestRecord:
        record = RequestRecord(
            arrival_s, arrival.priority, arrival.deadline_s, num_prompt_tokens=arrival.num_prompt_tokens
        )
        if arrival_s < self._bounds.warm_up_s:
            self._result.num_warm_up += 1
        else:
            self._result.records.append(record)
        return record

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _drain(self, more_s: float = 0.0) -> LoadResult:
        """Waits for what is open, then cancels it."""
        if self._open:
            _, late = await asyncio.wait(set(self._open), timeout=more_s + self._bounds.drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.gather(*late, return_exceptions=True)
        return self._result

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _elapsed(self) -> float:
        return self._now() - self._began

    async def _sleep_until(self, time_s: float) -> None:
        """Waits until then; gives way to others at least once, also when it is late."""
        await asyncio.sleep(max(0.0, time_s - self._now()))
