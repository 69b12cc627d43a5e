"""Models with random weights, and measuring, for `make gpu-check`. Takes what is missing from wheels."""

# ruff: noqa: E402 - what is imported may come from wheels

import dataclasses
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
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
from worker_service.runtime.dummy import decode_step, num_blocks_of, prefill_step
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.executor import Executor
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling, StepInput

ON_CUDA = torch.cuda.is_available()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda" if ON_CUDA else "cpu")
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
Quantise = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""A weight by its name -> the tensors, by names, that stand for it."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with random weights, ready for steps."""

    engine: TorchEngine
    runner: ModelRunner
    executor: Executor
    weight_bytes: int
    driver_bytes: int
    prepare_seconds: float


def serve(  # noqa: PLR0913 - each check names what it is about
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int,
    max_model_len: int,
    stored: torch.dtype | None = None,
    records: bool = True,
    quantise: Quantise | None = None,
) -> Served:
    """Weights are the same on every device, where the model is small; those of projections are what `quantise` makes
    of them."""
    draws_on = device if config is LARGE else CPU
    generator = torch.Generator(draws_on).manual_seed(0)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=draws_on, dtype=torch.float32)
        return (values * (1.0 if len(shape) == 1 else 0.05)).to(device, dtype)

    engine = TorchEngine(config, RankPlace(), dtype, device, stored=stored, records=records)
    tensors: dict[str, torch.Tensor] = {}
    for item in weight_slices(config, RankPlace()):
        is_quantised = quantise is not None and item.name.endswith("_proj.weight")
        drawn = draw(item.shape)
        made = quantise(item.name.removesuffix(".weight"), drawn) if quantise and is_quantised else {item.name: drawn}
        tensors.update({name: tensor.to(device) for name, tensor in made.items()})
    weight_bytes = engine.attach(tensors)
    executor = engine.executor(num_blocks, BLOCK_SIZE, max_model_len)
    began = time.perf_counter()
    driver_bytes = executor.prepare_decodes(64)
    return Served(
        engine,
        ModelRunner(executor, max_model_len=max_model_len),
        executor,
        weight_bytes,
        driver_bytes,
        time.perf_counter() - began,
    )


def greedy_tokens(
    device: torch.device, num_decodes: int = 24, dtype: torch.dtype = torch.float32, **how: Any
) -> list[int]:
    """What the small model continues prompts with."""
    num_blocks = num_blocks_of(LENGTHS, BLOCK_SIZE, num_decodes)
    served = serve(SMALL, dtype, device, num_blocks=num_blocks, max_model_len=1024, **how)
    return continued(served.runner, num_decodes)


def continued(runner: ModelRunner, num_decodes: int) -> list[int]:
    """What prompts are continued with."""
    steps = [with_prompts(prefill_step(LENGTHS, BLOCK_SIZE, Sampling(), num_decodes))]
    steps += [decode_step(LENGTHS, number) for number in range(num_decodes - 1)]
    return [token for step in steps for token in runner.execute(step).token_ids]


def with_prompts(step: StepInput) -> StepInput:
    """The step with prompts that differ."""
    new = [
        dataclasses.replace(
            one, token_ids=[(7 * one.sequence_id + 31 * i) % SMALL.vocab_size for i in range(len(one.token_ids))]
        )
        for one in step.new_sequences
    ]
    return dataclasses.replace(step, new_sequences=new)


def share_equal(a: list[int], b: list[int]) -> float:
    return round(sum(x == y for x, y in zip(a, b, strict=True)) / len(a), 3)


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
    return statistics.median([seconds(work) for _ in range(rounds)][1:])


def seconds(work: Callable[[], object]) -> float:
    """The time of one call, the device's work included."""
    began = time.perf_counter()
    work()
    if ON_CUDA:
        torch.cuda.synchronize(DEVICE)
    return time.perf_counter() - began
