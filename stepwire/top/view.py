"""What `stepwire top` shows, as rich renderables that fit the terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepwire.telemetry import names
from stepwire.top.sample import Change, Sample

_GAP = 2
_FRAME = 4
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 10, 30
# Addresses have this much room, and more where all other columns have theirs.
_MIN_ADDRESS_WIDTH = len("127.0.0.1:29464")
# Times change, and columns are not to come and go with them.
_TIME_WIDTH = len("100.0 ms")


def render(changes: Sequence[Change]) -> RenderableType:
    """Schedulers first, then workers, then whoever does not answer."""
    schedulers = [change for change in changes if change.after.by(names.METRIC_READY, "")]
    workers = [change for change in changes if change.after.by(names.METRIC_WORKER_PHASE, "phase")]
    silent = [change.after for change in changes if change.after.error]
    parts: list[RenderableType] = [_Scheduler(change) for change in schedulers]
    if workers:
        parts.append(_Workers(sorted(workers, key=lambda change: change.after.total(names.METRIC_WORKER_RANK))))
    parts += [Text(f"{sample.url}: {sample.error}", style="red") for sample in silent]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Scheduler:
    """A scheduler's panel."""

    change: Change

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_ready = self.change.after.total(names.METRIC_READY) > 0
        state = Text("serving", style="green") if is_ready else Text("not serving", style="bold red")
        # Of a long name and the state the latter matters more.
        room = options.max_width - _FRAME - len("scheduler ") - len(state) - 3
        title = Text.assemble("scheduler ", _address(self.change.after, room), " ", state)
        blocks = _Blocks(self.change.after.by(names.METRIC_BLOCKS, "state"))
        yield Panel(Group(_figures(self.change), blocks), title=title, title_align="left")


def _figures(change: Change) -> Table:
    table = Table.grid(padding=(0, 3))
    sequences = change.after.by(names.METRIC_SEQUENCES, "state")
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
    return table


@dataclass(frozen=True, slots=True)
class _Blocks:
    """KV blocks in numbers, and as a bar where these leave room for one."""

    blocks: Mapping[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label, used, total = "KV blocks", self.blocks.get("used", 0), sum(self.blocks.values())
        text = f"{_count(used)} used, {_count(self.blocks.get('cached', 0))} cached of {_count(total)}"
        width = min(_MAX_BAR_WIDTH, options.max_width - len(label) - len(text) - 2 * _GAP)
        bar = [ProgressBar(total=total or 1, completed=used, width=width)] if width >= _MIN_BAR_WIDTH else []
        grid = Table.grid(padding=(0, _GAP))
        grid.add_row(label, *bar, text)
        yield grid


def _phase(change: Change) -> Text:
    phase = next((name for name, on in change.after.by(names.METRIC_WORKER_PHASE, "phase").items() if on), "?")
    return Text(phase, style="green" if phase == "ready" else "yellow")


def _total(metric: str) -> Callable[[Change], Text]:
    return lambda change: Text(f"{change.after.total(metric):.0f}")


def _memory(use: str) -> Callable[[Change], Text]:
    return lambda change: Text(_bytes(change.after.by(names.METRIC_WORKER_MEMORY, "use").get(use, 0)))


def _part(part: str) -> Callable[[Change], Text]:
    return lambda change: Text(_seconds(change.mean(names.METRIC_WORKER_STEP_PARTS, part=part)))


# By title, in their order from left to right.
_COLUMNS: Mapping[str, Callable[[Change], Text]] = {
    "rank": _total(names.METRIC_WORKER_RANK),
    "phase": _phase,
    "epoch": _total(names.METRIC_WORKER_EPOCH),
    "sequences": _total(names.METRIC_WORKER_SEQUENCES),
    "weights": _memory("weights"),
    "KV cache": _memory("kv_cache"),
    **{part.removeprefix("device_"): _part(part) for part in names.STEP_PARTS},
}
_TIMES = frozenset({"wait", "prepare", "forward", "sample"})
# What is told first where there is no room for all.
_IMPORTANCE = ("rank", "phase", "sequences", "forward", "KV cache", "wait", "epoch", "sample", "prepare", "weights")


@dataclass(frozen=True, slots=True)
class _Workers:
    """A row for each worker, with the columns that have room for all that is in them, and the names of the others."""

    workers: Sequence[Change]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {title: [cell(change) for change in self.workers] for title, cell in _COLUMNS.items()}
        addresses = [_address(change.after) for change in self.workers]
        longest = max(map(len, addresses))
        room = options.max_width - _FRAME - min(longest, _MIN_ADDRESS_WIDTH)
        shown: dict[str, int] = {}
        for title in _IMPORTANCE:
            width = max(len(title), _TIME_WIDTH if title in _TIMES else 0, *map(len, cells[title]))
            if _GAP + width > room:
                break
            shown[title] = width
            room -= _GAP + width
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("worker", no_wrap=True)
        for title in filter(shown.__contains__, _COLUMNS):
            side: JustifyMethod = "left" if title == "phase" else "right"
            table.add_column(title, justify=side, min_width=shown[title], no_wrap=True)
        for number, change in enumerate(self.workers):
            name = _address(change.after, min(longest, _MIN_ADDRESS_WIDTH) + room)
            table.add_row(name, *(cells[title][number] for title in _COLUMNS if title in shown))
        hidden = ", ".join(title for title in _COLUMNS if title not in shown)
        more = Text(f"in a wider terminal: {hidden}", style="dim") if hidden else None
        yield Panel(table, title="workers", title_align="left", subtitle=more, subtitle_align="left")


def _address(sample: Sample, width: int | None = None) -> str:
    """Where a process is, in so many characters at most: of a long name its beginning and its port."""
    address = sample.url.removeprefix("http://").removesuffix("/metrics")
    if width is None or len(address) <= width:
        return address
    host, colon, port = address.rpartition(":")
    return f"{host[: max(0, width - len(port) - 2)]}…{colon}{port}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float | None, prefix: str = "") -> str:
    if value is None:
        return "-"
    return f"{prefix}{value * 1e3:.1f} ms" if value < 1 else f"{prefix}{value:.2f} s"


def _bytes(value: float) -> str:
    gib = value / 2**30
    if gib < 1:
        return f"{value / 2**20:.0f} MiB"
    return f"{gib:.{2 if gib < 10 else 1 if gib < 100 else 0}f} GiB"
