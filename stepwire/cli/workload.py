"""Options that describe a workload, for `simulate` and `bench`, and what both print."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from stepwire.simulation.arrivals import Arrival, Lengths, Mix, parse_lengths, poisson_arrivals, read_trace, speed_up
from stepwire.simulation.records import Slo
from stepwire.simulation.svg import Panel, render_svg


class LengthsType(click.ParamType[Lengths]):
    """A distribution of lengths."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """Raises click.BadParameter saying which forms there are."""
        if isinstance(value, Lengths):
            return value
        try:
            return parse_lengths(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_POSITIVE = click.FloatRange(min=0, min_open=True)
_SHARE = click.FloatRange(0, 1)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LENGTHS_HELP = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX]"

_OPTIONS: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = (
    (("--rate",), {"type": _POSITIVE, "help": "Requests a second, arriving at random (Poisson)."}),
    (("--trace",), {"type": _FILE, "help": "CSV with TIMESTAMP, ContextTokens and GeneratedTokens."}),
    (("--speed",), {"type": _POSITIVE, "default": 1.0, "help": "Play the trace so many times as fast."}),
    (("--requests",), {"type": click.IntRange(1, 10_000_000), "help": "Most requests."}),
    (("--prompt-tokens",), {"type": LengthsType(), "default": "256", "help": f"Length of prompts: {_LENGTHS_HELP}."}),
    (("--output-tokens",), {"type": LengthsType(), "default": "128", "help": f"Length of answers: {_LENGTHS_HELP}."}),
    (
        ("--prefix-share",),
        {"type": _SHARE, "default": 0.0, "help": "Share of prompts that begin with a shared prefix."},
    ),
    (("--prefixes",), {"type": click.IntRange(1), "default": 1, "help": "Number of shared prefixes."}),
    (("--prefix-tokens",), {"type": click.IntRange(1), "default": 512, "help": "Length of a shared prefix."}),
    (("--high-share",), {"type": _SHARE, "default": 0.0, "help": "Share of requests with priority 1; others have 0."}),
    (("--deadline",), {"type": _POSITIVE, "help": "Seconds from arrival that every request may take."}),
    (("--slo-ttft",), {"type": _POSITIVE, "help": "Seconds to the first token within which a request is good."}),
    (("--slo-tpot",), {"type": _POSITIVE, "help": "Seconds per output token within which a request is good."}),
    (("--seed",), {"type": int, "default": 0, "help": "Of everything random here."}),
    (("--json", "as_json"), {"is_flag": True, "help": "All figures as one JSON object, and nothing else."}),
    (
        ("--plot",),
        {"type": click.Path(dir_okay=False, writable=True, path_type=Path), "help": "Write charts to this SVG file."},
    ),
)


def workload_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a workload and of its report."""
    for names, keywords in reversed(_OPTIONS):
        function = click.option(*names, **keywords)(function)
    return function


def arrivals_of(options: Mapping[str, Any]) -> Iterator[Arrival]:
    """The arrivals that the options describe, in order of time, without end unless they come from a trace.

    Without a rate all lengths are drawn, and every arrival is at 0. Raises click.UsageError.
    """
    if options["trace"] is not None and options["rate"] is not None:
        raise click.UsageError("--rate and --trace exclude each other: a trace has times of its own; see --speed")
    rng = random.Random(options["seed"])
    mix = Mix(
        high_share=options["high_share"],
        deadline_s=options["deadline"],
        prefix_share=options["prefix_share"],
        num_prefixes=options["prefixes"],
        num_prefix_tokens=options["prefix_tokens"],
    )
    if options["trace"] is not None:
        try:
            plain = iter(speed_up(read_trace(options["trace"], max_requests=options["requests"]), options["speed"]))
        except (ValueError, UnicodeDecodeError) as error:
            raise click.BadParameter(str(error), param_hint="--trace") from error
    elif options["rate"] is not None:
        plain = poisson_arrivals(options["rate"], options["prompt_tokens"], options["output_tokens"], rng)
    else:
        plain = _at_once(options["prompt_tokens"], options["output_tokens"], rng)
    return mix.apply(plain, random.Random(f"mix {options['seed']}"))


def slo_of(options: Mapping[str, Any]) -> Slo:
    """What counts as good."""
    return Slo(options["slo_ttft"], options["slo_tpot"])


def has_slo(options: Mapping[str, Any]) -> bool:
    """Whether the options say what counts as good."""
    return any(options[name] is not None for name in ("slo_ttft", "slo_tpot", "deadline"))


def show(
    options: Mapping[str, Any], lines: list[str], figures: Mapping[str, Any], panels: list[Panel], title: str
) -> None:
    """Prints the report as text or as JSON, and writes the charts where they were asked for."""
    if options["plot"] is not None:
        options["plot"].write_text(render_svg(title, panels), encoding="utf-8")
    click.echo(json.dumps(figures) if options["as_json"] else "\n".join(lines))


def _at_once(prompt: Lengths, output: Lengths, rng: random.Random) -> Iterator[Arrival]:
    while True:
        yield Arrival(0.0, prompt.draw(rng), output.draw(rng))
