"""Models of one service as texts: a line for each, `model=PATH,KEY=VALUE,...`, as CSV with its quotes.

A key that comes twice has a list of values.
"""

import csv
import io
from collections.abc import Mapping

Entry = Mapping[str, object]


def parse_entries(text: str) -> list[Entry]:
    """The entries of one or more lines. Raises ValueError."""
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"{text!r} is not KEY=VALUE,KEY=VALUE,...: {error}") from error
    return [_entry(cells) for row in rows if (cells := [cell.strip() for cell in row if cell.strip()])]


def entry_text(entry: Entry) -> str:
    """An entry as a line that `parse_entries` reads."""
    cells = []
    for key, value in entry.items():
        values = value if isinstance(value, list) else [value]
        cells += [f"{key}={each}" for each in values]
    output = io.StringIO()
    # Its own line end makes it put line ends of values in quotes.
    csv.writer(output, lineterminator="\n").writerow(cells)
    return output.getvalue().removesuffix("\n")


def _entry(cells: list[str]) -> Entry:
    found: dict[str, object] = {}
    for cell in cells:
        key, separator, value = cell.partition("=")
        if not separator:
            raise ValueError(f"{cell!r} is not KEY=VALUE, such as model=PATH")
        before = found.get(key)
        if before is None:
            found[key] = value
        else:
            found[key] = [*before, value] if isinstance(before, list) else [before, value]
    return found
