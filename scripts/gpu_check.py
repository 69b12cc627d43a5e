"""Runs what the worker does on a CUDA device against its references, and measures it: `make gpu-check`.

Needs torch 2.11 or later with its Triton, numpy, rich, attrs, tokenizers, structlog and llguidance, and no checkpoint:
weights are random. What is missing of those is taken from wheels in the folder .wheels (`make gpu-wheels` fills it),
so that a machine without a network will do. Without a CUDA device it is a dry run: the CPU stands for the device, and
sizes are small. Each check stands alone; the last line is a JSON summary. Exits with 1 when one failed. At most 8
minutes: what has not begun after 7 is left out.
"""

import json
import statistics
import sys
import time
import traceback
from functools import partial
from typing import Any

import torch
from gpu_models import (
    BLOCK_SIZE,
    CPU,
    DEVICE,
    LARGE,
    ON_CUDA,
    SMALL,
    bandwidth,
    compute,
    greedy_tokens,
    median_seconds,
    seconds,
    serve,
    share_equal,
    with_prompts,
)
from gpu_products import check_products, check_quantised_models

from loader.config import ModelConfig
from worker_service.kernels.kv_rounding import KV_DTYPES
from worker_service.kernels.paged.choose import TOLERANCES, Trial, largest_error, paged_kernel
from worker_service.kernels.paged.problem import PagedBatch, PagedKernel, Pages, Rule
from worker_service.kernels.paged.reference import ReferenceKernel
from worker_service.models.scores import Scores
from worker_service.runtime.dummy import decode_step, num_blocks_of, prefill_step
from worker_service.runtime.step import Sampling

BEGIN_UNTIL_S = 420.0


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
        same = share_equal(expected, got)
        found[name] = {"as on the CPU": same, "as with a whole cache": share_equal(whole, got)}
        # A value near the middle of two codes may be rounded to either, and what follows may differ then.
        assert same >= 0.8, found
    return found


def check_graphs() -> dict[str, Any]:
    """Recorded decodes of the large model: what they cost to make, and that they answer what launches do."""
    config, dtype = (LARGE, torch.bfloat16) if ON_CUDA else (SMALL, torch.float32)
    lengths, tokens, found = [100] * 8, {}, {}
    for records in (False, True):
        num_blocks = num_blocks_of(lengths, BLOCK_SIZE, 16)
        served = serve(config, dtype, DEVICE, num_blocks=num_blocks, max_model_len=512, records=records)
        if records:
            found = {"prepare_seconds": served.prepare_seconds, "driver_bytes": served.driver_bytes}
        steps = [with_prompts(prefill_step(lengths, BLOCK_SIZE, Sampling(), 16))]
        steps += [decode_step(lengths, number) for number in range(15)]
        tokens[records] = [token for step in steps for token in served.runner.execute(step).token_ids]
        del served
    found["same"] = share_equal(tokens[False], tokens[True])
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
    prefills = []
    for _ in range(2):  # the first compiles
        runner.drop_sequences()
        prefills.append(seconds(partial(runner.execute, prefill_step(lengths, BLOCK_SIZE, Sampling(), num_decodes))))
    decodes = [seconds(partial(runner.execute, decode_step(lengths, number))) for number in range(num_decodes - 1)]
    prefill, decode = prefills[1], statistics.median(decodes)
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
        check_products,
        check_quantised_models,
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
