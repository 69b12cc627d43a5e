"""How long a step takes: a roofline model of a decoder on one device.

A step computes T new tokens of B sequences, S of which are sampled. Token j of a sequence attends
to all positions up to its own; A is the sum of those over all new tokens, and C the number of
positions whose keys and values are read, each sequence's context once.

    FLOPs = 2 T P + 2 S H + 4 L Q A     P parameters of the layers, H of the output head, L layers,
                                        Q query heads times their size
    bytes = W + (C + T) K               W bytes of the weights that are read, K bytes of keys and values a token
    time  = max(FLOPs / F, bytes / M) + latency + B x sequence latency

Every multiplication with its addition counts as two FLOPs, as in Kaplan et al., "Scaling Laws for
Neural Language Models" (2020), section 2.1, and Pope et al., "Efficiently Scaling Transformer
Inference" (2022), section 2. That the slower of arithmetic and memory sets the time is the roofline of
Williams, Waterman and Patterson (2009). Activations are left out: they stay in caches, or are
small beside the weights. Latency is what a step costs whatever its size: launches, synchronisation, sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a decoder depends on.

    `layer_parameters` are those of all layers together, `head_parameters` those of the output head, and
    `weight_bytes` the bytes that one step reads of both: the embedding table is not among them, but where
    it is the output head too. Raises ValueError for a number that is not above 0.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    layer_parameters: int
    head_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "name" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one new token's attention to one position: its product with a key, and with a value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a device can do. A rate of 0 stands for "without limit", so that 0 everywhere makes steps take no time.

    `compute_flops` in FLOP/s and `bandwidth_bytes` in bytes/s are what is reached, not what a data sheet says.
    `latency_s` is added to each step, `sequence_latency_s` for each sequence in it. Raises ValueError for a
    negative number.
    """

    name: str
    compute_flops: float
    bandwidth_bytes: float
    latency_s: float
    memory_bytes: int
    sequence_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            # Written so that NaN, which compares to nothing, is refused too.
            if name != "name" and not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or above, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of one step, in the letters of the module's formula: T, B, S, A and C."""

    num_tokens: int
    num_sequences: int
    num_sampled: int
    num_pairs: int
    num_context_tokens: int

    @classmethod
    def of(cls, scheduled: Sequence[int], computed: Sequence[int], num_sampled: int | None = None) -> "StepLoad":
        """The load of sequences with so many new tokens and so many computed before; by default all are sampled."""
        num_sequences, num_tokens, num_computed = len(scheduled), sum(scheduled), sum(computed)
        if num_tokens == num_sequences:  # decodes only: nearly every step
            num_pairs = num_computed + num_tokens
        else:
            num_pairs = sum(map(mul, scheduled, computed)) + (sum(map(mul, scheduled, scheduled)) + num_tokens) // 2
        sampled = num_sequences if num_sampled is None else num_sampled
        return cls(num_tokens, num_sequences, sampled, num_pairs, num_computed + num_tokens)


class CostModel:
    """Times of steps of one model on one device. Pure: holds constants only."""

    def __init__(self, shape: ModelShape, hardware: Hardware) -> None:
        self.shape = shape
        self.hardware = hardware
        compute, bandwidth = hardware.compute_flops, hardware.bandwidth_bytes
        self._s_per_flop = 1 / compute if compute else 0.0
        self._s_per_byte = 1 / bandwidth if bandwidth else 0.0

    def step_seconds(self, load: StepLoad) -> float:
        """How long a step takes; 0 for one that computes nothing."""
        if load.num_tokens == 0:
            return 0.0
        shape, hardware = self.shape, self.hardware
        flops = (
            2 * load.num_tokens * shape.layer_parameters
            + 2 * load.num_sampled * shape.head_parameters
            + shape.attention_flops_per_pair * load.num_pairs
        )
        moved = shape.weight_bytes + (load.num_context_tokens + load.num_tokens) * shape.kv_bytes_per_token
        busy = max(flops * self._s_per_flop, moved * self._s_per_byte)
        return busy + hardware.latency_s + load.num_sequences * hardware.sequence_latency_s

    def prefill_seconds(self, num_tokens: int, max_step_tokens: int) -> float:
        """How long a prompt takes alone, in chunks of at most `max_step_tokens`."""
        total = 0.0
        for start in range(0, num_tokens, max_step_tokens):
            chunk = min(max_step_tokens, num_tokens - start)
            total += self.step_seconds(StepLoad.of([chunk], [start], int(start + chunk == num_tokens)))
        return total

    def unloaded_seconds(self, num_prompt_tokens: int, num_output_tokens: int, max_step_tokens: int) -> float:
        """The latency of a request that has the device to itself: its prefill, and a step for each further token."""
        return self.prefill_seconds(num_prompt_tokens, max_step_tokens) + self._decode_seconds(
            num_prompt_tokens, num_output_tokens - 1
        )

    def num_blocks(self, block_size: int, *, memory_fraction: float = 0.9) -> int:
        """KV blocks that fit beside the weights; 0 or less when the weights alone do not."""
        free = int(self.hardware.memory_bytes * memory_fraction) - self.shape.weight_bytes
        return free // (self.shape.kv_bytes_per_token * block_size)

    def _decode_seconds(self, first_computed: int, num_steps: int) -> float:
        """The sum of `num_steps` decode steps of one sequence. Both sides of the roofline grow by a constant a step,
        so they cross once at most, and each side's part is an arithmetic series."""
        if num_steps < 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        flops = 2 * (shape.layer_parameters + shape.head_parameters) + shape.attention_flops_per_pair * (
            first_computed + 1
        )
        moved = shape.weight_bytes + (first_computed + 2) * shape.kv_bytes_per_token
        compute = (flops * self._s_per_flop, shape.attention_flops_per_pair * self._s_per_flop)
        memory = (moved * self._s_per_byte, shape.kv_bytes_per_token * self._s_per_byte)
        busy = _sum_of_larger(compute, memory, num_steps)
        return busy + num_steps * (hardware.latency_s + hardware.sequence_latency_s)


def _sum_of_larger(one: tuple[float, float], other: tuple[float, float], num: int) -> float:
    """Sum over i from 0 to num - 1 of the larger of two lines (value at 0, growth)."""
    low, high = (one, other) if one[0] <= other[0] else (other, one)
    num_high = num
    if low[1] > high[1]:
        num_high = min(num, int((high[0] - low[0]) / (low[1] - high[1])) + 1)
    return _line_sum(high, 0, num_high) + _line_sum(low, num_high, num)


def _line_sum(line: tuple[float, float], start: int, stop: int) -> float:
    num = stop - start
    return num * (line[0] + line[1] * (start + stop - 1) / 2)


# Dense bf16 peak and memory bandwidth of the vendors' data sheets, times what serving engines reach of
# them: six tenths of the arithmetic, eight tenths of the bandwidth.
_COMPUTE_REACHED = 0.6
_BANDWIDTH_REACHED = 0.8


def _accelerator(name: str, peak_flops: float, peak_bytes: float, memory_gb: int) -> Hardware:
    return Hardware(
        name,
        peak_flops * _COMPUTE_REACHED,
        peak_bytes * _BANDWIDTH_REACHED,
        latency_s=0.001,
        memory_bytes=memory_gb * 10**9,
        sequence_latency_s=2e-6,
    )


HARDWARE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _accelerator("h200", 989e12, 4.8e12, 141),
        _accelerator("h100", 989e12, 3.35e12, 80),
        _accelerator("a100", 312e12, 2.04e12, 80),
        _accelerator("l4", 121e12, 300e9, 24),
        # As measured on two cores of a server with bf16 instructions.
        Hardware("cpu", 700e9, 48e9, 0.001, 8 * 10**9, 1e-5),
        Hardware("instant", 0.0, 0.0, 0.0, 80 * 10**9),
    )
}
