"""The client that a command calls a server with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from stepwire.cli.errors import CommandError
from stepwire.cli.target import target_option, tenant_option, unreachable
from stepwire.client import Client, StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.setup import Telemetry


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what `connect` reads, and the name of the model."""
    function = click.option(
        "--otlp-endpoint",
        envvar="STEPWIRE_OTLP_ENDPOINT",
        metavar="URL",
        help="Send this command's spans there. [STEPWIRE_OTLP_ENDPOINT]",
    )(function)
    function = click.option("--timeout", type=float, help="Seconds for the whole request; no limit by default.")(
        function
    )
    function = tenant_option(function)
    function = click.option("--adapter", default="", help="Name of a LoRA adapter; by default none.")(function)
    function = click.option("--model", default="", help="Name of the model; by default the first.")(function)
    return target_option(function)


@contextmanager
def connect(options: Mapping[str, Any]) -> Iterator[Client]:
    """A client by the options; says what to do when nobody answers. Spans are sent when it is left."""
    try:
        telemetry = Telemetry.start(names.SERVICE_CLIENT, otlp_endpoint=options["otlp_endpoint"])
    except ValueError as error:
        raise CommandError(f"--otlp-endpoint: {error}") from error
    try:
        with Client(
            options["target"], tenant=options.get("tenant"), tracer_provider=telemetry.tracer_provider
        ) as client:
            yield client
    except StepwireError as error:
        raise _friendly(error, options) from error
    finally:
        telemetry.shutdown()


def _friendly(error: StepwireError, options: Mapping[str, Any]) -> Exception:
    if "target" in error.metadata:
        return unreachable(options["target"], error.message)
    # Told by this side's clock; a deadline that the service tells of has a text of its own.
    if error.reason == "DEADLINE_EXCEEDED" and "grpc_code" in error.metadata:
        return CommandError(f"{options['target']} had not answered when --timeout was over")
    return error
