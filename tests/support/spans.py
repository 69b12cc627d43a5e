"""Spans kept in memory, for tests of whoever makes them."""

from stepwire.telemetry.spans import RecordedSpan


class Kept:
    """A sink that keeps all spans, in the order of their ends."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def put(self, span: RecordedSpan) -> None:
        """See SpanSink."""
        self.spans.append(span)

    def named(self, name: str) -> list[RecordedSpan]:
        """Those of a name."""
        return [span for span in self.spans if span.name == name]
