"""A mix of requests, each told what is to become of it, and what came of it as its client saw it."""

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from stepwire.client import AsyncClient, Output, StepwireError
from stepwire.client.types import GenerateKeywords
from stepwire.telemetry.trace import get_tracer

# Kinds of requests, with their shares.
KINDS = {"plain": 45, "siblings": 10, "urgent": 10, "cancelled": 13, "late": 12, "invalid": 5, "duplicate": 5}
ROOT_SPAN = "benchmark request"
_VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to make. A "cancelled" one is left after `cancel_after` messages."""

    kind: str
    request_id: str
    prompt: list[int]
    keywords: GenerateKeywords
    delay_s: float
    cancel_after: int = 0


@dataclass(slots=True)
class Outcome:
    """What a client saw: the error's reason, empty for none; times on the monotonic clock, in seconds."""

    ask: Ask
    trace_id: str
    reason: str = ""
    code: str = "OK"
    began_at: float = 0.0
    ended_at: float = 0.0
    token_times: list[float] = field(default_factory=list)


def make_asks(num: int, rng: random.Random) -> list[Ask]:
    """A mix of `num` requests that arrive in waves: some of each find the queue full."""
    asks: list[Ask] = []
    for number in range(num):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "duplicate" and (not asks or asks[-1].kind in ("invalid", "duplicate")):
            kind = "plain"
        request_id = f"{kind}-{number}"
        keywords: GenerateKeywords = {"max_tokens": rng.randrange(4, 120), "ignore_eos": True, "timeout": 120.0}
        cancel_after, delay_s = 0, number // 60 * 2.0 + rng.random() * 0.3
        if kind == "siblings":
            keywords["n"] = rng.randrange(2, 5)
        elif kind == "urgent":
            keywords["priority"] = 5
        elif kind == "cancelled":
            keywords["max_tokens"], cancel_after = 400, rng.randrange(1, 20)
        elif kind == "late":
            keywords["max_tokens"], keywords["timeout"] = 900, rng.uniform(0.2, 1.5)
        elif kind == "invalid":
            keywords["temperature"] = -1.0
        elif kind == "duplicate":
            # The id of one that has just been sent: refused when that one lives, else a plain request.
            request_id, delay_s = asks[-1].request_id, asks[-1].delay_s + 0.05
        prompt = [rng.randrange(_VOCAB_SIZE) for _ in range(rng.randrange(8, 160))]
        if rng.random() < 0.3 and asks:
            prompt = asks[rng.randrange(len(asks))].prompt
        asks.append(Ask(kind, request_id, prompt, keywords, delay_s, cancel_after))
    return asks


async def send(client: AsyncClient, provider: TracerProvider, ask: Ask) -> Outcome:
    """Makes a request under a root span of its own."""
    span = get_tracer(provider).start_span(ROOT_SPAN)
    outcome = Outcome(ask, f"{span.get_span_context().trace_id:032x}", began_at=time.monotonic())
    try:
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            await _stream(client, ask, outcome)
    except StepwireError as error:
        outcome.reason, outcome.code = error.reason, error.code.name
    except asyncio.CancelledError:
        outcome.reason, outcome.code = "CANCELLED", "CANCELLED"
    outcome.ended_at = time.monotonic()
    return outcome


async def _stream(client: AsyncClient, ask: Ask, outcome: Outcome) -> None:
    num_messages = 0
    stream = client.generate(ask.prompt, request_id=ask.request_id, **ask.keywords)
    async with aclosing(stream):
        async for event in stream:
            num_messages += 1
            if isinstance(event, Output):
                outcome.token_times.append(time.monotonic())
            if ask.cancel_after and num_messages > ask.cancel_after:
                raise asyncio.CancelledError
