"""Structured output of the demo model through the door, at temperature 1: is it valid, and what does it cost?

Every answer that ended by itself is held against its schema by jsonschema: those of the JSON Schema test suite that
are supported, and fifty realistic ones. The suite's other schemas are counted: refused, or unsatisfiable.

`throughput_ratio`: tokens a second of sixteen requests at once, each with a schema of its own, over the same without.
`neighbour_ratio`: the mean time between tokens of four streams while a new schema comes every half second, over the
same while plain requests come instead; the better of the two is without schemas.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.ready import demo_model_path, serving, wait_serving
from benchmarks.report import Bar, report
from benchmarks.schemas.judge import problem_of
from benchmarks.schemas.realistic import REALISTIC, record, some, text, whole
from benchmarks.schemas.suite import FOLDER, suite_schemas
from stepwire.client import AsyncClient, FinishReason, Message, Output, StepwireError

MIN_VALID, MIN_FINISHED, MIN_THROUGHPUT, MIN_NEIGHBOUR = 1.0, 0.95, 0.9, 0.95
BATCH = 16
SUITE_TOKENS, REALISTIC_TOKENS = 64, 512
THROUGHPUT_TOKENS = 96
NUM_NEIGHBOURS, NEIGHBOUR_S, ARRIVAL_EVERY_S = 4, 6.0, 0.5
_GIVE_UP_S = 120.0


@dataclass
class Answers:
    """What came of the requests with schemas."""

    num: int = 0
    num_ended: int = 0
    invalid: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def valid(self) -> float:
        """The part of those that ended by themselves that are valid."""
        return 1.0 - len(self.invalid) / self.num_ended if self.num_ended else 0.0


def main() -> int:
    """Runs all and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every fifth schema, and fewer rounds")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="another model than the demo's")
    options = parser.parse_args()
    for needed in (options.model, FOLDER):
        if not needed.exists():
            print(f"structured: there is no {needed}", file=sys.stderr)
            return 2
    with (
        tempfile.TemporaryDirectory(prefix="stepwire-structured-") as folder,
        serving(options.model, Path(folder), "--quantize=none") as (process, target),
    ):
        wait_serving(target, process, time.monotonic() + _GIVE_UP_S)
        return asyncio.run(measure(target, quick=options.quick))


async def measure(target: str, *, quick: bool) -> int:
    """All of it, on a service that is ready."""
    stride, rounds = (5, 2) if quick else (1, 5)
    async with AsyncClient(target) as client:
        suite, realistic = Answers(), Answers()
        began = time.monotonic()
        await answer_all(client, list(suite_schemas())[::stride], suite, SUITE_TOKENS, num=1)
        fifty = [(task, schema) for task, schema in REALISTIC.values()]
        await answer_all(client, fifty[::stride], realistic, REALISTIC_TOKENS, num=2)
        answered_s = time.monotonic() - began
        throughputs = [await throughput_pair(client, number) for number in range(rounds)]
        neighbours = [await neighbour_pair(client, number) for number in range(rounds)]
    show(suite, realistic, throughputs, neighbours)
    num_ended = suite.num_ended + realistic.num_ended
    num_invalid = len(suite.invalid) + len(realistic.invalid)
    bars = {
        "valid": Bar(1.0 - num_invalid / max(1, num_ended), MIN_VALID),
        "realistic_finished": Bar(realistic.num_ended / max(1, realistic.num), MIN_FINISHED),
        "throughput_ratio": Bar(median(with_ / without for with_, without in throughputs), MIN_THROUGHPUT),
        "neighbour_ratio": Bar(median(without / with_ for with_, without in neighbours), MIN_NEIGHBOUR),
    }
    figures = {
        "suite": {
            "supported": suite.num,
            "refused": suite.refusals["refused"],
            "unsatisfiable": suite.refusals["unsatisfiable"],
            "ended": suite.num_ended,
        },
        "realistic": {"answers": realistic.num, "ended": realistic.num_ended, "tokens": realistic.num_tokens},
        "failures": [*suite.failures, *realistic.failures],
        "invalid": [*suite.invalid, *realistic.invalid],
        "tokens_per_s": [[round(rate, 1) for rate in pair] for pair in throughputs],
        "neighbour_token_ms": [[round(1000 * seconds, 2) for seconds in pair] for pair in neighbours],
        "answering_s": round(answered_s, 1),
    }
    return report(bars, figures)


def show(suite: Answers, realistic: Answers, throughputs: Sequence[object], neighbours: Sequence[object]) -> None:
    """The same for people."""
    for name, answers in (("suite", suite), ("realistic", realistic)):
        print(
            f"{name}: {answers.num} answers, {answers.num_ended} ended by themselves, {len(answers.invalid)} invalid; "
            f"schemas: {dict(answers.refusals)}; failed: {len(answers.failures)}"
        )
        for line in (*answers.invalid, *answers.failures):
            print(f"  {line}")
    print(f"tokens/s with and without schemas: {throughputs}")
    print(f"seconds a token while schemas, and plain requests, come: {neighbours}")


async def answer_all(
    client: AsyncClient, schemas: Sequence[tuple[str, Any]], answers: Answers, max_tokens: int, *, num: int
) -> None:
    """`num` answers to each schema, BATCH requests at a time."""
    waiting = list(enumerate(schemas))[::-1]

    async def work() -> None:
        while waiting:
            number, (name, schema) = waiting.pop()
            await answer(client, name, schema, answers, max_tokens, seed=number, num=num)

    async with asyncio.TaskGroup() as group:
        for _ in range(BATCH):
            group.create_task(work())


async def answer(
    client: AsyncClient, name: str, schema: Any, answers: Answers, max_tokens: int, *, seed: int, num: int
) -> None:
    """Asks for answers to one schema, and judges those that ended by themselves."""
    prompt = [Message("user", f"{name[:80]} Answer in JSON.")]
    try:
        done = await client.complete(
            prompt,
            json_schema=json.dumps(schema),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed,
            n=num,
            timeout=120,
        )
    except StepwireError as error:
        if error.reason not in ("GRAMMAR_INVALID", "GRAMMAR_TOO_COMPLEX"):
            answers.failures.append(f"{name}: {error.reason}: {error.message}")
            return
        is_nothing = "nothing satisfies" in error.message or "Unsatisfiable" in error.message
        answers.refusals["unsatisfiable" if is_nothing else "refused"] += 1
        return
    for sequence in done.sequences:
        answers.num += 1
        answers.num_tokens += len(sequence.token_ids)
        if sequence.finish_reason is FinishReason.STOP:
            answers.num_ended += 1
            problem = problem_of(sequence.text, schema)
            if problem is not None:
                answers.invalid.append(f"{name}: {problem}: {sequence.text[:120]!r}")


async def throughput_pair(client: AsyncClient, round_: int) -> tuple[float, float]:
    """Tokens a second of BATCH requests, with schemas and without, in an order that alternates."""
    order = (True, False) if round_ % 2 == 0 else (False, True)
    rates = {has_schema: await throughput(client, round_, has_schema=has_schema) for has_schema in order}
    return rates[True], rates[False]


async def throughput(client: AsyncClient, round_: int, *, has_schema: bool) -> float:
    """Tokens a second between the first token of the last request to begin and the end of the first to end."""
    times: list[list[float]] = [[] for _ in range(BATCH)]

    async def one(number: int) -> None:
        form: dict[str, Any] = {"json_schema": long_schema(number)} if has_schema else {"ignore_eos": True}
        prompt = [Message("user", f"Invent some records, number {number}. Answer in JSON.")]
        keywords = {"max_tokens": THROUGHPUT_TOKENS, "temperature": 1.0, "seed": 100 * round_ + number, **form}
        async with client.generate(prompt, **keywords) as stream:
            async for event in stream:
                if isinstance(event, Output):
                    times[number] += [time.monotonic()] * len(event.token_ids)

    async with asyncio.TaskGroup() as group:
        for number in range(BATCH):
            group.create_task(one(number))
    begin, end = max(column[0] for column in times), min(column[-1] for column in times)
    return sum(begin < moment <= end for column in times for moment in column) / (end - begin)


def long_schema(number: int) -> Any:
    """A schema whose answers are longer than what is asked for: realistic records, and many."""
    return some(record({"id": whole(0, 9999), f"name_{number}": text(40), "tags": some(text(12), 1, 4)}), 60, 80)


async def neighbour_pair(client: AsyncClient, round_: int) -> tuple[float, float]:
    """Mean seconds between tokens of streams, while schemas come and while plain requests come."""
    order = (True, False) if round_ % 2 == 0 else (False, True)
    means = {has_schema: await neighbours(client, round_, has_schema=has_schema) for has_schema in order}
    return means[True], means[False]


async def neighbours(client: AsyncClient, round_: int, *, has_schema: bool) -> float:
    gaps: list[float] = []
    until = time.monotonic() + NEIGHBOUR_S

    async def stream(number: int) -> None:
        before = None
        prompt = [Message("user", f"Tell a story about the number {number}.")]
        async with client.generate(prompt, max_tokens=1500, ignore_eos=True, seed=number) as events:
            async for event in events:
                now = time.monotonic()
                if now > until:
                    return
                if isinstance(event, Output):
                    gaps.extend([(now - before) / len(event.token_ids)] * len(event.token_ids) if before else [])
                    before = now

    async def arrive(number: int) -> None:
        key = f"field_{round_}_{number}"
        schema = record(
            {f"{key}_{i}": some(record({"a": text(9 + i), "b": whole(0, 99 + i)}), 0, 5) for i in range(40)}
        )
        form: dict[str, Any] = {"json_schema": schema} if has_schema else {}
        await client.complete("{", max_tokens=1, timeout=30, **form)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_NEIGHBOURS):
            group.create_task(stream(number))
        number = 0
        while time.monotonic() < until - 1.0:
            await asyncio.sleep(ARRIVAL_EVERY_S)
            group.create_task(arrive(number))
            number += 1
    return mean(gaps)


if __name__ == "__main__":
    sys.exit(main())
