"""The server that a command talks to, and what to say when it cannot."""

from collections.abc import Callable
from typing import Any

import click

from stepwire.cli.errors import CommandError

DEFAULT_TARGET = "127.0.0.1:50051"


def target_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--target`."""
    return click.option(
        "--target",
        envvar="STEPWIRE_TARGET",
        default=DEFAULT_TARGET,
        show_default=False,
        metavar="HOST:PORT",
        help=f"Server to talk to. [STEPWIRE_TARGET; {DEFAULT_TARGET}]",
    )(function)


def tenant_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--tenant`."""
    return click.option("--tenant", metavar="NAME", help="On whose account; those of one tenant share what it gets.")(
        function
    )


def unreachable(target: str, detail: str) -> CommandError:
    """Nobody answers at the target."""
    if ":" not in target:
        return CommandError(f"{target!r} names no port: give --target as HOST:PORT, such as {DEFAULT_TARGET}")
    if "refused" in detail.lower():
        return CommandError(f"nobody listens on {target}: start `stepwire serve`, or name another server with --target")
    return CommandError(f"{target} cannot be reached ({detail}): check the address, or name another with --target")


def explain_rpc_error(error: Any, target: str) -> CommandError:
    """A failed call that did not come from Stepwire's own code: health checks, other servers."""
    code, detail = error.code().name, error.details() or ""
    if code == "UNAVAILABLE":
        return unreachable(target, detail)
    if code == "DEADLINE_EXCEEDED":
        return CommandError(f"{target} did not answer in time; it may be overloaded, or not a gRPC server")
    if code == "UNIMPLEMENTED":
        return CommandError(f"{target} does not offer this call: it is not a Stepwire server, or an older one")
    return CommandError(f"{target}: {detail or code} ({code})")


def address(text: str, option: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises click.BadParameter."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not host:port, such as 127.0.0.1:4317", param_hint=option)
    return host, int(port)
