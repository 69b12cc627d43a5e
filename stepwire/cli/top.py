"""`stepwire top`."""

import time

import click

from stepwire.cli.errors import EXIT_FAILURE

_DEFAULT_PORT = 9464


@click.command()
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@click.option(
    "--every", type=click.FloatRange(0.1, 3600.0), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="Look for that long, print what there is, and end; so it is off a terminal.")
def top(addresses: tuple[str, ...], every: float, once: bool) -> int:
    """Watch a server: queue, batch, KV blocks, tokens a second, workers.

    Asks the metrics ports of schedulers and workers, which --metrics-port opens; by default 127.0.0.1:9464 and, for
    the worker of `stepwire serve`, the port above.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rich.console import Console
    from rich.live import Live

    from stepwire.top.sample import changes, read
    from stepwire.top.view import render

    console = Console()
    # Into a pipe or a file there is no screen to draw on.
    once = once or not console.is_terminal
    urls = [_url(address) for address in addresses or (f"127.0.0.1:{_DEFAULT_PORT}", f"127.0.0.1:{_DEFAULT_PORT + 1}")]
    with ThreadPoolExecutor(len(urls)) as readers:
        before = list(readers.map(read, urls))
        if once:
            time.sleep(every)
            after = list(readers.map(read, urls))
            console.print(render(changes(before, after)))
            return EXIT_FAILURE if all(sample.error for sample in after) else 0
        with Live(render(changes(before, before)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                after = list(readers.map(read, urls))
                live.update(render(changes(before, after)), refresh=True)
                before = after


def _url(address: str) -> str:
    if address.startswith(("http://", "https://")):
        return address if address.endswith("/metrics") else f"{address.rstrip('/')}/metrics"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise click.BadParameter(f"{address!r} is not HOST:PORT", param_hint="HOST:PORT")
    return f"http://{address}/metrics"
