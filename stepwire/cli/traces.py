"""`stepwire traces`."""

import asyncio
import signal
from typing import TYPE_CHECKING, BinaryIO

import click

from stepwire.cli.errors import CommandError
from stepwire.cli.target import address

if TYPE_CHECKING:
    from stepwire.traces.page import Page
    from stepwire.traces.store import TraceStore

DEFAULT_LISTEN = "127.0.0.1:4317"
DEFAULT_PAGE = "127.0.0.1:16686"


@click.group(invoke_without_command=True)
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="Where to receive, by OTLP/gRPC."
)
@click.option(
    "--page", default=DEFAULT_PAGE, show_default=True, metavar="HOST:PORT|none", help="Where to serve the HTML page."
)
@click.pass_context
def traces(context: click.Context, listen: str, page: str) -> None:
    """Receive traces, print each one that is finished, and serve a page of recent ones.

    Point services and clients at it with --otlp-endpoint. Keeps the newest traces in memory, until
    Ctrl-C.
    """
    if context.invoked_subcommand is None:
        asyncio.run(_receive(address(listen, "--listen"), None if page == "none" else address(page, "--page")))


_page_option = click.option(
    "--page",
    default=DEFAULT_PAGE,
    show_default=True,
    metavar="HOST:PORT",
    help="The page of the `stepwire traces` that has the trace.",
)


@traces.command(short_help="Print one trace as a waterfall.")
@click.argument("wanted", metavar="[TRACE_OR_REQUEST_ID]", default="")
@_page_option
def show(wanted: str, page: str) -> None:
    """Print one trace as a waterfall: by id, by request id, or the latest one."""
    from rich.console import Console

    from stepwire.cli.trace_page import fetch_trace
    from stepwire.traces.waterfall import render_waterfall

    Console().print(render_waterfall(fetch_trace(address(page, "--page"), wanted)))


@traces.command("list", short_help="List traces: the newest, the slowest, those that failed.")
@click.argument("text", default="")
@click.option("--slowest", is_flag=True, help="The longest first.")
@click.option("--failed", is_flag=True, help="Only those with an error.")
@click.option("--kind", type=click.Choice(["all", "requests", "steps", "starts"]), default="all", show_default=True)
@click.option("--limit", type=click.IntRange(1, 500), default=20, show_default=True)
@_page_option
def list_(text: str, slowest: bool, failed: bool, kind: str, limit: int, page: str) -> None:
    """List traces in which TEXT is found: a request id, a model, a span's name, any attribute."""
    from stepwire.cli.tables import print_table
    from stepwire.cli.trace_page import fetch_list
    from stepwire.traces.waterfall import format_duration, printable

    query = {"text": text, "order": "slowest" if slowest else "", "errors": int(failed), "kind": kind, "limit": limit}
    rows = [["trace", "duration", "request", "outcome", "name"]]
    for found in fetch_list(address(page, "--page"), **query):
        lasted = format_duration(round(found["duration_ms"] * 1e6))
        words = [found["trace_id"], lasted, found["request_id"] or "", found["outcome"], found["name"]]
        rows.append([printable(str(word)) for word in words])
    print_table(rows)


@traces.command(short_help="Write one trace to a file, for other tools.")
@click.argument("wanted", metavar="[TRACE_OR_REQUEST_ID]", default="")
@click.option("--form", type=click.Choice(["json", "otlp-json", "otlp"]), default="otlp-json", show_default=True)
@click.option("-o", "--output", type=click.File("wb"), default="-", help="The file; standard output by default.")
@_page_option
def export(wanted: str, form: str, output: BinaryIO, page: str) -> None:
    """Write one trace as OTLP, in JSON or binary, or as this viewer's own JSON: by id, by request id, or the latest."""
    from stepwire.cli.trace_page import fetch_export

    output.write(fetch_export(address(page, "--page"), wanted, form))


async def _receive(listen: tuple[str, int], page: tuple[str, int] | None) -> None:
    from rich.console import Console

    from stepwire.cli.trace_feed import finished_traces
    from stepwire.rpc.server import AddressInUse
    from stepwire.traces.receiver import serve_receiver
    from stepwire.traces.store import TraceStore
    from stepwire.traces.waterfall import render_waterfall

    store, console = TraceStore(), Console()
    try:
        receiver = await serve_receiver(store, *listen)
    except AddressInUse as error:
        host, port = listen
        text = f"{host}:{port} is in use by another process: stop it, or choose another address with --listen"
        raise CommandError(text) from error
    served = None
    try:
        click.echo(
            f"receiving traces on {receiver.endpoint}; give services --otlp-endpoint {receiver.endpoint}", err=True
        )
        if page is not None:
            served = _serve_page(store, *page)
            click.echo(f"showing them on {served.url}", err=True)
        stop = _stop_on_signal()
        async for trace in finished_traces(store, stop):
            console.print(render_waterfall(trace))
            console.print()
    finally:
        if served is not None:
            served.close()
        await receiver.stop()


def _serve_page(store: "TraceStore", host: str, port: int) -> "Page":
    from stepwire.rpc.server import AddressInUse
    from stepwire.traces.page import serve_page

    try:
        return serve_page(store, host, port)
    except AddressInUse as error:
        text = f"{host}:{port} is in use by another process: stop it, or choose another address with --page, or none"
        raise CommandError(text) from error


def _stop_on_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
