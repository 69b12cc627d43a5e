"""`stepwire admin load-model` and `unload-model`."""

import os

import click

from loader.sources.resolve import is_path
from stepwire.cli.admin.connection import LOAD_TIMEOUT_S, connect, server_options

# For what is to be done when the requests have ended.
_UNLOAD_TIMEOUT_S = 60.0


@click.command(name="load-model")
@click.argument("path")
@click.option("--name", default="", help="Name that clients use; by default the last part of PATH.")
@click.option(
    "--workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Idle worker that runs already, by rank; once for each. By default the server starts new ones.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another setting of the model, such as tp=2."
)
@server_options(LOAD_TIMEOUT_S)
def load_model(
    target: str,
    admin_key: str | None,
    timeout: float,
    path: str,
    name: str,
    *,
    workers: tuple[str, ...],
    settings: tuple[str, ...],
) -> None:
    """Serve one model more, from PATH on the server's hosts, beside those that are served. PATH may be a Hub id
    (org/name[@revision]) or a URL, which the server fetches.

    A load that fails changes nothing. It goes on when this command is interrupted.
    """
    values: dict[str, str] = {}
    for key, value in map(_pair, settings):
        if key in values:
            raise click.BadParameter(f"{key} is given twice", param_hint="--set")
        values[key] = value
    if is_path(path):
        path = os.path.abspath(os.path.expanduser(path))
    with connect(target, admin_key) as client:
        found = client.load_model(path, name=name, workers=workers, settings=values, timeout=timeout)
    click.echo(f"{found.name} is served: {found.architecture}, {found.dtype}, {found.num_blocks} KV blocks")


@click.command(name="unload-model")
@click.argument("name")
@click.option(
    "--drain", "drain_s", type=float, help="Seconds for the requests that run; by default --shutdown-timeout."
)
@server_options(_UNLOAD_TIMEOUT_S)
def unload_model(target: str, admin_key: str | None, timeout: float, name: str, *, drain_s: float | None) -> None:
    """Take a model out of service and give its workers' memory back."""
    with connect(target, admin_key) as client:
        client.unload_model(name, drain_s=drain_s, timeout=timeout + (drain_s or 0.0))
    click.echo(f"{name} is unloaded")


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--set")
    return key.replace("-", "_"), value
