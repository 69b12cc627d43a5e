"""Plain tables on standard output."""

from collections.abc import Sequence

import click


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of equally many cells, the headings first, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def ago(seconds: float) -> str:
    """How long ago something was, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
