"""Quantised weights on one CPU: this project in int8, int4 and Q4_1 beside its own bfloat16 and llama.cpp's files.

All run at the same time on the demo model, from the same bfloat16 weights; ours quantises them as it loads, or serves
as `gguf` the file in Q4_1 that they were made of, its blocks kept; llama.cpp's files are made by its own quantiser.
Ours is asked over gRPC, with its scheduler and the client on the same cores; theirs runs offline. Rounds are
interleaved, and whoever is not asked is stopped or asleep. Prompts are random token ids, new in each round, with no
prefix cache; greedy, 64 tokens out. A ratio is of medians. `int4_bytes` is what a worker holds of weights in int4 over
the bytes of the model's parameters in bfloat16, each counted once.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.compare_peers import NUM_CORES, PROMPT, System, check_counts, closing  # noqa: E402
from benchmarks.peers.models import Model, demo_model  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.peers.processes import PeerFailed, close_on_sigterm, start_peer  # noqa: E402
from benchmarks.peers.quantised_gguf import Kind, quantised_gguf  # noqa: E402
from benchmarks.peers.rates import first_difference, make_prompts, ratio, table  # noqa: E402
from benchmarks.peers.rows import ROWS, Row  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from loader.shares import RankPlace  # noqa: E402
from worker_service.runtime.worker import WorkerRuntime  # noqa: E402
from worker_service.settings import WorkerSettings  # noqa: E402

OURS = {"bf16": "none", "int8": "int8", "int4": "int4", "gguf": "auto"}
THEIRS: Mapping[str, Kind] = {"llamacpp_q8_0": "Q8_0", "llamacpp_q4_1": "Q4_1"}
ROUNDS = {"b1": (15, 5), "b8": (5, 2), "prefill": (3, 1)}
NUM_COMPARED = 16
Rates = dict[str, dict[str, list[float]]]


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about 90 seconds and not 4 minutes")
    parser.add_argument("--rows", default=",".join(ROUNDS), help="these rows only, with commas between")
    options = parser.parse_args()
    rows = [row for row in ROWS if row.key in options.rows.split(",") and row.key in ROUNDS]
    close_on_sigterm()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    began, source = time.monotonic(), demo_model_path()
    if not source.exists():
        print(f"quantised: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    model = demo_model(source)
    failed: dict[str, str] = {}
    served = dict.fromkeys(OURS, model.folder) | {"gguf": source}
    held = {name: held_bytes(path, OURS[name]) for name, path in served.items()}
    with tempfile.TemporaryDirectory(prefix="stepwire-quantised-") as folder, closing() as systems:
        start_all(systems, model, served, Path(folder), failed)
        agreeing = agreement(systems)
        rates = {row.key: measured(row, model, systems, ROUNDS[row.key][options.quick]) for row in rows}
    print(summary(rates))
    figures = {
        "tokens_per_s": rounded(rates),
        "held_bytes": held,
        "bf16_bytes": model.step_bytes,
        "gguf_bytes": {name: model.gguf.with_name(f"{kind}.gguf").stat().st_size for name, kind in THEIRS.items()}
        if not failed
        else {},
        "agreeing_tokens": agreeing,
        "failed": failed,
        "seconds": round(time.monotonic() - began),
    }
    return report(bars(rates.get("b1", {}), held["int4"] / model.step_bytes), figures)


def held_bytes(path: Path, quantize: str) -> int:
    """What a worker holds of weights."""
    runtime = WorkerRuntime(WorkerSettings(threads=NUM_CORES))
    runtime.init_device(RankPlace())
    summary = runtime.load_model(path, "bfloat16", lambda *_: None, lambda: False, quantize)
    runtime.close()
    return summary.weight_bytes


def start_all(
    systems: dict[str, System], model: Model, served: Mapping[str, Path], folder: Path, failed: dict[str, str]
) -> None:
    """All that is measured; a peer that does not start is left out."""
    for name, path in served.items():
        logs = folder / name
        logs.mkdir()
        flags = ("--max-num-seqs=8", "--num-kv-blocks=1024", "--no-prefix-caching", "--dtype=bfloat16")
        server = StepwireServer(path, logs, *flags, f"--quantize={OURS[name]}")
        systems[name] = server
        server.wait_ready()
    for name, kind in THEIRS.items():
        try:
            options = {"model": str(quantised_gguf(model, kind)), "threads": NUM_CORES}
            systems[name] = start_peer("llamacpp", options, folder / f"{name}.log")
        except PeerFailed as error:
            print(f"quantised: {name} is left out: {error}", file=sys.stderr)
            failed[name] = str(error)


def agreement(systems: Mapping[str, System]) -> dict[str, int]:
    """How many greedy tokens each has in common with bfloat16 before they part."""
    whole = systems["bf16"]
    assert isinstance(whole, StepwireServer)
    prompt = whole.encode(PROMPT)
    tokens = {name: system.generate([prompt], NUM_COMPARED).tokens[0] for name, system in systems.items()}
    return {name: first_difference(tokens["bf16"], found) for name, found in tokens.items() if name != "bf16"}


def measured(row: Row, model: Model, systems: Mapping[str, System], rounds: int) -> dict[str, list[float]]:
    """Rates of each system, one for each round. The order turns round with each round."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(-1, rounds):
        num_out = min(4, row.num_out) if number < 0 else row.num_out
        prompts = make_prompts(f"{row.key} {number}", row.batch, row.prompt_len, model.config.vocab_size)
        for name in list(systems) if number % 2 else reversed(list(systems)):
            answer = systems[name].generate(prompts, num_out)
            check_counts(name, answer, row.batch, num_out)
            if number >= 0:
                rates[name].append(row.rate(answer))
    return rates


def bars(b1: Mapping[str, Sequence[float]], int4_bytes: float) -> dict[str, Bar]:
    """What must hold."""

    def over(name: str, other: str) -> float | None:
        value = ratio(b1.get(name, []), b1.get(other, []))
        return None if value is None else round(value, 3)

    return {
        "int8_b1": Bar(over("int8", "bf16"), 1.4),
        "int8_b1_llamacpp": Bar(over("int8", "llamacpp_q8_0"), 1.0),
        "int4_b1_llamacpp": Bar(over("int4", "llamacpp_q4_1"), 1.0),
        "gguf_b1_llamacpp": Bar(over("gguf", "llamacpp_q4_1"), 1.0),
        "int4_bytes": Bar(round(int4_bytes, 4), 0.35, "at most"),
    }


def summary(rates: Rates) -> str:
    """The table that people read: medians, in tokens/s."""
    lines = [
        {"row": key, **{name: f"{median(values):,.1f}" for name, values in found.items() if values}}
        for key, found in rates.items()
    ]
    return f"{table(['row', *OURS, *THEIRS], lines)}\nTokens/s."


def rounded(rates: Rates) -> Rates:
    """The same with one digit."""
    return {
        key: {name: [round(value, 1) for value in values] for name, values in found.items()}
        for key, found in rates.items()
    }


if __name__ == "__main__":
    sys.exit(main())
