"""What `stepwire top` shows, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepwire.telemetry import names
from stepwire.top.sample import Change


def render(changes: Sequence[Change]) -> RenderableType:
    """Schedulers first, then workers, then whoever does not answer."""
    schedulers = [change for change in changes if change.after.by(names.METRIC_READY, "")]
    workers = [change for change in changes if change.after.by(names.METRIC_WORKER_PHASE, "phase")]
    silent = [change.after for change in changes if change.after.error]
    parts: list[RenderableType] = [_scheduler(change) for change in schedulers]
    if workers:
        parts.append(Panel(_workers(workers), title="workers", title_align="left"))
    parts += [Text(f"{sample.url}: {sample.error}", style="red") for sample in silent]
    return Group(*parts)


def _scheduler(change: Change) -> RenderableType:
    after = change.after
    is_ready = after.total(names.METRIC_READY) > 0
    state = Text("serving", style="green") if is_ready else Text("not serving", style="bold red")
    table = Table.grid(padding=(0, 3))
    sequences = after.by(names.METRIC_SEQUENCES, "state")
    hits, asked = change.rate(names.METRIC_PREFIX_HITS), change.rate(names.METRIC_PREFIX_QUERIES)
    table.add_row("running", _count(sequences.get("running", 0)), "waiting", _count(sequences.get("waiting", 0)))
    table.add_row(
        "tokens computed/s",
        _count(change.rate(f"{names.METRIC_STEP_TOKENS}_sum")),
        "steps/s",
        _count(change.rate(names.METRIC_STEPS)),
    )
    table.add_row(
        "requests ended/s",
        f"{change.rate(names.METRIC_REQUESTS):.1f}",
        "refused/s",
        f"{change.rate(names.METRIC_REQUESTS_REFUSED):.1f}",
    )
    table.add_row(
        "first token, p95",
        _seconds(change.quantile(names.METRIC_TIME_TO_FIRST_TOKEN, 0.95), "≤ "),
        "token, mean",
        _seconds(change.mean(names.METRIC_TIME_PER_OUTPUT_TOKEN)),
    )
    table.add_row(
        "prefix cache hits",
        f"{hits / asked:.0%}" if asked else "-",
        "preempted/s",
        f"{change.rate(names.METRIC_PREEMPTIONS):.1f}",
    )
    return Panel(
        Group(table, _blocks(after.by(names.METRIC_BLOCKS, "state"))), title=_title(change, state), title_align="left"
    )


def _title(change: Change, state: Text) -> Text:
    return Text.assemble("scheduler ", _address(change), " ", state)


def _blocks(blocks: dict[str, float]) -> RenderableType:
    total = sum(blocks.values())
    grid = Table.grid(padding=(0, 2))
    text = f"{blocks.get('used', 0):.0f} used, {blocks.get('cached', 0):.0f} cached of {total:.0f}"
    grid.add_row("KV blocks", ProgressBar(total=total or 1, completed=blocks.get("used", 0), width=30), text)
    return grid


def _workers(workers: Sequence[Change]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "rank", "phase", "epoch", "sequences", "weights", "KV cache", *names.STEP_PARTS):
        table.add_column(title, justify="left" if title in ("worker", "phase") else "right")
    for change in sorted(workers, key=lambda change: change.after.total(names.METRIC_WORKER_RANK)):
        after = change.after
        phase = next((name for name, on in after.by(names.METRIC_WORKER_PHASE, "phase").items() if on), "?")
        memory = after.by(names.METRIC_WORKER_MEMORY, "use")
        table.add_row(
            _address(change),
            f"{after.total(names.METRIC_WORKER_RANK):.0f}",
            Text(phase, style="green" if phase == "ready" else "yellow"),
            f"{after.total(names.METRIC_WORKER_EPOCH):.0f}",
            f"{after.total(names.METRIC_WORKER_SEQUENCES):.0f}",
            _bytes(memory.get("weights", 0)),
            _bytes(memory.get("kv_cache", 0)),
            *(_seconds(change.mean(names.METRIC_WORKER_STEP_PARTS, part=part)) for part in names.STEP_PARTS),
        )
    return table


def _address(change: Change) -> str:
    return change.after.url.removeprefix("http://").removesuffix("/metrics")


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float | None, prefix: str = "") -> str:
    if value is None:
        return "-"
    return f"{prefix}{value * 1e3:.1f} ms" if value < 1 else f"{prefix}{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
