"""`stepwire admin state`."""

import dataclasses
import json

import click

from stepwire.cli.admin.connection import admin_options, connect
from stepwire.cli.tables import ago, print_table
from stepwire.client.admin_types import ServerState

_HEADINGS = ("REPLICA", "RANK", "ADDRESS", "HOST", "PID", "LAST SEEN")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@admin_options
def state(target: str, admin_key: str | None, timeout: float, model: str, *, as_json: bool) -> None:
    """Show how a server, its queue and its workers stand, model by model.

    JSON is of one model, and names all.
    """
    with connect(target, admin_key) as client:
        found = [client.get_state(model=model, timeout=timeout)]
        if not model and not as_json:
            found += [client.get_state(model=name, timeout=timeout) for name in found[0].models[1:]]
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found[0]), indent=2))
        return
    for each in found:
        _print(each)


def _print(found: ServerState) -> None:
    model = found.model
    click.echo(f"{model.name}: {model.state}, epoch {found.epoch}, up {found.uptime_s:.0f} s")
    click.echo(
        f"{found.num_calls} calls, {model.num_running} sequences running, {model.num_waiting} waiting, "
        f"{model.num_free_blocks} of {model.num_blocks} KV blocks free"
    )
    rows = [
        (
            str(worker.replica),
            str(worker.rank),
            worker.address,
            worker.host,
            str(worker.process_id),
            ago(worker.silent_s),
        )
        for worker in found.workers
    ]
    print_table([_HEADINGS, *rows])
