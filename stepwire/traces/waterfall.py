"""A trace as a waterfall in a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stepwire.traces.store import Span, SpanEvent, Trace

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
_DURATION_WIDTH = 9
_MIN_BAR_WIDTH = 10
_MAX_SERVICE_WIDTH = 20
_MIN_WIDTH_FOR_SERVICE = 72
_MAX_ROWS = 200
_MAX_EVENTS = 20
_MAX_INDENT = 12


def render_waterfall(trace: Trace) -> "Waterfall":
    """A renderable of the tree of spans: service, name, bar, duration, events; fits the console's width."""
    return Waterfall(trace)


def format_duration(duration_ns: int) -> str:
    """Three significant digits, with a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if duration_ns >= size:
            value = duration_ns / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{duration_ns} ns"


def printable(text: str) -> str:
    """The text without what a terminal might obey: names come from whoever can reach the receiver."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Widths in character cells; `service` is 0 where there is no room for it."""

    name: int
    service: int
    bar: int

    @classmethod
    def fitting(cls, trace: Trace, width: int) -> "_Columns":
        service = min(_MAX_SERVICE_WIDTH, max(map(len, trace.services))) + 1 if width >= _MIN_WIDTH_FOR_SERVICE else 0
        longest = max(
            len(_indent(depth)) + 2 + max(len(span.label), *(2 + len(event.name) for event in span.events), 0)
            for depth, span in trace.tree[:_MAX_ROWS]
        )
        rest = width - service - _DURATION_WIDTH - 3
        name = max(8, min(longest, rest * 55 // 100, rest - _MIN_BAR_WIDTH))
        return cls(name, service, max(_MIN_BAR_WIDTH, rest - name))


@dataclass(frozen=True, slots=True)
class Waterfall:
    """See `render_waterfall`."""

    trace: Trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trace = self.trace
        columns = _Columns.fitting(trace, options.max_width)
        colours = {service: _COLOURS[i % len(_COLOURS)] for i, service in enumerate(trace.services)}
        yield from self._head(colours)
        rows = trace.tree[:_MAX_ROWS]
        for depth, span in rows:
            yield self._span_line(span, depth, columns, colours[span.service], is_ascii=options.ascii_only)
            if span.is_error and span.status_message:
                text = f"{_indent(depth)}  {printable(span.status_message)}"
                yield Text(text, style="red", overflow="ellipsis", no_wrap=True)
            for event in span.events[:_MAX_EVENTS]:
                yield self._event_line(event, depth, columns)
        if num_hidden := len(trace.tree) - len(rows) + trace.num_dropped:
            yield Text(f"{num_hidden} more spans are not shown", style="dim")

    def _head(self, colours: dict[str, str]) -> Iterator[Text]:
        trace = self.trace
        size = f"  {format_duration(trace.duration_ns)}, {len(trace.spans)} spans"
        yield Text.assemble(("trace ", "bold"), (trace.trace_id, "bold"), size)
        legend = Text()
        for service, colour in colours.items():
            num_spans = sum(span.service == service for span in trace.spans)
            legend.append(f"{printable(service)} ({num_spans})  ", style=colour)
        yield legend

    def _span_line(self, span: Span, depth: int, columns: _Columns, colour: str, *, is_ascii: bool) -> Text:
        indent = _indent(depth)
        short = printable(_fitting(span, columns.name - len(indent) - 2, is_ascii=is_ascii))
        name = Text.assemble(indent, ("*" if is_ascii else "●", colour), " ", short)
        start = self._column(span.start_ns, columns.bar)
        end = max(start + 1, self._column(span.end_ns, columns.bar) + (span.end_ns >= self.trace.end_ns))
        bar = Text(" " * start + ("#" if is_ascii else "━") * (end - start), style="red" if span.is_error else colour)
        service = Text(printable(span.service), style=colour)
        return _line(columns, name, service, format_duration(span.duration_ns), bar)

    def _event_line(self, event: SpanEvent, depth: int, columns: _Columns) -> Text:
        name = Text(f"{_indent(depth)}  - {printable(event.name)}", style="dim")
        mark = Text(" " * self._column(event.time_ns, columns.bar) + "^", style="dim")
        after = f"+{format_duration(max(0, event.time_ns - self.trace.start_ns))}"
        return _line(columns, name, Text(), after, mark)

    def _column(self, time_ns: int, width: int) -> int:
        fraction = (time_ns - self.trace.start_ns) / max(1, self.trace.duration_ns)
        return min(width - 1, max(0, int(fraction * width)))


def _line(columns: _Columns, name: Text, service: Text, duration: str, bar: Text) -> Text:
    name.truncate(columns.name, overflow="ellipsis", pad=True)
    line = Text(no_wrap=True, overflow="crop").append_text(name).append(" ")
    if columns.service:
        service.truncate(columns.service - 1, overflow="ellipsis", pad=True)
        line.append_text(service).append(" ")
    return line.append(f"{duration:>{_DURATION_WIDTH}} ").append_text(bar)


def _fitting(span: Span, width: int, *, is_ascii: bool) -> str:
    """The span's label; where that is too long with the place in short, and of an RPC without package or service."""
    if len(span.label) <= width:
        return span.label
    path, slash, method = span.name.rpartition("/")
    if not slash or len(span.short_label) <= width:
        return span.short_label
    without_package = f"{path.rpartition('.')[2]}/{method}"
    return without_package if len(without_package) <= width else f"{'...' if is_ascii else '…'}/{method}"


def _indent(depth: int) -> str:
    return "  " * min(depth, _MAX_INDENT)
