"""The client that a command operates a server with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from stepwire.cli.errors import CommandError
from stepwire.cli.target import target_option, unreachable
from stepwire.client.admin import AdminClient
from stepwire.rpc.errors import StepwireError

VARIABLE = "STEPWIRE_ADMIN_KEY"
# A start takes what the storage takes.
LOAD_TIMEOUT_S = 1800.0


def server_options(timeout: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds `--target`, `--admin-key` and `--timeout`, by default so many seconds."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        help_text = "Seconds to wait for the answer."
        function = click.option("--timeout", default=timeout, show_default=True, help=help_text)(function)
        help_text = f"The server's admin key; a variable is not seen by other users of the machine. [{VARIABLE}]"
        function = click.option("--admin-key", envvar=VARIABLE, metavar="TEXT", help=help_text)(function)
        return target_option(function)

    return decorate


def model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--model`."""
    return click.option("--model", default="", metavar="NAME", help="Name of the model; by default the first.")(
        function
    )


def admin_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all of these."""
    return server_options(60.0)(model_option(function))


@contextmanager
def connect(target: str, admin_key: str | None) -> Iterator[AdminClient]:
    """A client; says what to do when nobody answers, or not to this key."""
    if not admin_key:
        raise CommandError(f"the server's admin key is missing: set {VARIABLE}, or give --admin-key")
    try:
        with AdminClient(target, key=admin_key) as client:
            yield client
    except StepwireError as error:
        raise _friendly(error, target) from error


def _friendly(error: StepwireError, target: str) -> Exception:
    code = error.metadata.get("grpc_code")
    if "target" in error.metadata:
        return unreachable(target, error.message)
    if code == "UNIMPLEMENTED":
        return CommandError(f"{target} has no AdminService: start it with an admin key (--admin-key, {VARIABLE})")
    if error.reason == "UNAUTHENTICATED":
        return CommandError(f"{target} has another admin key than the one given: set {VARIABLE} to the server's")
    if error.reason == "DEADLINE_EXCEEDED" and code is not None:
        return CommandError(f"{target} had not answered when --timeout was over")
    return error
