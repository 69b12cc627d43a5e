"""`stepwire bench`."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import click

from stepwire.cli.target import target_option, tenant_option, unreachable
from stepwire.cli.workload import arrivals_of, has_slo, show, slo_of, workload_options
from stepwire.client import AsyncClient, StepwireError
from stepwire.client.types import Event, SamplingParams
from stepwire.load.generator import Bounds, LoadGenerator, LoadResult
from stepwire.load.prompts import PromptMaker
from stepwire.simulation.records import percentile, summarise
from stepwire.simulation.render import pair_lines, summary_lines
from stepwire.simulation.svg import Line, Panel, cumulative

_DEFAULT_REQUESTS = 1000
# Later than this, what was measured is this process.
_MAX_LAG_S = 0.05


@click.command(context_settings={"show_default": True})
@click.option("--concurrency", type=click.IntRange(1, 16_384), help="Closed loop: keep so many requests open.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=60.0, help="Send for at most so long.")
@click.option("--drain", type=click.FloatRange(0), default=60.0, help="Seconds to wait for what is open then.")
@click.option("--warm-up", type=click.FloatRange(0), default=0.0, help="Leave out what arrives in the first seconds.")
@click.option("--natural-stop", is_flag=True, help="Let answers end where the model ends them.")
@click.option("--model", default="", show_default=False, help="Name of the model; by default the first.")
@workload_options
@tenant_option
@target_option
def bench(**options: Any) -> None:
    """Load a running server and report throughput, goodput and times.

    Open loop: --rate or --trace, each request sent at its time whatever became of the others. Closed loop:
    --concurrency users, each of whom sends the next request when the last has ended. At most --requests (1000)
    in --seconds (60).
    """
    if (options["concurrency"] is None) == (options["rate"] is None and options["trace"] is None):
        raise click.UsageError("give one of --rate and --trace (open loop), or --concurrency (closed loop)")
    try:
        result, seconds = asyncio.run(_run(options))
    except StepwireError as error:
        raise unreachable(options["target"], error.message) if "target" in error.metadata else error from error
    summary = summarise(result.records, slo_of(options), seconds)
    lag_s = percentile(sorted(result.lags_s), 99) if result.lags_s else 0.0
    title = f"{options['target']}: {_kind(options)}"
    lines = [title, "", *summary_lines(summary, has_slo=has_slo(options))]
    if result.num_warm_up:
        lines += ["", *pair_lines([("warm-up", f"{result.num_warm_up:,} requests, left out")])]
    if lag_s > _MAX_LAG_S:
        lines += [
            "",
            f"1 % of the requests went out more than {1000 * lag_s:.0f} ms late: this machine is too slow for it",
        ]
    figures = {"target": options["target"], "load": _kind(options), "lag_p99_s": lag_s, **summary.as_json()}
    show(options, lines, figures, _panels(result), title)


async def _run(options: dict[str, Any]) -> tuple[LoadResult, float]:
    """The result, and the seconds that its records span."""
    async with AsyncClient(options["target"], tenant=options["tenant"]) as client:
        model = await client.get_model(options["model"])
        bounds = Bounds(
            max_requests=options["requests"] or _DEFAULT_REQUESTS,
            max_seconds=options["seconds"],
            drain_s=options["drain"],
            warm_up_s=options["warm_up"],
        )

        def generate(
            prompt: Sequence[int], *, sampling: SamplingParams, priority: int, timeout: float | None
        ) -> AsyncIterator[Event]:
            return client.generate(
                prompt, sampling=sampling, model=options["model"], priority=priority, timeout=timeout
            )

        prompts = PromptMaker(model.vocab_size, options["seed"])
        generator = LoadGenerator(generate, prompts.make, bounds, ignore_eos=not options["natural_stop"])
        began = asyncio.get_running_loop().time()
        if options["concurrency"] is not None:
            result = await generator.closed_loop(arrivals_of(options), options["concurrency"])
        else:
            result = await generator.open_loop(arrivals_of(options))
        seconds = asyncio.get_running_loop().time() - began - bounds.warm_up_s
    return result, max(seconds, 1e-9)


def _kind(options: dict[str, Any]) -> str:
    if options["concurrency"] is not None:
        return f"closed loop of {options['concurrency']}"
    if options["rate"] is not None:
        return f"open loop, {options['rate']:g} requests a second"
    return f"open loop, {options['trace'].name} at {options['speed']:g} times its speed"


def _panels(result: LoadResult) -> list[Panel]:
    records = result.records
    return [
        Panel("Output tokens a second", "seconds", [_rate_line(result.token_times_s)]),
        Panel(
            "Share of requests, in percent",
            "seconds",
            [
                cumulative("time to first token", (record.ttft_s for record in records)),
                cumulative("latency", (record.latency_s for record in records if record.is_finished)),
            ],
        ),
        Panel("", "seconds per token", [cumulative("time per output token", (record.tpot_s for record in records))]),
    ]


def _rate_line(token_times_s: Sequence[tuple[float, int]], num_spans: int = 120) -> Line:
    """Tokens a second over time."""
    if not token_times_s:
        return Line("tokens/s", [], [])
    span_s = max(time_s for time_s, _ in token_times_s) / num_spans or 1.0
    counts = [0] * (num_spans + 1)
    for time_s, count in token_times_s:
        counts[min(num_spans, math.floor(time_s / span_s))] += count
    return Line("tokens/s", [(i + 0.5) * span_s for i in range(num_spans)], [c / span_s for c in counts[:num_spans]])
