"""This project beside vLLM, llama.cpp and transformers on one CPU: the same weights, type, threads and prompts.

Ours is `stepwire serve`, asked over gRPC, with its scheduler and the client on the same cores; theirs run offline,
in environments of their own (`make peers`), vLLM tuned as its guide to CPUs says. Nobody streams where only whole
answers count; what our streams of a message a token reach is among a full run's figures. Rounds are interleaved, and
whoever is not asked is stopped. Prompts are random token ids, new in each round, with no prefix cache; greedy, 64
tokens out. A bar's value is the median of our rate over the median of theirs, for `start` of their time over ours; its
bound is the floor, and the goal stands in the figures.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.report import report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.peers.models import Model, big_model, demo_model  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.peers.outcome import bars, figures, summary  # noqa: E402
from benchmarks.peers.processes import NAMES, PEERS, PeerFailed, PeerProcess, close_on_sigterm, start_peer  # noqa: E402
from benchmarks.peers.rates import Answer, decode_rate, first_difference, make_prompts  # noqa: E402
from benchmarks.peers.rows import KEYS, NUM_OUT, OURS, ROWS, START, STREAMED, Measured, Options, Row  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
NUM_CORES, MAX_SEQUENCES = 2, 32
MIN_AGREEING, NUM_COMPARED = 4, 16
PROMPT = "The capital of France is"
System = PeerProcess | StepwireServer


# Starts to measure, in a full run and in a quick one; vLLM's take up to two minutes each.
NUM_STARTS = {OURS: (5, 2), "vllm": (2, 1), "llamacpp": (1, 1), "hf": (5, 2)}


def parse(arguments: Sequence[str]) -> Options:
    """The command line. Ends the process when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of most rows: under 10 minutes and not 40")
    parser.add_argument(
        "--rows", default=",".join(KEYS), help="these rows only, with commas between: " + ",".join(KEYS)
    )
    parser.add_argument("--peers", default=",".join(NAMES), help="these peers only: " + ",".join(NAMES))
    parser.add_argument("--serve-flag", action="append", default=[], help="one more flag for `stepwire serve`")
    found = parser.parse_args(arguments)
    rows, peers = found.rows.split(","), found.peers.split(",")
    for given, known in ((rows, KEYS), (peers, NAMES)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = tuple(row for row in ROWS if row.key in rows)
    ordered = tuple(name for name in NAMES if name in peers)
    return Options(chosen, ordered, START in rows, found.quick, tuple(found.serve_flag))


def main() -> int:
    """Measures and reports."""
    options = parse(sys.argv[1:])
    close_on_sigterm()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    began = time.monotonic()
    source = demo_model_path()
    if not source.exists():
        print(f"compare_peers: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    measured = Measured()
    for name in ("demo", "big"):
        rows = [row for row in options.rows if row.model == name]
        if rows or (name == "demo" and options.starts):
            measure_model(name, demo_model(source) if name == "demo" else big_model(), rows, options, measured)
    print(summary(options, measured))
    more = {
        "versions": {name: version(name) for name in options.peers},
        "cores": NUM_CORES,
        "seconds": round(time.monotonic() - began),
    }
    return report(bars(options, measured), figures(options, measured) | more)


def measure_model(name: str, model: Model, rows: Sequence[Row], options: Options, measured: Measured) -> None:
    """All rows of one model; a peer that fails is left out from then on."""
    with_starts = options.starts and name == "demo"
    with tempfile.TemporaryDirectory(prefix="stepwire-compare-") as folder, closing() as systems:
        wanted = [peer for peer in options.peers if with_starts or any(peer in row.limits for row in rows)]
        if with_starts:
            for system in (OURS, *wanted):
                num = NUM_STARTS[system][options.quick]
                measured.starts[system] = open_system(systems, system, model, Path(folder), num, options, measured)
        else:
            open_together(systems, (*wanted, OURS), model, Path(folder), options, measured)
        if name == "demo":
            check_agreement(systems, measured)
        before = bandwidth() if name == "big" else None
        for row in rows:
            measured.rates[row.key] = measure_row(row, model, systems, options, measured)
        if before is not None:
            measured.bandwidth = max(before, bandwidth())


@contextmanager
def closing() -> Iterator[dict[str, System]]:
    """The systems that run; closed at the end."""
    systems: dict[str, System] = {}
    try:
        yield systems
    finally:
        for system in systems.values():
            system.close()


def open_system(
    systems: dict[str, System], name: str, model: Model, folder: Path, num: int, options: Options, measured: Measured
) -> list[float]:
    """Starts a system `num` times, keeps the last one; answers the seconds from each start to a first token."""
    seconds: list[float] = []
    for index in range(num):
        say(f"starting {name}")
        try:
            system = start(name, model, folder, options)
            systems[name] = system
            system.generate(make_prompts(f"start {index}", 1, 128, model.config.vocab_size), 1)
        except PeerFailed as error:
            fail(systems, name, error, measured)
            return []
        seconds.append(time.monotonic() - system.began)
        if index < num - 1:
            systems.pop(name).close()
    return seconds


def open_together(
    systems: dict[str, System], names: Sequence[str], model: Model, folder: Path, options: Options, measured: Measured
) -> None:
    """Starts systems side by side, where nobody asks how long each takes, and has each make a first token."""
    for name in names:
        say(f"starting {name}")
        try:
            systems[name] = start(name, model, folder, options)
        except PeerFailed as error:
            fail(systems, name, error, measured)
    for name, system in list(systems.items()):
        try:
            system.generate(make_prompts("start 0", 1, 128, model.config.vocab_size), 1)
        except PeerFailed as error:
            fail(systems, name, error, measured)


def start(name: str, model: Model, folder: Path, options: Options) -> System:
    """A process that loads the model."""
    if name == OURS:
        flags = (f"--max-num-seqs={MAX_SEQUENCES}", "--no-prefix-caching", "--dtype=bfloat16", *options.serve_flags)
        return StepwireServer.ready(model.folder, folder, *flags)
    peer_options = {
        "model": str(model.gguf if name == "llamacpp" else model.folder),
        "threads": NUM_CORES,
        "max_model_len": min(model.config.max_position_count, 2048 + 2 * NUM_OUT),
        "max_num_seqs": MAX_SEQUENCES,
    }
    return start_peer(name, peer_options, folder / f"{name}.log")


def fail(systems: dict[str, System], name: str, error: PeerFailed, measured: Measured) -> None:
    """Notes that a peer cannot be measured, and ends it."""
    say(f"{name} is left out: {error}")
    measured.failed[name] = str(error)
    if name in systems:
        systems.pop(name).close()


def check_agreement(systems: dict[str, System], measured: Measured) -> None:
    """Sees that all compute the same model: greedy tokens begin alike. Raises SystemExit when they do not."""
    ours = systems[OURS]
    assert isinstance(ours, StepwireServer)
    prompt = ours.encode(PROMPT)
    reference = ours.generate([prompt], NUM_COMPARED).tokens[0]
    for name, system in systems.items():
        if name != OURS:
            measured.agreeing_tokens[name] = first_difference(
                reference, system.generate([prompt], NUM_COMPARED).tokens[0]
            )
    wrong = [name for name, num in measured.agreeing_tokens.items() if num < MIN_AGREEING]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)} computes another model: after {PROMPT!r} other tokens come")


def measure_row(
    row: Row, model: Model, systems: dict[str, System], options: Options, measured: Measured
) -> dict[str, list[float]]:
    """Rates of each system, one for each round. The order turns round with each round."""
    names = [name for name in (OURS, *NAMES) if name in systems and (name == OURS or name in row.limits)]
    if row.measure == "output" and row.model == "demo" and not options.quick:
        names.append(STREAMED)
    rates: dict[str, list[float]] = {name: [] for name in names}
    decode_rates: list[float] = []
    vocab_size, num_prompts = model.config.vocab_size, row.num_prompts(quick=options.quick)
    for number in range(-1, row.rounds[options.quick]):
        is_warm_up = number < 0
        prompt_len = row.warm_up_len(quick=options.quick) if is_warm_up else row.prompt_len
        prompts = make_prompts(f"{row.key} {number}", num_prompts, prompt_len, vocab_size)
        for name in names if number % 2 else reversed(names):
            system = systems.get(OURS if name == STREAMED else name)
            if system is None:
                continue
            num_out = min(4, row.num_out) if is_warm_up else row.num_out
            try:
                answer = system.generate(prompts, num_out, stream=row.measure == "decode" or name == STREAMED)
            except PeerFailed as error:
                fail(systems, name, error, measured)
                continue
            check_counts(name, answer, num_prompts, num_out)
            if not is_warm_up:
                rates[name].append(row.rate(answer))
                if name == OURS and row.num_out > 1:
                    decode_rates.append(decode_rate(answer))
    if row.key == "big_b1":
        measured.used_bandwidth = median(decode_rates) * model.step_bytes
    say(f"{row.key}: " + ", ".join(f"{name} {median(values):,.1f}" for name, values in rates.items() if values))
    return rates


def check_counts(name: str, answer: Answer, batch: int, num_out: int) -> None:
    """Raises SystemExit unless there are exactly the tokens that were asked for."""
    counts = [len(tokens) for tokens in answer.tokens]
    if counts != [num_out] * batch or counts != [len(times) for times in answer.times]:
        raise SystemExit(f"{name} made {counts} tokens, not {batch} times {num_out}")


def bandwidth() -> float:
    """Bytes/s that this machine reads from memory."""
    command = [sys.executable, "-m", "benchmarks.peers.bandwidth"]
    return float(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)


def version(peer: str) -> str | None:
    """What a peer was built from."""
    built = PEERS / peer / ".built"
    return built.read_text() if built.exists() else None


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"compare_peers: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
