"""Runs what the worker does on a CUDA device against its references, and measures it: `make gpu-check`.

Needs torch 2.11 or later with its Triton, numpy, rich, attrs, tokenizers, structlog and llguidance, and no checkpoint:
weights are random. What is missing of those is taken from wheels in the folder .wheels (`make gpu-wheels` fills it),
so that a machine without a network will do. Without a CUDA device it is a dry run: the CPU stands for the device, and
sizes are small. Each check stands alone; the last line is a JSON summary. Exits with 1 when one failed. At most 8
minutes: what has not begun after 7 is left out.
"""

# ruff: noqa: E402 - what is imported may come from wheels

import dataclasses
import json
import statistics
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if list(ROOT.glob(".wheels/*.whl")):
    _unpacked = tempfile.mkdtemp()
    for _wheel in ROOT.glob(".wheels/*.whl"):
        zipfile.ZipFile(_wheel).extractall(_unpacked)
    sys.path.append(_unpacked)

import torch

from loader.config import ModelConfig, RopeConfig
from loader.layout import weight_slices
from loader.shares import RankPlace
from worker_service.kernels.kv_rounding import KV_DTYPES
from worker_service.kernels.paged.choose import TOLERANCES, Trial, largest_error, paged_kernel
from worker_service.kernels.paged.problem import PagedBatch, PagedKernel, Pages, Rule
from worker_service.kernels.paged.reference import ReferenceKernel
from worker_service.models.scores import Scores
from worker_service.runtime.dummy import decode_step, num_blocks_of, prefill_step
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.executor import Executor
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling, StepInput

ON_CUDA = torch.cuda.is_available()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda" if ON_CUDA else "cpu")
BLOCK_SIZE = 16
BEGIN_UNTIL_S = 420.0
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    max_position_count=4096,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10_000.0, None, {}),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=(),
)
# The shape of Llama 3.1 8B, with half of its layers.
LARGE = dataclasses.replace(
    SMALL,
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    max_position_count=131_072,
)
LENGTHS = [1, 5, 16, 17, 130, 300]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with random weights, ready for steps."""

    runner: ModelRunner
    executor: Executor
    weight_bytes: int
    driver_bytes: int
    prepare_seconds: float


def serve(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int,
    max_model_len: int,
    stored: torch.dtype | None = None,
    records: bool = True,
) -> Served:
    """Weights are the same on every device, where the model is small."""
    draws_on = device if config is LARGE else CPU
    generator = torch.Generator(draws_on).manual_seed(0)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=draws_on, dtype=torch.float32)
        return (values * (1.0 if len(shape) == 1 else 0.05)).to(device, dtype)

    engine = TorchEngine(config, RankPlace(), dtype, device, stored=stored, records=records)
    weight_bytes = engine.attach(
        {item.name: draw(item.shape) for item in weight_slices(config, RankPlace())},
    )
    executor = engine.executor(num_blocks, BLOCK_SIZE, max_model_len)
    began = time.perf_counter()
    driver_bytes = executor.prepare_decodes(64)
    return Served(
        ModelRunner(executor, max_model_len=max_model_len),
        executor,
        weight_bytes,
        driver_bytes,
        time.perf_counter() - began,
    )


def greedy_tokens(device: torch.device, num_decodes: int = 24, **how: Any) -> list[int]:
    """What the small model continues prompts with, in float32."""
    num_blocks = num_blocks_of(LENGTHS, BLOCK_SIZE, num_decodes)
    served = serve(SMALL, torch.float32, device, num_blocks=num_blocks, max_model_len=1024, **how)
    steps = [_with_prompts(prefill_step(LENGTHS, BLOCK_SIZE, Sampling(), num_decodes))]
    steps += [decode_step(LENGTHS, number) for number in range(num_decodes - 1)]
    return [token for step in steps for token in served.runner.execute(step).token_ids]


def _with_prompts(step: StepInput) -> StepInput:
    """The step with prompts that differ."""
    new = [
        dataclasses.replace(
            one, token_ids=[(7 * one.sequence_id + 31 * i) % SMALL.vocab_size for i in range(len(one.token_ids))]
        )
        for one in step.new_sequences
    ]
    return dataclasses.replace(step, new_sequences=new)


def check_tokens() -> dict[str, Any]:
    """Tokens of kernels, and of recorded decodes, equal those of plain torch on the CPU."""
    expected = greedy_tokens(CPU)
    for records in (False, True):
        found = greedy_tokens(DEVICE, records=records)
        assert found == expected, f"tokens differ from the CPU's, decodes recorded: {records}\n{expected}\n{found}"
    return {"tokens": len(expected)}


def check_kernels() -> dict[str, Any]:
    """Every paged kernel against the reference: decodes, chunks, grouped heads, windows, softcaps, head sizes."""
    found: dict[str, Any] = {}
    wrong = []
    for name in ("flash", "triton") if ON_CUDA else ("reference",):
        for trial in _trials():
            key = f"{name} {_text(trial)}"
            try:
                kernel = ReferenceKernel() if name == "reference" else paged_kernel(name, trial)
                error = largest_error(kernel, trial)
            except Exception as failure:
                found[key] = f"{type(failure).__name__}: {failure}"[:200]
                wrong += [key] if name == "triton" else []
                continue
            found[key] = error
            wrong += [key] if error > TOLERANCES[trial.dtype] else []
    assert not wrong, f"{wrong}: {found}"
    return found


def _trials() -> list[Trial]:
    plain = (Rule(Scores(0.1)), Rule(Scores(0.1), 33))
    capped = (Rule(Scores(0.1, 30.0)), Rule(Scores(0.1, 2.0), 33))
    bf16, sizes = torch.bfloat16, (((8, 2), 64), ((14, 2), 80), ((32, 8), 128), ((8, 1), 256), ((3, 3), 96))
    trials = [Trial(*heads, size, 16, bf16, DEVICE, None, rules) for heads, size in sizes for rules in (plain, capped)]
    trials += [Trial(32, 8, 128, 256, dtype, DEVICE, None, plain) for dtype in (bf16, torch.float16)]
    trials += [
        Trial(8, 2, size, 16, bf16, DEVICE, stored, rules)
        for stored in KV_DTYPES.values()
        for size, rules in ((64, plain), (128, plain), (128, capped))
    ]
    trials += [Trial(8, 2, size, 16, torch.float32, DEVICE, None, plain) for size in (64, 256)]
    return trials if ON_CUDA else trials[:: len(trials) // 4]


def _text(trial: Trial) -> str:
    capped = " softcap" if any(rule.scores.softcap for rule in trial.rules) else ""
    kind = str(trial.stored or trial.dtype).removeprefix("torch.")
    return f"{trial.num_heads}/{trial.num_kv_heads}x{trial.head_dim} block {trial.block_size} {kind}{capped}"


def check_rounded_caches() -> dict[str, Any]:
    """Caches of eight bits: how many tokens are those of plain torch on the CPU, and of a whole cache."""
    whole, found = greedy_tokens(CPU), {}
    for name, stored in KV_DTYPES.items():
        expected, got = (greedy_tokens(device, stored=stored) for device in (CPU, DEVICE))
        same = _share_equal(expected, got)
        found[name] = {"as on the CPU": same, "as with a whole cache": _share_equal(whole, got)}
        # A value near the middle of two codes may be rounded to either, and what follows may differ then.
        assert same >= 0.8, found
    return found


def _share_equal(a: list[int], b: list[int]) -> float:
    return round(sum(x == y for x, y in zip(a, b, strict=True)) / len(a), 3)


def check_graphs() -> dict[str, Any]:
    """Recorded decodes of the large model: what they cost to make, and that they answer what launches do."""
    config, dtype = (LARGE, torch.bfloat16) if ON_CUDA else (SMALL, torch.float32)
    lengths, tokens, found = [100] * 8, {}, {}
    for records in (False, True):
        num_blocks = num_blocks_of(lengths, BLOCK_SIZE, 16)
        served = serve(config, dtype, DEVICE, num_blocks=num_blocks, max_model_len=512, records=records)
        if records:
            found = {"prepare_seconds": served.prepare_seconds, "driver_bytes": served.driver_bytes}
        steps = [_with_prompts(prefill_step(lengths, BLOCK_SIZE, Sampling(), 16))]
        steps += [decode_step(lengths, number) for number in range(15)]
        tokens[records] = [token for step in steps for token in served.runner.execute(step).token_ids]
        del served
    found["same"] = _share_equal(tokens[False], tokens[True])
    assert found["same"] >= 0.95, found
    return found


def check_speed() -> dict[str, Any]:
    """Prefill and decode of a batch, with the share of the device's compute and bandwidth that they reach."""
    config, dtype = (LARGE, torch.bfloat16) if ON_CUDA else (SMALL, torch.float32)
    peaks = bandwidth(), compute(dtype)
    found: dict[str, Any] = {"bytes_per_s": peaks[0], "flops_per_s": peaks[1]}
    shapes = [(1, 512), (8, 512), (64, 512), (8, 4096)] if ON_CUDA else [(1, 32), (4, 32)]
    kinds: dict[str, dict[str, Any]] = {"graphs": {}, "launches": {"records": False}, "int8": {"stored": torch.int8}}
    for name, how in kinds.items():
        for batch, length in shapes:
            found[f"{name} {batch}x{length}"] = _measured(config, dtype, batch, length, peaks, how)
    return found


def _measured(
    config: ModelConfig, dtype: torch.dtype, batch: int, length: int, peaks: tuple[float, float], how: dict[str, Any]
) -> dict[str, float]:
    lengths, num_decodes = [length] * batch, 24
    num_blocks = num_blocks_of(lengths, BLOCK_SIZE, num_decodes)
    served = serve(config, dtype, DEVICE, num_blocks=num_blocks, max_model_len=length + 64, **how)
    runner = served.runner
    seconds = []
    for _ in range(2):  # the first compiles
        runner.drop_sequences()
        seconds.append(_seconds(partial(runner.execute, prefill_step(lengths, BLOCK_SIZE, Sampling(), num_decodes))))
    decodes = [_seconds(partial(runner.execute, decode_step(lengths, number))) for number in range(num_decodes - 1)]
    prefill, decode = seconds[1], statistics.median(decodes)
    # Of the embedding a few rows are read; the head is computed for the last token of a prompt alone.
    table_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
    flops = 2 * (served.weight_bytes - 2 * table_bytes) / dtype.itemsize * batch * length / prefill
    read = served.weight_bytes - table_bytes + served.executor.cache_bytes
    figures = {
        "prefill_tokens_per_s": batch * length / prefill,
        "of_compute": flops / peaks[1],
        "decode_tokens_per_s": batch / decode,
        "of_bandwidth": read / decode / peaks[0],
    }
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def check_attention_speed() -> dict[str, Any]:
    """The kernel that is chosen by itself: bytes of keys and values that decodes read a second, and long prompts."""
    peak, found = bandwidth(), {}
    shapes = [(32, 4096), (1, 32_768), (128, 1024)] if ON_CUDA else [(2, 64)]
    for stored in (None, torch.int8, torch.float8_e4m3fn):
        for batch, length in shapes:
            kernel, query, pages, paged = _decode_problem(batch, length, stored)
            rule = Rule(Scores(0.1))
            seconds = median_seconds(partial(kernel.attend, query, pages, paged, rule))
            num_bytes = 2 * batch * length * 8 * (256 if stored is None else 132)
            key = f"{kernel.name} {str(stored or query.dtype).removeprefix('torch.')} {batch}x{length}"
            found[key] = {"microseconds": round(seconds * 1e6, 1), "of_bandwidth": round(num_bytes / seconds / peak, 3)}
    return found


def _decode_problem(
    batch: int, length: int, stored: torch.dtype | None
) -> tuple[PagedKernel, torch.Tensor, Pages, PagedBatch]:
    trial = Trial(32, 8, 128, BLOCK_SIZE, torch.bfloat16, DEVICE, stored, (Rule(Scores(0.1)),))
    kernel = paged_kernel("triton", trial) if ON_CUDA else ReferenceKernel()
    num_blocks = batch * length // BLOCK_SIZE
    dims = (num_blocks, 2, 8, BLOCK_SIZE)
    scales = None if stored is None else torch.ones(dims, device=DEVICE)
    data = torch.zeros((*dims, 128), dtype=torch.bfloat16 if stored is None else torch.uint8, device=DEVICE)
    data = data if stored is None else data.view(stored)
    pages = Pages(data[:, 0], data[:, 1], *(() if scales is None else (scales[:, 0], scales[:, 1])))
    tables = torch.randperm(num_blocks).view(batch, -1).int().to(DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, 32, 128, device=DEVICE).bfloat16()
    return kernel, query, pages, PagedBatch(starts, lengths, tables, 1, length)


def bandwidth() -> float:
    """Bytes read a second by a plain sum."""
    num_bytes = 4 << 30 if ON_CUDA else 64 << 20
    data = torch.ones(num_bytes // 4, device=DEVICE)
    return num_bytes / median_seconds(data.sum)


def compute(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a square matrix product."""
    size = 8192 if ON_CUDA else 512
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b)


def median_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """The median time of a call, the device's work included."""
    return statistics.median([_seconds(work) for _ in range(rounds)][1:])


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if ON_CUDA:
        torch.cuda.synchronize(DEVICE)
    return time.perf_counter() - began


def main() -> int:
    """Runs all checks."""
    began = time.monotonic()
    name = torch.cuda.get_device_name() if ON_CUDA else "CPU, a dry run: no CUDA device is at hand"
    print(f"torch {torch.__version__}, {name}", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    summary: dict[str, Any] = {"torch": torch.__version__, "device": name, "checks": {}}
    for check in (
        check_kernels,
        check_tokens,
        check_rounded_caches,
        check_graphs,
        check_attention_speed,
        check_speed,
    ):
        key, start = check.__name__.removeprefix("check_"), time.monotonic()
        if start - began > BEGIN_UNTIL_S:
            summary["checks"][key] = {"ok": None, "reason": "no time was left"}
            continue
        try:
            result = {"ok": True, "found": check()}
        except Exception as error:
            # One failure must not hide what the others find.
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        result["seconds"] = round(time.monotonic() - start, 1)
        summary["checks"][key] = result
        print(f"{key}: {json.dumps(result)}", flush=True)
        if ON_CUDA:
            torch.cuda.empty_cache()
    summary["ok"] = all(result["ok"] for result in summary["checks"].values())
    print(json.dumps(summary), flush=True)
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
