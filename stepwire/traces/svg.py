"""A trace as a picture: the tree of spans over time, and under it the steps that it links to, rank by rank."""

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from stepwire.telemetry import names
from stepwire.traces.store import Span, Trace
from stepwire.traces.waterfall import format_duration, printable

_WIDTH, _ROW, _HEAD, _MARGIN = 960, 20, 64, 16
_NAME_WIDTH, _TIME_WIDTH = 250, 76
_BAR_X = _MARGIN + _NAME_WIDTH
_BAR_WIDTH = _WIDTH - _BAR_X - _TIME_WIDTH - _MARGIN
_MAX_ROWS = 60
_COLOURS = ("#2a78c2", "#2f9e62", "#8a52b8", "#c47f17", "#c2477a", "#148f8a")
_PART_COLOURS = {
    names.SPAN_STEP_PREPARE: "#c47f17",
    names.SPAN_STEP_FORWARD: "#2f9e62",
    names.SPAN_STEP_SAMPLE: "#8a52b8",
}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.dim{fill:#656d76}.head{font-weight:600}"
    ".mark{font-size:10px;fill:#fff}.page{fill:#fff}.grid{stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8d96a0}.page{fill:#0d1117}.grid{stroke:#30363d}}"
)


def render_svg(trace: Trace, steps: Sequence[Trace] = ()) -> str:
    """A picture of a trace; `steps` are traces of steps to show beside it on the same axis of time."""
    rows = [*_tree_rows(trace), *_step_rows(trace, steps)]
    height = _HEAD + _ROW * len(rows) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>',
        *_head(trace, height),
    ]
    for number, row in enumerate(rows):
        parts += [f'<g transform="translate(0 {_HEAD + _ROW * number})">', *row, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; `kind` is a class of the style: "dim" or "head"."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{_escaped(words)}</text>'


def _head(trace: Trace, height: int) -> Iterator[str]:
    yield text(_MARGIN, 24, f"{trace.root.name} · {format_duration(trace.duration_ns)}", "head")
    x = float(_MARGIN)
    for service, colour in _colours(trace).items():
        yield f'<rect x="{x:g}" y="36" width="10" height="10" rx="2" fill="{colour}"/>'
        yield text(x + 15, 45, service, "dim")
        x += 32 + 6.5 * len(service)
    for quarter in range(5):
        at = _BAR_X + _BAR_WIDTH * quarter / 4
        yield f'<line class="grid" x1="{at:g}" x2="{at:g}" y1="{_HEAD - 4}" y2="{height - _MARGIN / 2:g}"/>'
        yield text(at, _HEAD - 8, format_duration(trace.duration_ns * quarter // 4), "dim", "middle")


def _tree_rows(trace: Trace) -> Iterator[Iterable[str]]:
    colours = _colours(trace)
    for depth, span in trace.tree[:_MAX_ROWS]:
        yield [
            text(_MARGIN + 12 * min(depth, 8), 14, _label(span, depth)),
            _bar(trace, span, "#d1242f" if span.is_error else colours[span.service]),
            *(_mark(trace, event.name, event.time_ns) for event in span.events),
            text(_WIDTH - _MARGIN, 14, format_duration(span.duration_ns), "dim", "end"),
        ]


def _step_rows(trace: Trace, steps: Sequence[Trace]) -> Iterator[Iterable[str]]:
    """One row for the steps as wholes, and one for each rank's part in them."""
    inside = [step for step in steps if trace.start_ns <= step.root.start_ns <= trace.end_ns]
    if not inside:
        return
    yield [text(_MARGIN, 14, "steps that are linked"), *(_bar(trace, step.root, "#8c959f") for step in inside)]
    by_rank: dict[object, list[str]] = {}
    for step in inside:
        ranks = {span.span_id: span.attributes.get(names.RANK, 0) for span in step.spans}
        for span in step.spans:
            if span.name in _PART_COLOURS:
                bars = by_rank.setdefault(ranks.get(span.parent_id, 0), [])
                bars.append(_bar(trace, span, _PART_COLOURS[span.name]))
    for rank in sorted(by_rank, key=str):
        yield [text(_MARGIN + 12, 14, f"on rank {rank}"), *by_rank[rank]]


def _bar(trace: Trace, span: Span, colour: str) -> str:
    x, width = _x(trace, span.start_ns), max(2.0, _x(trace, span.end_ns) - _x(trace, span.start_ns))
    title = _escaped(f"{span.name} {format_duration(span.duration_ns)}")
    return (
        f'<rect x="{x:.1f}" y="4" width="{width:.1f}" height="12" rx="2" fill="{colour}"><title>{title}</title></rect>'
    )


def _mark(trace: Trace, name: str, time_ns: int) -> str:
    x = _x(trace, time_ns)
    points = f"{x:.1f},1 {x + 4:.1f},10 {x:.1f},19 {x - 4:.1f},10"
    mark = f'<polygon points="{points}" fill="#fff" stroke="#1f2328"><title>{_escaped(name)}</title></polygon>'
    return mark + f'<text class="mark" x="{x + 6:.1f}" y="14">{_escaped(name)}</text>'


def _x(trace: Trace, time_ns: int) -> float:
    """Where a time stands; one that another host's clock puts outside of the trace stands at its edge."""
    share = (time_ns - trace.start_ns) / max(1, trace.duration_ns)
    return _BAR_X + _BAR_WIDTH * min(1.0, max(0.0, share))


def _escaped(words: str) -> str:
    """As XML has it, which knows no control characters."""
    return escape(printable(words))


def _label(span: Span, depth: int) -> str:
    """As much of its label as there is room for, of an RPC the method alone."""
    room = (_NAME_WIDTH - 12 * min(depth, 8)) // 7
    full, short = (words[span.name.rfind("/") + 1 :] for words in (span.label, span.short_label))
    words = full if len(full) <= room else short
    return words if len(words) <= room else f"{words[: room - 1]}…"


def _colours(trace: Trace) -> dict[str, str]:
    return {service: _COLOURS[number % len(_COLOURS)] for number, service in enumerate(trace.services)}
