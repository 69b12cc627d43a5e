"""`stepwire admin flight`."""

from pathlib import Path

import click

from stepwire.cli.admin.connection import admin_options, connect
from stepwire.cli.files import output_option, write_private


@click.command()
@output_option("stepwire.flight", "File to write.")
@admin_options
def flight(target: str, admin_key: str | None, timeout: float, model: str, output: Path) -> None:
    """Write down the last steps of a server's workers.

    `stepwire replay` runs them again. The file holds the token ids of requests.
    """
    with connect(target, admin_key) as client:
        recording = client.get_flight(model=model, timeout=timeout)
    write_private(output, recording)
    click.echo(f"{output}: {len(recording):,} bytes; run it again with: stepwire replay {output}")
