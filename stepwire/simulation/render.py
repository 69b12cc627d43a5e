"""The figures of a run as text."""

from collections.abc import Sequence

from stepwire.simulation.records import PERCENTILES, Summary

_NAMES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "latency_s": "latency",
    "wait_s": "wait in the queue",
}


def summary_lines(summary: Summary, *, has_slo: bool = True) -> list[str]:
    """Counts and rates, then a table of times in milliseconds; goodput only where something says what is good."""
    rows = [
        ("requests", f"{summary.num_requests:,} in {summary.duration_s:,.1f} s"),
        ("finished", f"{summary.num_finished:,} ({summary.requests_per_s:,.2f}/s)"),
        *([("within the SLO", f"{summary.num_good:,} ({summary.goodput:,.2f}/s)")] if has_slo else []),
        ("output tokens", f"{summary.num_output_tokens:,} ({summary.output_tokens_per_s:,.1f}/s)"),
        ("prompt tokens", f"{summary.num_prompt_tokens:,}, {summary.num_cached_tokens:,} of them cached"),
        *((f"failed: {reason}", f"{count:,}") for reason, count in summary.errors.items()),
    ]
    header = ("milliseconds", "mean", *(f"p{p}" for p in PERCENTILES), "max")
    table: list[Sequence[str]] = [header]
    for key, distribution in summary.distributions().items():
        if distribution.num:
            values = (distribution.mean, *distribution.percentiles.values(), distribution.largest)
            table.append((_NAMES[key], *(f"{1000 * value:,.1f}" for value in values)))
    return [*pair_lines(rows), "", *_columns(table)]


def pair_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and what they stand for."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]
