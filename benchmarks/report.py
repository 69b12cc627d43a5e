"""How every benchmark ends: one line of JSON with its bars and figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bar:
    """A value that must be "at least" or "at most" a bound; None when it could not be measured."""

    value: float | None
    bar: float
    kind: Literal["at least", "at most"] = "at least"

    @property
    def ok(self) -> bool:
        """Whether it holds; what was not measured, and NaN, never do."""
        if self.value is None:
            return False
        return self.value >= self.bar if self.kind == "at least" else self.value <= self.bar


def report(bars: Mapping[str, Bar], figures: Mapping[str, object]) -> int:
    """Prints the last line; answers the exit status, 0 because something was measured, whether or not bars hold."""
    ok = all(bar.ok for bar in bars.values())
    rows = {key: {"value": bar.value, "bar": bar.bar, "ok": bar.ok} for key, bar in bars.items()}
    print(json.dumps({"ok": ok, "bars": rows, "figures": figures}), flush=True)
    return 0
