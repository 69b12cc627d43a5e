"""`stepwire admin add-replica` and `drain-replica`."""

import click

from stepwire.cli.admin.connection import LOAD_TIMEOUT_S, admin_options, connect, model_option, server_options


@click.command(name="add-replica")
@click.argument("workers", nargs=-1, required=True, metavar="HOST:PORT...")
@server_options(LOAD_TIMEOUT_S)
@model_option
def add_replica(target: str, admin_key: str | None, timeout: float, model: str, workers: tuple[str, ...]) -> None:
    """Serve on more workers, by rank: idle ones that run already (`stepwire worker`)."""
    with connect(target, admin_key) as client:
        number = client.add_replica(workers, model=model, timeout=timeout)
    click.echo(f"replica {number} serves")


@click.command(name="drain-replica")
@click.argument("replica", type=int)
@admin_options
def drain_replica(target: str, admin_key: str | None, timeout: float, model: str, replica: int) -> None:
    """Take a replica out of service; its requests go on with the others, and its workers stay."""
    with connect(target, admin_key) as client:
        client.drain_replica(replica, model=model, timeout=timeout)
    click.echo(f"replica {replica} holds no request")
