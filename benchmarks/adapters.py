"""What adapters cost, and whether they are PEFT's: SmolLM2 with eight random adapters of rank 16 on all seven products.

`eight_in_sixteen` is the output rate of sixteen requests at once, two for each adapter, over that of the same requests
without: one `stepwire serve`, asked over gRPC, rounds interleaved, the medians. `equal_to_peft` is the share of greedy
answers in float32 that are those of PEFT with the same adapter, token for token; PEFT runs in the hf peer's environment
(`make peers`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.peers.models import Model, demo_model  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.peers.processes import PEERS, close_on_sigterm, environment  # noqa: E402
from benchmarks.peers.rates import decode_rate, first_difference, make_prompts, output_rate, ratio  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from loader.layout import expected_tensors  # noqa: E402

NUM_CORES = 2
NUM_ADAPTERS, RANK, ALPHA = 8, 16, 32
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCH, PROMPT_LEN, NUM_OUT = 16, 64, 128
NUM_COMPARED, NUM_EQUAL_OUT = 3, 48
MIN_RATIO = 0.7
KEYS = ("eight_in_sixteen", "equal_to_peft")
_PEFT_TIMEOUT_S = 900.0


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and prompts")
    parser.add_argument("--bars", default=",".join(KEYS), help="these only, with commas between: " + ",".join(KEYS))
    options = parser.parse_args()
    if unknown := sorted(set(options.bars.split(",")) - set(KEYS)):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(KEYS)}")
    close_on_sigterm()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    source = demo_model_path()
    if not source.exists():
        print(f"adapters: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    began, model = time.monotonic(), demo_model(source)
    speed: float | None = None
    equal: float | None = None
    figures: dict[str, object] = {"adapters": NUM_ADAPTERS, "rank": RANK, "batch": BATCH, "cores": NUM_CORES}
    with tempfile.TemporaryDirectory(prefix="stepwire-adapters-") as folder:
        adapters = {f"adapter-{i}": write_adapter(Path(folder) / f"adapter-{i}", model, i) for i in range(NUM_ADAPTERS)}
        if "eight_in_sixteen" in options.bars:
            speed, found = measure_speed(model, adapters, Path(folder), 3 if options.quick else 7)
            figures |= found
        if "equal_to_peft" in options.bars:
            equal, found = compare_with_peft(model, adapters, Path(folder), 1 if options.quick else NUM_COMPARED)
            figures |= found
    bars = {"eight_in_sixteen": Bar(speed, MIN_RATIO), "equal_to_peft": Bar(equal, 1.0)}
    return report(bars, figures | {"seconds": round(time.monotonic() - began)})


def write_adapter(folder: Path, model: Model, seed: int) -> Path:
    """A random adapter as PEFT saves it: strong enough that its answers are its own."""
    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(model.config).items():
        module = name.removesuffix(".weight")
        if module.endswith(KINDS):
            prefix = f"base_model.model.{module}"
            a, b = torch.randn(RANK, shape[1], generator=draws), torch.randn(shape[0], RANK, generator=draws)
            tensors[f"{prefix}.lora_A.weight"] = a * shape[1] ** -0.5
            tensors[f"{prefix}.lora_B.weight"] = b * 0.02
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(KINDS)}))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def start(model: Model, adapters: Mapping[str, Path], folder: Path, dtype: str) -> StepwireServer:
    """`stepwire serve` with the adapters, ready."""
    flags = [f"--adapter={name}={path}" for name, path in adapters.items()]
    sizes = (f"--max-num-seqs={BATCH}", "--no-prefix-caching", "--max-draft-tokens=0", f"--dtype={dtype}")
    return StepwireServer.ready(model.folder, folder, *sizes, *flags)


def measure_speed(
    model: Model, adapters: Mapping[str, Path], folder: Path, num_rounds: int
) -> tuple[float | None, dict[str, object]]:
    """The ratio of the output rates with and without adapters, and both rates."""
    chosen = {"with": [list(adapters)[i % NUM_ADAPTERS] for i in range(BATCH)], "without": [""] * BATCH}
    whole: dict[str, list[float]] = {"with": [], "without": []}
    decode: dict[str, list[float]] = {"with": [], "without": []}
    server = start(model, adapters, folder, "bfloat16")
    try:
        for number in range(-1, num_rounds):
            prompts = make_prompts(f"adapters {number}", BATCH, PROMPT_LEN, model.config.vocab_size)
            order = ("with", "without") if number % 2 else ("without", "with")
            for kind in order:
                answer = server.generate(prompts, NUM_OUT, adapters=chosen[kind])
                if number >= 0:  # The first round warms both up.
                    whole[kind].append(output_rate(answer))
                    decode[kind].append(decode_rate(answer))
    finally:
        server.close()
    rates = {f"tokens_per_s_{kind}": round(median(values), 1) for kind, values in whole.items()}
    print(f"tokens/s with eight adapters {rates['tokens_per_s_with']}, without {rates['tokens_per_s_without']}")
    more = {"decode_ratio": ratio(decode["with"], decode["without"]), "rounds": num_rounds}
    return ratio(whole["with"], whole["without"]), {**rates, **more}


def compare_with_peft(
    model: Model, adapters: Mapping[str, Path], folder: Path, num_prompts: int
) -> tuple[float | None, dict[str, object]]:
    """The share of equal answers; None where PEFT is not there or fails."""
    python = PEERS / "hf" / "bin" / "python"
    prompts = {name: make_prompts(name, num_prompts, PROMPT_LEN, model.config.vocab_size) for name in ("", *adapters)}
    keys = [(name, number) for name in prompts for number in range(num_prompts)]
    server = start(model, adapters, folder, "float32")
    try:
        asked = [prompts[name][number] for name, number in keys]
        ours = server.generate(asked, NUM_EQUAL_OUT, adapters=[name for name, _ in keys]).tokens
    finally:
        server.close()
    by_name: dict[str, list[Sequence[int]]] = {name: [] for name in adapters}
    for (name, _), tokens in zip(keys, ours, strict=True):
        if name:
            by_name[name].append(tokens)
    question = {
        "model": str(model.folder),
        "adapters": {name: str(path) for name, path in adapters.items()},
        "prompts": {name: prompts[name] for name in adapters},
        "max_tokens": NUM_EQUAL_OUT,
        "threads": NUM_CORES,
    }
    theirs = ask_peft(python, question)
    if theirs is None:
        return None, {"peft": "not there: run `make peers`, and see standard error"}
    pairs = [pair for name in adapters for pair in zip(by_name[name], theirs[name], strict=True)]
    common = [first_difference(mine, other) for mine, other in pairs]
    print(f"{common.count(NUM_EQUAL_OUT)} of {len(common)} answers equal PEFT's; tokens in common: {common}")
    distinct = len({tuple(mine) for mine, _ in pairs})
    return common.count(NUM_EQUAL_OUT) / len(common), {"compared_answers": len(common), "distinct_answers": distinct}


def ask_peft(python: Path, question: Mapping[str, object]) -> dict[str, list[list[int]]] | None:
    """PEFT's answers; None, with its last words on standard error, where it has none."""
    if not python.exists():
        print(f"adapters: there is no {python}; run `make peers`", file=sys.stderr)
        return None
    command = [str(python), str(Path(__file__).parent / "peers" / "peft_peer.py")]
    env = environment("hf", PEERS / "hf", dict(os.environ))
    done = subprocess.run(
        command,
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=env,
        timeout=_PEFT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        print(f"adapters: PEFT failed: {done.stderr[-500:]}", file=sys.stderr)
        return None
    answers: dict[str, list[list[int]]] = json.loads(done.stdout)
    return answers


if __name__ == "__main__":
    sys.exit(main())
