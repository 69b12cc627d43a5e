"""`stepwire slice`."""

import time
from pathlib import Path
from typing import Literal

import click

from loader.hf_config import DTYPES
from stepwire.cli.checks.finding import human_bytes

_REPORT_EVERY_S = 5.0


@click.command(name="slice")
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", help="Type to store.")
def slice_(
    checkpoint: str, out: Path, tp: int, pp: int, dtype: Literal["auto", "float32", "float16", "bfloat16"]
) -> int:
    """Slice CHECKPOINT ahead for --tp times --pp ranks, into the new folder OUT.

    A rank of that split then reads one file from end to end; any other split can load OUT too. OUT appears when it is
    whole, and not at all when something fails.
    """
    from loader.checkpoint import open_checkpoint
    from loader.formats.slicing import Split, slice_checkpoint
    from loader.sources.resolve import resolve

    began = time.monotonic()
    shown = began

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _REPORT_EVERY_S:
            shown = time.monotonic()
            click.echo(f"{human_bytes(done)} of {human_bytes(total)}", err=True)

    with resolve(checkpoint, report=lambda text: click.echo(text, err=True)) as found:
        opened = open_checkpoint(found.path)
        total = slice_checkpoint(
            opened, out.absolute(), Split(tp, pp, dtype), progress=progress, cancelled=lambda: False
        )
    click.echo(f"{out}: {human_bytes(total)} for tp {tp}, pp {pp}, in {time.monotonic() - began:.1f} s")
    return 0
