"""`stepwire health`."""

import asyncio

import click

from stepwire.cli.errors import EXIT_FAILURE, CommandError
from stepwire.cli.target import target_option


@click.command()
@target_option
@click.option("--service", default="", help="Full name of one service; by default the whole server.")
@click.option("--timeout", default=3.0, show_default=True, help="Seconds to wait for the answer.")
def health(target: str, service: str, timeout: float) -> int:
    """Ask a server whether it serves. Exits with 0 only when it does; works with any gRPC server."""
    import grpc

    from stepwire.cli.health_check import ask
    from stepwire.cli.target import explain_rpc_error

    try:
        status = asyncio.run(ask(target, service, timeout))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            hint = "a model's is stepwire.v1.InferenceService/NAME, with a name of `stepwire models`"
            raise CommandError(f"{target} has no service {service!r}; {hint}") from error
        raise explain_rpc_error(error, target) from error
    click.echo(status)
    return 0 if status == "SERVING" else EXIT_FAILURE
