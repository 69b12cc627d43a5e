"""Runs the worker's runtime on a CUDA device against the same on the CPU, and measures it.

Needs torch and numpy alone, and no checkpoint: weights are random. Without a CUDA device it is a dry
run: the CPU is compared with itself and a small model is timed, so that the script itself is tested.
Exits with 1 when tokens differ. Minutes at most.
"""

import dataclasses
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from loader.config import ModelConfig, RopeConfig
from loader.layout import weight_slices
from loader.shares import RankPlace
from worker_service.models.registry import build_model
from worker_service.runtime.dummy import decode_step, num_blocks_of, prefill_step
from worker_service.runtime.executor import TorchExecutor
from worker_service.runtime.kv_cache import CacheShape, KvCache
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling, StepInput

BLOCK_SIZE = 16
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
# The shape of TinyLlama, about 1.1 billion parameters.
LARGE = dataclasses.replace(
    SMALL,
    vocab_size=32_000,
    hidden_size=2048,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=5632,
)


def make_runner(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, num_blocks: int, max_model_len: int
) -> tuple[ModelRunner, int]:
    """A runner on random weights, the same on every device, and the bytes of its weights."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, RankPlace(), None)
    tensors = {
        item.name: (torch.randn(item.shape, generator=generator) * (1.0 if len(item.shape) == 1 else 0.05)).to(
            device, dtype
        )
        for item in weight_slices(model.config, model.rank_place)
    }
    num_bytes = model.place_weights(tensors)
    model.prepare(max_model_len, dtype=dtype, device=device)
    shape = CacheShape(len(model.layers), model.num_kv_heads, config.head_dim, dtype)
    cache = KvCache(shape, num_blocks, BLOCK_SIZE, device)
    executor = TorchExecutor(model, cache, max_model_len=max_model_len, device=device)
    return ModelRunner(executor, max_model_len=max_model_len), num_bytes


def greedy_tokens(device: torch.device, lengths: list[int], num_decodes: int) -> list[list[int]]:
    """What the small model continues prompts of these lengths with, in float32."""
    num_blocks = num_blocks_of(lengths, BLOCK_SIZE, num_decodes)
    runner, _ = make_runner(SMALL, torch.float32, device, num_blocks=num_blocks, max_model_len=1024)
    steps = [prefill_step(lengths, BLOCK_SIZE, Sampling(), num_decodes)]
    steps = [_with_prompts(steps[0]), *(decode_step(lengths, n) for n in range(num_decodes - 1))]
    return [runner.execute(step).token_ids for step in steps]


def _with_prompts(step: StepInput) -> StepInput:
    """The step with prompts that differ."""
    new = [
        dataclasses.replace(one, token_ids=[(7 * one.sequence_id + 31 * i) % SMALL.vocab_size for i in range(size)])
        for one in step.new_sequences
        if (size := len(one.token_ids))
    ]
    return dataclasses.replace(step, new_sequences=new)


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read a second by a plain sum."""
    data = torch.ones(num_bytes // 4, device=device)
    return num_bytes / median_seconds(device, data.sum)


def compute(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations a second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(device, lambda: a @ b)


def median_seconds(device: torch.device, work: object, rounds: int = 7) -> float:
    """The median time of a call, the device's work included."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()  # type: ignore[operator]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measure(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, batch: int, length: int) -> None:
    """Prints prefill and decode of a batch, with the share of what the device can do."""
    lengths, num_decodes = [length] * batch, 24
    num_blocks = num_blocks_of(lengths, BLOCK_SIZE, num_decodes)
    runner, num_bytes = make_runner(config, dtype, device, num_blocks=num_blocks, max_model_len=length + 64)
    began = time.perf_counter()
    runner.execute(prefill_step(lengths, BLOCK_SIZE, Sampling(), num_decodes))
    first = time.perf_counter() - began
    runner.drop_sequences()
    began = time.perf_counter()
    runner.execute(prefill_step(lengths, BLOCK_SIZE, Sampling(), num_decodes))
    prefill = time.perf_counter() - began
    decodes = []
    for number in range(num_decodes - 1):
        began = time.perf_counter()
        runner.execute(decode_step(lengths, number))
        decodes.append(time.perf_counter() - began)
    decode = statistics.median(decodes)
    num_params = num_bytes / dtype.itemsize
    flops = 2 * num_params * batch * length / prefill
    on_cuda = device.type == "cuda"
    peak_bytes = bandwidth(device, 4 << 30 if on_cuda else 256 << 20)
    peak_flops = compute(device, dtype, 8192 if on_cuda else 1024)
    print(
        f"batch {batch:3d}, {length} tokens: prefill {batch * length / prefill:,.0f} tokens/s "
        f"({flops / peak_flops:.0%} of the measured compute; the first took {first:.2f} s), "
        f"decode {batch / decode:,.0f} tokens/s ({num_bytes / decode / peak_bytes:.0%} of the measured bandwidth)"
    )


def main() -> int:
    """Compares, then measures."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    name = torch.cuda.get_device_name() if on_cuda else "CPU, a dry run: no CUDA device is at hand"
    print(f"torch {torch.__version__}, {name}")
    torch.backends.cuda.matmul.allow_tf32 = False
    lengths = [1, 5, 16, 17, 130, 300]
    reference, found = (greedy_tokens(where, lengths, 24) for where in (torch.device("cpu"), device))
    if reference != found:
        print(f"tokens differ from the CPU's:\n{reference}\n{found}", file=sys.stderr)
        return 1
    print(f"{len(lengths)} sequences, {len(reference)} steps: tokens equal the CPU's")
    config, dtype = (LARGE, torch.bfloat16) if on_cuda else (SMALL, torch.float32)
    for batch in (1, 8, 32) if on_cuda else (1, 4):
        measure(config, device, dtype, batch=batch, length=512 if on_cuda else 64)
    return 0


if __name__ == "__main__":
    sys.exit(main())
