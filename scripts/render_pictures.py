#!/usr/bin/env python3
"""Draws the pictures of the README from a real run: a request's trace, and what its metrics showed meanwhile.

Serves the demo model for half a minute under load, with the viewer's receiver as collector, and writes
docs/images/trace.svg and docs/images/dashboard.svg. Needs `make setup`.
"""

import asyncio
import math
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stepwire.rpc.environment import prepare_grpc  # noqa: E402

prepare_grpc()

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from benchmarks.peers.event_loop import runner  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from benchmarks.tracing.collector import receiving  # noqa: E402
from stepwire.client import AsyncClient  # noqa: E402
from stepwire.supervisor.ports import free_port  # noqa: E402
from stepwire.telemetry import names  # noqa: E402
from stepwire.telemetry.setup import Telemetry  # noqa: E402
from stepwire.traces import Trace, TraceStore  # noqa: E402
from stepwire.traces.svg import STYLE, render_svg, text  # noqa: E402

IMAGES = ROOT / "docs/images"
LOAD_S, SCRAPE_EVERY_S, WINDOW_S = 30.0, 0.5, 4.0
MAX_CLIENTS = 10
FLAGS = ("--max-model-len=512", "--num-kv-blocks=64", "--max-num-seqs=8", "--trace-step-ratio=0.3")
WIDTH, PANEL_HEIGHT, GAP = 960, 190, 12
COLOURS = ("#2a78c2", "#c47f17", "#2f9e62", "#8a52b8", "#c2477a")
QUESTIONS = (
    "Tell me about the history of Paris and its bridges.",
    "What is a compiler, and what does it do with a program?",
    "Write a story about a lighthouse and the person who keeps it.",
)
Scrape = dict[str, float]
Points = list[tuple[float, float]]


@dataclass
class Run:
    """What a run left: traces, and the metrics over time in seconds since its begin."""

    store: TraceStore
    scrapes: list[tuple[float, Scrape]] = field(default_factory=list)


def main() -> int:
    """Runs and draws."""
    model = demo_model_path()
    if not model.exists():
        print(f"render_pictures: there is no model at {model}; run `make setup`", file=sys.stderr)
        return 2
    run = serve_and_load(model)
    request = most_eventful(run.store)
    steps = [step for step in map(run.store.get, request.linked_ids) if step is not None]
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "trace.svg").write_text(render_svg(request, steps), encoding="utf-8")
    (IMAGES / "dashboard.svg").write_text(dashboard(run.scrapes), encoding="utf-8")
    print(f"{IMAGES}: trace.svg with {len(request.spans)} spans, dashboard.svg of {len(run.scrapes)} scrapes")
    return 0


def serve_and_load(model: Path) -> Run:
    """Half a minute of requests whose number rises and falls."""
    run, metrics_port = Run(TraceStore()), free_port()
    with receiving(run.store) as endpoint, tempfile.TemporaryDirectory(prefix="stepwire-pictures-") as folder:
        flags = [*FLAGS, f"--otlp-endpoint={endpoint}", f"--metrics-port={metrics_port}"]
        with closing(StepwireServer(model, Path(folder), *flags)) as server:
            server.wait_ready()
            with runner() as loop:
                loop.run(load(server.target, endpoint, metrics_port, run))
    return run


async def load(target: str, endpoint: str, metrics_port: int, run: Run) -> None:
    """Clients come one by one, stay, and leave; the metrics are read twice a second."""
    telemetry = Telemetry.start(names.SERVICE_CLIENT, otlp_endpoint=endpoint)
    began = time.monotonic()

    async def client(number: int, rng: random.Random) -> None:
        await asyncio.sleep(LOAD_S * 0.4 * number / MAX_CLIENTS)
        async with AsyncClient(target, tracer_provider=telemetry.tracer_provider) as caller:
            while time.monotonic() - began < LOAD_S * (0.7 + 0.3 * number / MAX_CLIENTS):
                await caller.complete(rng.choice(QUESTIONS), max_tokens=rng.randrange(20, 120), timeout=60)

    async def scrape() -> None:
        while True:
            text = await asyncio.to_thread(read_metrics, metrics_port)
            run.scrapes.append((time.monotonic() - began, text))
            await asyncio.sleep(SCRAPE_EVERY_S)

    scraping = asyncio.create_task(scrape())
    await asyncio.gather(*(client(number, random.Random(number)) for number in range(MAX_CLIENTS)))
    scraping.cancel()
    await asyncio.gather(scraping, return_exceptions=True)
    await asyncio.to_thread(telemetry.shutdown)


def read_metrics(port: int) -> Scrape:
    """All samples, by name and labels: 'name{label="value"}'."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: Scrape = {}
    for family in families:
        for sample in family.samples:
            kept = {key: value for key, value in sample.labels.items() if key in ("state", "part", "le")}
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(kept.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            found[key] = found.get(key, 0.0) + sample.value
    return found


def most_eventful(store: TraceStore) -> Trace:
    """The trace of the request to which most happened, and that has most linked steps."""

    def score(trace: Trace) -> tuple[int, int]:
        parts = {span.name for span in trace.spans} & set(names.REQUEST_PARTS)
        return len(parts), min(12, len(trace.linked_ids))

    requests = store.recent(limit=store.num_traces, matches=lambda t: t.attribute(names.REQUEST_ID) is not None)
    return max(requests, key=score)


# The dashboard.


def dashboard(scrapes: Sequence[tuple[float, Scrape]]) -> str:
    """Six panels, as those of deploy/grafana are."""
    parts = [f"stepwire_step_part_seconds_{what}" for what in ("sum", "count")]

    def by_state(metric: str, *states: str) -> dict[str, Points]:
        return {state: gauge(scrapes, f'{metric}{{state="{state}"}}') for state in states}

    tokens = {kind: rate(scrapes, f"stepwire_{kind}_tokens_total") for kind in ("output", "prompt")}
    of_step = {
        part: ratio(scrapes, *(f'{name}{{part="{part}"}}' for name in parts), 1e3)
        for part in (*names.STEP_PARTS[1:], "rpc")
    }
    panels: list[tuple[str, str, Mapping[str, Points], bool]] = [
        ("Tokens a second", "", tokens, False),
        ("Sequences", "", by_state(names.METRIC_SEQUENCES, "running", "waiting"), True),
        ("KV blocks", "", by_state(names.METRIC_BLOCKS, "used", "cached"), True),
        ("Time to first token", " s", quantiles(scrapes, names.METRIC_TIME_TO_FIRST_TOKEN), False),
        ("Step time", " s", quantiles(scrapes, names.METRIC_STEP_TIME), False),
        ("Where a step's time goes, mean", " ms", of_step, True),
    ]
    height = 2 * (PANEL_HEIGHT + GAP) + GAP
    width = (WIDTH - 4 * GAP) / 3
    drawn = [
        panel(title, unit, series, (GAP + i % 3 * (width + GAP), GAP + i // 3 * (PANEL_HEIGHT + GAP), width), stacked)
        for i, (title, unit, series, stacked) in enumerate(panels)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", page, *drawn, "</svg>\n"])


def panel(title: str, unit: str, series: Mapping[str, Points], place: tuple[float, float, float], stacked: bool) -> str:
    """One graph at (x, y, width)."""
    x, y, width = place
    left, top, right, bottom = 44.0, 42.0, width - 8, PANEL_HEIGHT - 20.0
    lines = stack(series) if stacked else dict(series)
    highest = round_up(max((value for points in lines.values() for _, value in points), default=0.0))
    end = max((at for points in lines.values() for at, _ in points), default=1.0)

    def spot(at: float, value: float) -> str:
        return f"{left + (right - left) * at / end:.1f},{bottom - (bottom - top) * value / highest:.1f}"

    parts = [f'<g transform="translate({x:.1f} {y:.1f})">', text(4, 14, title, "head")]
    for share in (0.0, 0.5, 1.0):
        at = bottom - (bottom - top) * share
        parts.append(f'<line class="grid" x1="{left}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(left - 4, at + 4, f"{highest * share:.3g}{unit}", "dim", "end"))
    for share in (0.0, 0.5, 1.0):
        parts.append(text(left + (right - left) * share, bottom + 15, f"{end * share:.0f} s", "dim", "middle"))
    legend = 4.0
    for number, (label, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn = " ".join(spot(*point) for point in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<rect x="{legend:.1f}" y="22" width="9" height="9" rx="2" fill="{colour}"/>')
        parts.append(text(legend + 13, 31, label, "dim"))
        legend += 26 + 6.6 * len(label)
    return "\n".join([*parts, "</g>"])


def round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def stack(series: Mapping[str, Points]) -> dict[str, Points]:
    """Each line on top of those before it."""
    stacked: dict[str, Points] = {}
    below: list[float] = []
    for label, points in series.items():
        below = [value + (below[i] if i < len(below) else 0.0) for i, (_, value) in enumerate(points)]
        stacked[label] = [(at, height) for (at, _), height in zip(points, below, strict=True)]
    return stacked


def gauge(scrapes: Iterable[tuple[float, Scrape]], name: str) -> Points:
    """A value over time."""
    return [(at, found.get(name, 0.0)) for at, found in scrapes]


def windowed(scrapes: Sequence[tuple[float, Scrape]], value: Callable[[float, Scrape, Scrape], float | None]) -> Points:
    """What `value` makes of the seconds, the scrape before and the one after, of each window of `WINDOW_S`."""
    points: Points = []
    for i, (at, after) in enumerate(scrapes):
        begin = next(j for j in range(i + 1) if scrapes[j][0] >= at - WINDOW_S)
        before_at, before = scrapes[begin]
        found = value(at - before_at, before, after) if at > before_at else None
        if found is not None:
            points.append((at, found))
    return points


def rate(scrapes: Sequence[tuple[float, Scrape]], name: str) -> Points:
    """A counter's growth a second."""
    return windowed(scrapes, lambda s, before, after: (after.get(name, 0.0) - before.get(name, 0.0)) / s)


def ratio(scrapes: Sequence[tuple[float, Scrape]], over: str, under: str, factor: float) -> Points:
    """The growth of one counter for each unit of another, times a factor; 0 where there was none."""

    def of(_seconds: float, before: Scrape, after: Scrape) -> float:
        count = after.get(under, 0.0) - before.get(under, 0.0)
        return factor * (after.get(over, 0.0) - before.get(over, 0.0)) / count if count else 0.0

    return windowed(scrapes, of)


def quantiles(scrapes: Sequence[tuple[float, Scrape]], name: str) -> dict[str, Points]:
    """Median and 95th percentile of a histogram, as Prometheus' histogram_quantile has them."""
    prefix = f'{name}_bucket{{le="'

    def of(share: float) -> Callable[[float, Scrape, Scrape], float | None]:
        def find(_seconds: float, before: Scrape, after: Scrape) -> float | None:
            grown = sorted(
                (float(key.removeprefix(prefix)[:-2]), value - before.get(key, 0.0))
                for key, value in after.items()
                if key.startswith(prefix)
            )
            return quantile(grown, share)

        return find

    return {f"p{round(share * 100)}": windowed(scrapes, of(share)) for share in (0.5, 0.95)}


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """From cumulative counts by upper bound; None without any."""
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    low, count_below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total:
            if bound == float("inf"):
                return low
            inside = count - count_below
            return low + (bound - low) * ((share * total - count_below) / inside if inside else 0.0)
        low, count_below = bound, count
    return low


if __name__ == "__main__":
    sys.exit(main())
