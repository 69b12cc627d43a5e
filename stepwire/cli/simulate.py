"""`stepwire simulate`."""

import dataclasses
import itertools
import time
from typing import Any

import click

from scheduler_service.core.config import SchedulerConfig
from stepwire.cli.errors import CommandError
from stepwire.cli.workload import arrivals_of, has_slo, show, slo_of, workload_options
from stepwire.simulation.cost import HARDWARE, CostModel, Hardware, ModelShape
from stepwire.simulation.records import summarise
from stepwire.simulation.render import pair_lines, summary_lines
from stepwire.simulation.shapes import SHAPES, find_shape
from stepwire.simulation.simulator import Assumptions, Simulation, SimulationResult
from stepwire.simulation.svg import Line, Panel, cumulative

_DEFAULT_REQUESTS = 1000


@click.command(context_settings={"show_default": True})
@click.option(
    "--model", required=True, help=f"Checkpoint, of which only headers are read, or one of {', '.join(SHAPES)}."
)
@click.option("--dtype", default="auto", help="Type of weights and KV cache; by default the checkpoint's own.")
@click.option("--hardware", type=click.Choice(list(HARDWARE)), default="h100", help="Device.")
@click.option("--compute-flops", type=click.FloatRange(0), help="FLOP/s that it reaches instead; 0 for no limit.")
@click.option("--bandwidth-bytes", type=click.FloatRange(0), help="Bytes/s that it reaches instead; 0 for no limit.")
@click.option("--latency", type=click.FloatRange(0), help="Seconds that each of its steps takes on top instead.")
@click.option("--memory-bytes", type=click.IntRange(1), help="Bytes of its memory instead.")
@click.option("--memory-fraction", type=click.FloatRange(0, 1, min_open=True), default=0.9, help="Part of it to use.")
@click.option("--num-kv-blocks", type=click.IntRange(1), help="KV blocks; by default what the memory holds.")
@click.option("--block-size", type=click.IntRange(1, 256), default=16, help="Token positions of one block.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=64, help="Most sequences that run at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, help="Most tokens of one step.")
@click.option("--max-queued-requests", type=click.IntRange(1), default=1_000_000, help="Most requests that wait.")
@click.option("--no-prefix-caching", is_flag=True, help="Do not reuse blocks of prompts that begin alike.")
@click.option("--max-tokens", type=click.IntRange(1), help="What clients ask for; by default just what they get.")
@click.option("--blind", is_flag=True, help="First come, first served: hide priorities and deadlines.")
@workload_options
def simulate(**options: Any) -> None:
    """Run the scheduler in virtual time: this model, this hardware, these arrivals.

    Answers which throughput and which times to expect, how many KV blocks are used, and how often a
    sequence is preempted. Arrivals come from --rate or --trace; at most --requests, by default 1000, or
    all of the trace.
    """
    if options["rate"] is None and options["trace"] is None:
        raise click.UsageError("give --rate or --trace: when do requests arrive?")
    cost = CostModel(_shape(options), _hardware(options))
    config = _config(options, cost)
    most = options["requests"] or (None if options["trace"] else _DEFAULT_REQUESTS)
    arrivals = list(itertools.islice(arrivals_of(options), most))
    began = time.perf_counter()
    result = Simulation(config, cost, Assumptions(options["max_tokens"], is_blind=options["blind"])).run(arrivals)
    seconds = time.perf_counter() - began
    summary = summarise(result.records, slo_of(options))
    title = f"{cost.shape.name} on {cost.hardware.name}: {len(arrivals):,} requests"
    lines = [
        title,
        "",
        *summary_lines(summary, has_slo=has_slo(options)),
        "",
        *_device_lines(result),
        "",
        f"simulated in {seconds:.1f} s",
    ]
    figures = {"simulation": _figures(result, seconds), **summary.as_json()}
    show(options, lines, figures, _panels(result), title)


def _shape(options: dict[str, Any]) -> ModelShape:
    try:
        return find_shape(options["model"], options["dtype"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _hardware(options: dict[str, Any]) -> Hardware:
    names = {
        "compute_flops": "compute_flops",
        "bandwidth_bytes": "bandwidth_bytes",
        "latency": "latency_s",
        "memory_bytes": "memory_bytes",
    }
    changed = {field: options[name] for name, field in names.items() if options[name] is not None}
    return dataclasses.replace(HARDWARE[options["hardware"]], **changed)


def _config(options: dict[str, Any], cost: CostModel) -> SchedulerConfig:
    num_blocks = options["num_kv_blocks"] or cost.num_blocks(
        options["block_size"], memory_fraction=options["memory_fraction"]
    )
    if num_blocks < 1:
        raise CommandError(
            f"{cost.shape.name} needs {cost.shape.weight_bytes:,} bytes for its weights alone, and "
            f"{cost.hardware.name} may use {options['memory_fraction']:g} of {cost.hardware.memory_bytes:,}: "
            "choose other --hardware, or more --memory-bytes"
        )
    try:
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=options["block_size"],
            max_running=options["max_num_seqs"],
            max_step_tokens=options["max_num_batched_tokens"],
            prefix_caching=not options["no_prefix_caching"],
            max_queued_requests=options["max_queued_requests"],
            max_queued_tokens=2**62,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _device_lines(result: SimulationResult) -> list[str]:
    steps, blocks = max(1, result.num_steps), result.num_blocks
    return pair_lines(
        [
            ("device busy", f"{100 * _share(result.busy_s, result.duration_s):.1f} % of the time"),
            ("steps", f"{result.num_steps:,}, {result.num_step_tokens / steps:,.1f} tokens each"),
            ("blocks", f"peak {result.num_blocks_peak:,}, mean {result.num_blocks_mean:,.0f} of {blocks:,}"),
            ("preemptions", f"{result.num_preemptions:,}"),
            ("running", f"peak {result.num_running_peak:,}"),
            ("waiting", f"peak {result.num_waiting_peak:,}, mean {result.num_waiting_mean:,.1f}"),
        ]
    )


def _figures(result: SimulationResult, seconds: float) -> dict[str, Any]:
    names = [
        *("duration_s", "busy_s", "num_steps", "num_step_tokens", "num_preemptions", "num_blocks", "num_blocks_peak"),
        *("num_blocks_mean", "num_running_peak", "num_waiting_peak", "num_waiting_mean"),
    ]
    return {name.removeprefix("num_"): getattr(result, name) for name in names} | {"wall_s": seconds}


def _panels(result: SimulationResult) -> list[Panel]:
    times = result.series.times_s
    columns = result.series.columns

    def over_time(title: str, *names: str) -> Panel:
        return Panel(title, "seconds", [Line(name, times, columns[name]) for name in names])

    return [
        over_time("Sequences", "running", "waiting"),
        over_time(f"KV blocks held, of {result.num_blocks:,}", "blocks used"),
        over_time("Output tokens a second", "tokens/s"),
        Panel(
            "Share of requests, in percent",
            "seconds",
            [
                cumulative("time to first token", (record.ttft_s for record in result.records)),
                cumulative("latency", (record.latency_s for record in result.records if record.is_finished)),
            ],
        ),
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
