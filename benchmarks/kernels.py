"""The compiled kernels of the worker on this machine, with random weights: steps of a whole decoder, against what
its memory and its multipliers allow.

Times are the best of several. Every product has memory of its own, so that a step reads what a real one reads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import Bar, report
from worker_service.kernels.layout import KvLayout, empty_huge, pack_linear
from worker_service.kernels.linear import make_linear
from worker_service.kernels.native import BatchTables, Decoder, Pool, linear, load
from worker_service.kernels.spec import DecoderSpec, LayerWeights

_BLOCK = 16
_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Rows of the joined projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_elements(self) -> int:
        """Of one layer's products."""
        return self.hidden * (self.qkv + self.heads * self.head_dim + 3 * self.inner)

    @property
    def num_bytes(self) -> int:
        """Bytes that a step reads of the weights."""
        return 2 * (self.layers * self.layer_elements + self.hidden * self.vocab)


SMALL = Shape(576, 30, 9, 3, 64, 1536, 49152)
LARGE = Shape(2048, 22, 32, 4, 64, 5632, 32000)


def main() -> int:
    """Runs all and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["products", "small", "large"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load()
    if library is None:
        print("kernels: there is no compiled library on this machine", file=sys.stderr)
        return 2
    figures: dict[str, object] = {}
    bars: dict[str, Bar] = {}
    with Pool(library, options.threads) as pool:
        bandwidth, flops = limits(pool)
        figures |= {"bandwidth_gb": round(bandwidth / 1e9, 1), "gflops": round(flops / 1e9)}
        if options.only in (None, "products"):
            figures["products"] = products(pool)
        if options.only in (None, "small"):
            figures |= (found := decoder_figures(pool, SMALL, "small"))
            bars["small_b1_bandwidth"] = Bar(
                SMALL.num_bytes / (float(str(found["small_b1_160_ms"])) / 1e3) / bandwidth, 0.8
            )
        if options.only in (None, "large"):
            figures |= (found := decoder_figures(pool, LARGE, "large"))
            bars["large_b1_bandwidth"] = Bar(
                LARGE.num_bytes / (float(str(found["large_b1_160_ms"])) / 1e3) / bandwidth, 0.8
            )
    return report(bars, figures)


def best_of(call: Callable[[], object], *, seconds: float = 0.5, least: int = 3) -> float:
    """The shortest time of a call, in seconds."""
    call()
    best, began, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def limits(pool: Pool) -> tuple[float, float]:
    """Bytes/s of memory, as a sum over 512 MiB reads it, and FLOP/s of bfloat16, as a large product reaches it."""
    data = empty_huge(512 * 2**20).view(torch.int64)
    data.fill_(1)
    bandwidth = data.nbytes / best_of(data.sum)
    x = torch.randn(1536, 1536).bfloat16()
    multiply = make_linear(torch.randn(1536, 1536).bfloat16())
    packed = pack_linear(torch.randn(1536, 1536).bfloat16())
    product = min(best_of(lambda: multiply(x)), best_of(lambda: linear(pool, x, packed, 1536)))
    return bandwidth, 2 * 1536**3 / product


def products(pool: Pool) -> dict[str, object]:
    """Microseconds of the small model's largest layer product, ours and oneDNN's prepacked one."""
    found: dict[str, object] = {}
    copies = 12
    weights = [torch.randn(2 * SMALL.inner, SMALL.hidden).bfloat16() for _ in range(copies)]
    packed, others = [pack_linear(weight) for weight in weights], [make_linear(weight) for weight in weights]
    for rows in (1, 8, 32, 512):
        x = torch.randn(rows, SMALL.hidden).bfloat16()
        ours = best_of(lambda x=x: [linear(pool, x, each, 2 * SMALL.inner) for each in packed])  # type: ignore[misc]
        theirs = best_of(lambda x=x: [each(x) for each in others])  # type: ignore[misc]
        found[f"rows_{rows}_us"] = [round(each / copies * 1e6, 1) for each in (ours, theirs)]
    return found


def decoder_figures(pool: Pool, shape: Shape, name: str) -> dict[str, object]:
    """Milliseconds of decode steps, and tokens/s of prefill."""
    spec = random_decoder(shape)
    layout = KvLayout(
        32 * 2304 // _BLOCK if name == "small" else 16 * 512 // _BLOCK,
        shape.layers,
        shape.kv_heads,
        _BLOCK,
        shape.head_dim,
        torch.bfloat16,
    )
    cache = layout.allocate()
    cache.view(torch.int16).fill_(0x3C00)
    decoder = Decoder(pool, spec, layout, cache)
    found: dict[str, object] = {}
    steps = [(1, 160), (8, 160), (32, 160), (8, 2048)] if name == "small" else [(1, 160), (8, 160)]
    for count, context in steps:
        batch = _batch(layout, count, context - 1, 1)
        ids, rows = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        seconds = best_of(lambda i=ids, b=batch, r=rows: decoder.forward_greedy(i, b, r))  # type: ignore[misc]
        found[f"{name}_b{count}_{context}_ms"] = round(seconds * 1e3, 2)
    count, length = (4, 1024) if name == "small" else (1, 512)
    batch = _batch(layout, count, 0, length)
    ids, rows = torch.zeros(count * length, dtype=torch.int64), torch.arange(length - 1, count * length, length)
    seconds = best_of(lambda: decoder.forward_greedy(ids, batch, rows), least=2)
    found[f"{name}_prefill_tokens_s"] = round(count * length / seconds)
    return found


def random_decoder(shape: Shape) -> DecoderSpec:
    """A Llama with random weights in bfloat16, its products in huge pages."""
    memory = empty_huge(shape.num_bytes).view(torch.bfloat16)
    drawn = (torch.randn(2**20) / 50).bfloat16()
    for part in memory.split(len(drawn)):
        part.copy_(drawn[: len(part)])
    place = 0

    def product(rows: int, columns: int) -> torch.Tensor:
        nonlocal place
        place += rows * columns
        return memory[place - rows * columns : place].view(rows // 32, columns // 2, 32, 2)

    norm, attended = torch.ones(shape.hidden), shape.heads * shape.head_dim
    layers = [
        LayerWeights(
            qkv=product(shape.qkv, shape.hidden),
            output=product(shape.hidden, attended),
            gate_up=product(2 * shape.inner, shape.hidden),
            down=product(shape.hidden, shape.inner),
            input_norm=norm,
            mlp_norm=norm,
        )
        for _ in range(shape.layers)
    ]
    angles = torch.arange(_POSITIONS)[:, None] * 1e4 ** (-torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    return DecoderSpec(
        dtype=torch.bfloat16, hidden_size=shape.hidden, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, inner_size=shape.inner, layers=layers, rope=[(angles.cos(), angles.sin())],
        eps=1e-5, vocab_size=shape.vocab, embedding=torch.randn(shape.vocab, shape.hidden).bfloat16(),
        final_norm=norm, head=product(shape.vocab, shape.hidden),
    )  # fmt: skip


def _batch(layout: KvLayout, count: int, computed: int, new: int) -> BatchTables:
    per_sequence = -(-(computed + new) // _BLOCK)
    blocks = np.random.default_rng(0).permutation(layout.num_blocks)[: count * per_sequence]
    return BatchTables(
        np.arange(count + 1, dtype=np.int32) * np.int32(new),
        np.full(count, computed, np.int32),
        blocks.astype(np.int32).reshape(count, per_sequence),
    )


if __name__ == "__main__":
    sys.exit(main())
