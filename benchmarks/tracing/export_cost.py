"""What gRPC's own threads take for an export, in nanoseconds of processor time: `python -m … ENDPOINT` prints it.

Nothing else runs in this process, so what its threads take beside the exporting one is theirs; of that, what they take
beyond a connection on which nothing is sent.
"""

import sys
import time
from collections.abc import Callable

from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from stepwire.telemetry.export import SpanExporter  # noqa: E402
from stepwire.telemetry.spans import RecordedSpan, SpanRecorder  # noqa: E402

_WARM, _EXPORTS, _SPANS, _PAUSE_S = 5, 10, 30, 1.0


class _Kept:
    """Keeps spans that are over."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def put(self, span: RecordedSpan) -> None:
        """Keeps one."""
        self.spans.append(span)


def _others_ns(call: Callable[[], None]) -> int:
    """Processor time of the other threads, for each of some calls with pauses between."""
    whole, own = time.process_time_ns(), time.thread_time_ns()
    for _ in range(_EXPORTS):
        call()
        time.sleep(_PAUSE_S)
    return ((time.process_time_ns() - whole) - (time.thread_time_ns() - own)) // _EXPORTS


def main() -> int:
    """Exports the same spans again and again."""
    kept = _Kept()
    recorder = SpanRecorder(kept)
    for number in range(_SPANS):
        recorder.start_span("span", attributes={f"name {place}": number for place in range(8)}).end()
    exporter = SpanExporter(sys.argv[1], {"service.name": "benchmark"})
    for _ in range(_WARM):
        exporter._export(kept.spans)
    idle_ns = _others_ns(lambda: None)
    print(max(0, _others_ns(lambda: exporter._export(kept.spans)) - idle_ns))
    exporter.shutdown(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
