"""`stepwire profile`."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from stepwire.cli.admin.connection import admin_options, connect
from stepwire.cli.files import output_option, write_private
from stepwire.cli.tables import print_table
from stepwire.client.admin_types import ProfileRow, RankProfile

_LAYER = "layer "


@click.command(name="profile")
@click.option("--steps", default=20, show_default=True, help="Steps to profile; at most 200.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for steps to run.")
@output_option("stepwire-profile.json.gz", "File for the timeline.")
@click.option("--rows", "num_rows", default=20, show_default=True, help="Rows of the table.")
@admin_options
def profile_command(output: Path, *, steps: int, wait_s: float, num_rows: int, **options: Any) -> None:
    """Profile the next steps of a server's workers.

    Writes one timeline of scheduler and ranks, for https://ui.perfetto.dev or chrome://tracing, and prints where the
    time went. Steps run while requests do: profile under load.
    """
    with connect(options["target"], options["admin_key"]) as client:
        timeout = wait_s + options["timeout"]
        found = client.profile(steps, wait_s=wait_s, model=options["model"], timeout=timeout)
    write_private(output, found.timeline)
    for rank, profile in enumerate(found.ranks):
        click.echo(f"rank {rank}, {profile.num_steps} steps")
        _print(profile, num_rows)
    click.echo(f"timeline: {output}")


def _print(profile: RankProfile, num_rows: int) -> None:
    """By part, then by operator over all layers; milliseconds a step."""
    rows, num_steps = profile.rows, max(profile.num_steps, 1)
    on_device = any(row.device_s for row in rows)

    def seconds(row: ProfileRow) -> float:
        return row.device_s if on_device else row.cpu_s

    total = sum(map(seconds, rows)) or 1.0
    for heading, key in (("PART", _part), ("OPERATOR", _operator)):
        sums: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        for row in rows:
            sums[key(row)] += seconds(row)
            calls[key(row)] += row.num_calls
        ordered = sorted(sums, key=lambda name: -sums[name])[:num_rows]
        lines = [_line(name, calls[name] / num_steps, sums[name] / num_steps, sums[name] / total) for name in ordered]
        print_table([(heading, "CALLS/STEP", "MS/STEP", "SHARE"), *lines])
        click.echo()


def _part(row: ProfileRow) -> str:
    return row.part


def _operator(row: ProfileRow) -> str:
    """What is left of layers beside their operators is one operator."""
    return "layer" if row.operator.startswith(_LAYER) else row.operator


def _line(name: str, calls: float, seconds: float, share: float) -> tuple[str, str, str, str]:
    return name, f"{calls:.1f}", f"{seconds * 1e3:.3f}", f"{share:.1%}"
