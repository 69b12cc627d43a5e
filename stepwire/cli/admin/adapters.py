"""`stepwire admin adapters`, `load-adapter` and `unload-adapter`."""

import dataclasses
import json
import os

import click

from stepwire.cli.admin.connection import admin_options, connect
from stepwire.cli.tables import print_table
from stepwire.client.admin_types import Adapter

_HEADINGS = ("NAME", "RANK", "BYTES", "REQUESTS", "CONTENT", "PATH")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@admin_options
def adapters(target: str, admin_key: str | None, timeout: float, model: str, *, as_json: bool) -> None:
    """List the adapters that requests may name."""
    with connect(target, admin_key) as client:
        found = client.list_adapters(model=model, timeout=timeout)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(adapter) for adapter in found], indent=2))
    else:
        print_table([_HEADINGS, *map(_row, found)])


@click.command()
@click.argument("name")
@click.argument("path")
@admin_options
def load_adapter(target: str, admin_key: str | None, timeout: float, model: str, name: str, path: str) -> None:
    """Load a LoRA adapter from the directory PATH of the workers' hosts, under NAME."""
    with connect(target, admin_key) as client:
        found = client.load_adapter(name, os.path.abspath(os.path.expanduser(path)), model=model, timeout=timeout)
    click.echo(f"{found.name}: rank {found.rank}, {found.num_bytes} bytes, content {found.fingerprint[:16]}")


@click.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Wait for the requests that have it, rather than fail.")
@admin_options
def unload_adapter(target: str, admin_key: str | None, timeout: float, model: str, name: str, *, wait: bool) -> None:
    """Take an adapter away."""
    with connect(target, admin_key) as client:
        client.unload_adapter(name, wait=wait, model=model, timeout=timeout)
    click.echo(f"{name} is unloaded")


def _row(adapter: Adapter) -> tuple[str, ...]:
    name = f"{adapter.name} (leaving)" if adapter.is_leaving else adapter.name
    return (
        *(name, str(adapter.rank), str(adapter.num_bytes), str(adapter.num_requests)),
        *(adapter.fingerprint[:16], adapter.path),
    )
