"""`stepwire admin sleep` and `stepwire admin wake`."""

import click

from stepwire.cli.admin.connection import admin_options, connect


@click.command()
@click.option("--drop-weights", is_flag=True, help="Give back the weights' memory too; waking up loads them again.")
@admin_options
def sleep(target: str, admin_key: str | None, timeout: float, model: str, *, drop_weights: bool) -> None:
    """Have the workers give their devices' memory back once nothing runs.

    When --timeout is over while sequences still run, everything goes on.
    """
    with connect(target, admin_key) as client:
        client.sleep(drop_weights=drop_weights, model=model, timeout=timeout)
    click.echo("the workers sleep")


@click.command()
@admin_options
def wake(target: str, admin_key: str | None, timeout: float, model: str) -> None:
    """Have the workers take their memory again, and go on."""
    with connect(target, admin_key) as client:
        client.wake_up(model=model, timeout=timeout)
    click.echo("the workers are awake")
