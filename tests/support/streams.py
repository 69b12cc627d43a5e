"""Requests under way whose every token is looked at, while somebody disturbs the service."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepwire.client import AsyncClient, Output, StepwireError


@dataclass(frozen=True, slots=True)
class Job:
    """A request; the same one gives the same tokens. What keeps to `regex` must be longer than `max_tokens`."""

    prompt: str
    max_tokens: int = 200
    seed: int = 0
    temperature: float = 1.0
    n: int = 1
    regex: str | None = None


class FollowedStream:
    """A request, what came of it, and how it ended. Begins at once."""

    def __init__(self, client: AsyncClient, job: Job, **keywords: object) -> None:
        self.job = job
        self.began = asyncio.Event()
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.positions: dict[int, list[int]] = {}
        self.error: StepwireError | None = None
        self.ended_at = 0.0
        self._events = client.generate(
            job.prompt,
            max_tokens=job.max_tokens,
            seed=job.seed,
            temperature=job.temperature,
            n=job.n,
            ignore_eos=job.regex is None,
            regex=job.regex,
            **keywords,  # type: ignore[arg-type]
        )
        self.task = asyncio.create_task(self._follow())

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return sum(map(len, self.tokens.values()))

    async def _follow(self) -> None:
        try:
            async for event in self._events:
                if isinstance(event, Output):
                    index = event.sequence_index
                    self.tokens.setdefault(index, []).extend(event.token_ids)
                    self.positions.setdefault(index, []).extend(event.positions)
                    self.texts[index] = self.texts.get(index, "") + event.text
                    self.began.set()
        except StepwireError as error:
            self.error = error
        self.ended_at = time.monotonic()
        self.began.set()


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Waits until something is true that no event tells of, as of another process."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


async def finished(streams: list[FollowedStream], within_s: float = 60.0) -> None:
    """Waits until all have ended."""
    async with asyncio.timeout(within_s):
        await asyncio.gather(*(stream.task for stream in streams))


async def undisturbed(client: AsyncClient, jobs: list[Job], **keywords: object) -> dict[Job, FollowedStream]:
    """What each gives when nothing happens."""
    streams = [FollowedStream(client, job, **keywords) for job in jobs]
    await finished(streams)
    for stream in streams:
        assert stream.error is None, stream.error
    return {stream.job: stream for stream in streams}


def assert_whole(streams: list[FollowedStream], expected: dict[Job, FollowedStream]) -> None:
    """Every stream has ended well, with every position once and the tokens and text of an undisturbed run."""
    for stream in streams:
        assert stream.error is None, stream.error
        for index in range(stream.job.n):
            assert stream.positions[index] == list(range(stream.job.max_tokens))
        assert stream.tokens == expected[stream.job].tokens
        assert stream.texts == expected[stream.job].texts
