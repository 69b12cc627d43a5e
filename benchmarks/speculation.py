"""What speculative decoding by lookup brings, through the door: the same greedy requests with and without it.

`stepwire serve` with the demo model. Each request is made both ways, one right after the other, in an order that
changes from one to the next; the prefix cache is off, so that none finds the other's prompt. Quoting prompts are those
of benchmarks/quoting, chat prompts the first turns of MT-bench. Times are of whole requests, the prompt included.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.quoting.prompts import QUOTING
from benchmarks.report import Bar, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from fetch_demo_model import model_path  # noqa: E402

from stepwire.client import AsyncClient, Completion, Message  # noqa: E402
from stepwire.rpc.environment import prepare_grpc  # noqa: E402
from stepwire.supervisor.ports import free_port  # noqa: E402
from stepwire.telemetry import names  # noqa: E402
from stepwire.top.sample import read  # noqa: E402

QUESTIONS = ROOT.parent / "shared/data/mt-bench/question.jsonl"
NUM_CHAT, BATCH = 20, 8
MIN_RATIO = 1.3
READY_TIMEOUT_S, REQUEST_TIMEOUT_S, END_TIMEOUT_S = 90.0, 300.0, 30.0


@dataclass(slots=True)
class Side:
    """Sums over requests made one way."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_drafts: float = 0.0
    num_accepted: float = 0.0


@dataclass(slots=True)
class Comparison:
    """Requests made both ways. `num_equal` counts those whose tokens are the same."""

    plain: Side = field(default_factory=Side)
    drafting: Side = field(default_factory=Side)
    num_requests: int = 0
    num_equal: int = 0

    @property
    def ratio(self) -> float:
        """Tokens a second with speculation over those without."""
        plain, drafting = self.plain, self.drafting
        return (drafting.num_tokens / drafting.seconds) / (plain.num_tokens / plain.seconds)

    def figures(self, name: str) -> dict[str, object]:
        """For the report. A step brings a token of each sequence, and those accepted on top."""
        side = self.drafting
        return {
            f"{name}_tokens_per_s": [round(each.num_tokens / each.seconds, 1) for each in (self.plain, side)],
            f"{name}_acceptance": round(side.num_accepted / side.num_drafts, 3) if side.num_drafts else None,
            f"{name}_tokens_per_step": round(side.num_tokens / (side.num_tokens - side.num_accepted), 2),
        }


def main() -> int:
    """Serves, asks, and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the prompts, and shorter answers")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--drafts", type=int, default=7, help="most draft tokens of a step")
    options = parser.parse_args()
    prepare_grpc()
    port, metrics_port = free_port(), free_port()
    every = 4 if options.quick else 1
    max_tokens = 64 if options.quick else options.max_tokens
    with tempfile.TemporaryDirectory() as log_dir, serving(port, metrics_port, log_dir):
        asker = Asker(f"127.0.0.1:{port}", metrics_port, max_tokens, options.drafts)
        found = asyncio.run(compare_all(asker, QUOTING[::every], chat_prompts()[::every]))
    exact = sum(each.num_equal for each in found.values()) / sum(each.num_requests for each in found.values())
    figures: dict[str, object] = {}
    for name, comparison in found.items():
        print(f"{name}: x{comparison.ratio:.3f} over {comparison.num_requests} requests")
        figures |= {f"{name}_ratio": round(comparison.ratio, 3)} | comparison.figures(name)
    bars = {"quoting_b1": Bar(round(found["quoting_b1"].ratio, 3), MIN_RATIO), "exact": Bar(exact, 1.0)}
    return report(bars, figures)


async def compare_all(asker: "Asker", quoting: Sequence[str], chat: Sequence[str]) -> dict[str, Comparison]:
    """One request at a time, then several."""
    async with AsyncClient(asker.target) as api:
        await api.wait_ready(timeout=READY_TIMEOUT_S)
        await asker.ask(api, [quoting[0]], drafting=False)
        found = {"quoting_b1": await asker.compare(api, quoting, 1)}
        if chat:
            found["chat_b1"] = await asker.compare(api, chat, 1)
        found[f"quoting_b{BATCH}"] = await asker.compare(api, quoting, BATCH)
        if chat:
            found[f"chat_b{BATCH}"] = await asker.compare(api, chat, BATCH)
        return found


@dataclass(frozen=True, slots=True)
class Asker:
    """How requests are made, and where the scheduler's counts are read."""

    target: str
    metrics_port: int
    max_tokens: int
    num_drafts: int

    async def compare(self, api: AsyncClient, prompts: Sequence[str], batch: int) -> Comparison:
        """Asks so many at once, with and without speculation in turns."""
        found = Comparison()
        for number, first in enumerate(range(0, len(prompts), batch)):
            answers: dict[bool, list[Completion]] = {}
            for drafting in (number % 2 == 0, number % 2 == 1):
                side = found.drafting if drafting else found.plain
                before, begin = self._counts(), time.perf_counter()
                answers[drafting] = await self.ask(api, prompts[first : first + batch], drafting=drafting)
                side.seconds += time.perf_counter() - begin
                side.num_tokens += sum(len(answer.token_ids) for answer in answers[drafting])
                num_drafts, num_accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
                side.num_drafts += num_drafts
                side.num_accepted += num_accepted
            pairs = list(zip(answers[False], answers[True], strict=True))
            found.num_requests += len(pairs)
            found.num_equal += sum(plain.token_ids == drafted.token_ids for plain, drafted in pairs)
        return found

    async def ask(self, api: AsyncClient, prompts: Sequence[str], *, drafting: bool) -> list[Completion]:
        """All of them at once."""
        drafts = self.num_drafts if drafting else 0
        options = {"temperature": 0.0, "max_tokens": self.max_tokens, "max_draft_tokens": drafts}
        calls = (
            api.complete([Message("user", prompt)], timeout=REQUEST_TIMEOUT_S, **options)  # type: ignore[arg-type]
            for prompt in prompts
        )
        return await asyncio.gather(*calls)

    def _counts(self) -> tuple[float, float]:
        """Tokens drafted and tokens accepted since the start."""
        sample = read(f"http://127.0.0.1:{self.metrics_port}/metrics")
        if sample.error:
            raise SystemExit(f"speculation: {sample.url}: {sample.error}")
        return sample.total(names.METRIC_DRAFT_TOKENS), sample.total(names.METRIC_ACCEPTED_TOKENS)


def chat_prompts() -> list[str]:
    """First turns of MT-bench, of all its categories; none where the data is absent."""
    if not QUESTIONS.is_file():
        print(f"speculation: {QUESTIONS} is absent, so chat prompts are left out", file=sys.stderr)
        return []
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:: len(lines) // NUM_CHAT]][:NUM_CHAT]


@contextlib.contextmanager
def serving(port: int, metrics_port: int, log_dir: str) -> Iterator[None]:
    """`stepwire serve` with the demo model, which ends here."""
    command = [sys.executable, "-m", "stepwire.cli.main", "serve", "--model", str(model_path()), "--port", str(port)]
    # In bfloat16: of weights that stay packed to verify tokens costs what it saves.
    options = ["--quantize=none", "--no-prefix-caching", f"--metrics-port={metrics_port}", "--max-model-len=2048"]
    quiet = ["--log-dir", log_dir, "--log-level", "warning"]
    process = subprocess.Popen([*command, *options, *quiet], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
