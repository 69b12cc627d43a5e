"""`stepwire models`."""

import dataclasses
import json
from typing import Any

import click

from stepwire.cli.connection import connect
from stepwire.cli.tables import print_table
from stepwire.cli.target import target_option
from stepwire.client.types import Model

_HEADINGS = ("NAME", "STATE", "ARCHITECTURE", "DTYPE", "CONTEXT", "RUNNING", "WAITING", "FREE BLOCKS")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the answer.")
@target_option
def models(target: str, timeout: float, *, as_json: bool) -> None:
    """List the models that a server serves, and how each one stands."""
    with connect({"target": target, "otlp_endpoint": None}) as client:
        found = client.list_models(timeout=timeout)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(model) for model in found], indent=2))
    else:
        print_table([_HEADINGS, *map(_row, found)])


def _row(model: Model) -> tuple[str, ...]:
    cells: tuple[Any, ...] = (
        model.name,
        model.state,
        model.architecture or "-",
        model.dtype or "-",
        model.max_model_len or "-",
        model.num_running,
        model.num_waiting,
        f"{model.num_free_blocks} of {model.num_blocks}",
    )
    return tuple(map(str, cells))
