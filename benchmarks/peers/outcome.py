"""Bars, figures and the table of a comparison, from what was measured. Standard library only."""

from collections.abc import Iterator
from statistics import median

from benchmarks.peers.rates import ratio, table
from benchmarks.peers.rows import MIN_BANDWIDTH_SHARE, OURS, START, START_LIMITS, Limit, Measured, Options
from benchmarks.report import Bar


def comparisons(options: Options, measured: Measured) -> Iterator[tuple[str, str, Limit, float | None]]:
    """(row, peer, limit, ratio) of everything that was to be compared; the ratio is None where it was not measured."""
    for row in options.rows:
        rates = measured.rates.get(row.key, {})
        for peer, limit in row.limits.items():
            if peer in options.peers:
                yield row.key, peer, limit, ratio(rates.get(OURS, []), rates.get(peer, []))
    if options.starts:
        starts = measured.starts
        for peer, limit in START_LIMITS.items():
            if peer in options.peers:
                yield START, peer, limit, ratio(starts.get(peer, []), starts.get(OURS, []))


def bars(options: Options, measured: Measured) -> dict[str, Bar]:
    """Every bar that was to be measured; bounds are the floors."""
    found = {
        f"{key}_{peer}": Bar(_rounded(value), limit.floor) for key, peer, limit, value in comparisons(options, measured)
    }
    if any(row.key == "big_b1" for row in options.rows):
        share = None
        if measured.bandwidth and measured.used_bandwidth:
            share = measured.used_bandwidth / measured.bandwidth
        found["big_b1_bandwidth"] = Bar(_rounded(share), MIN_BANDWIDTH_SHARE)
    return found


def figures(options: Options, measured: Measured) -> dict[str, object]:
    """What the report says beside the bars."""
    return {
        "goals": {f"{key}_{peer}": limit.goal for key, peer, limit, _ in comparisons(options, measured)},
        "tokens_per_s": {key: _round_all(rates, 1) for key, rates in measured.rates.items()},
        "start_s": _round_all(measured.starts, 2),
        "bandwidth_gb_per_s": None if measured.bandwidth is None else round(measured.bandwidth / 1e9, 1),
        "agreeing_tokens": measured.agreeing_tokens,
        "failed": measured.failed,
    }


def summary(options: Options, measured: Measured) -> str:
    """The table that people read: medians, and behind each peer's the ratio with its floor and goal."""
    header = ["row", OURS]
    for peer in options.peers:
        header += [peer, f"x {peer}", f"floor/goal {peer}"]
    lines: dict[str, dict[str, object]] = {}
    medians = {row.key: measured.rates.get(row.key, {}) for row in options.rows}
    if options.starts:
        medians[START] = measured.starts
    for key, values in medians.items():
        lines[key] = {"row": key, **{name: f"{median(found):,.1f}" for name, found in values.items() if found}}
    for key, peer, limit, value in comparisons(options, measured):
        lines[key][f"floor/goal {peer}"] = f"{limit.floor:g}/{limit.goal:g}"
        if value is not None:
            lines[key][f"x {peer}"] = f"{value:.2f}"
    what = f"Tokens/s, and seconds for {START}; x is how many times as fast {OURS} is."
    return f"{table(header, list(lines.values()))}\n{what}"


def _round_all(values: dict[str, list[float]], digits: int) -> dict[str, list[float]]:
    return {name: [round(value, digits) for value in found] for name, found in values.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
