"""What is compared, against whom, and what must come out: issue-wide bars as data. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.peers.rates import Answer, decode_rate, output_rate, prompt_rate

OURS = "stepwire"
STREAMED = "stepwire_streamed"
NUM_OUT = 64
MIN_BANDWIDTH_SHARE = 0.8
_MAX_WARM_UP_LEN, _QUICK_WARM_UP_TOKENS = 512, 256


@dataclass(frozen=True, slots=True)
class Limit:
    """The least ratio that must hold, and the one to reach for."""

    floor: float
    goal: float


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison of rates. `limits` are by peer; `rounds` are for a full run and for a quick one.

    `measure` is "output", "prompt" or "decode", see `rate`; `model` is "demo" or "big". `quick_batch` is the batch of a
    quick run where that is smaller: prompts that fill a step by themselves are as fast one by one.
    """

    key: str
    model: str
    batch: int
    prompt_len: int
    measure: str
    rounds: tuple[int, int]
    limits: Mapping[str, Limit]
    quick_batch: int | None = None

    def num_prompts(self, *, quick: bool) -> int:
        """Prompts of a round."""
        return self.quick_batch if quick and self.quick_batch is not None else self.batch

    def warm_up_len(self, *, quick: bool) -> int:
        """Tokens of each prompt of the round before the first. A quick run touches every path, and no more: of the
        long rows its minutes would go to prompts that do not count."""
        most = _QUICK_WARM_UP_TOKENS // self.num_prompts(quick=True) if quick else _MAX_WARM_UP_LEN
        return min(most, self.prompt_len)

    @property
    def num_out(self) -> int:
        """Tokens of each sequence."""
        return 1 if self.measure == "prompt" else NUM_OUT

    def rate(self, answer: Answer) -> float:
        """Tokens a second: of output with the prompts' time, of the prompts, or of a full batch that decodes."""
        if self.measure == "prompt":
            return prompt_rate(answer, self.prompt_len)
        return decode_rate(answer) if self.measure == "decode" else output_rate(answer)


def _limits(**values: tuple[float, float]) -> dict[str, Limit]:
    return {peer: Limit(*pair) for peer, pair in values.items()}


_EQUAL = _limits(vllm=(1.0, 1.0), llamacpp=(1.0, 1.0))
START = "start"
START_LIMITS = _limits(vllm=(10.0, 14.0), hf=(0.5, 1.0))
ROWS = (
    Row("b1", "demo", 1, 128, "output", (9, 2), _limits(vllm=(1.3, 1.5), llamacpp=(1.0, 1.15), hf=(2.5, 3.0))),
    Row("b8", "demo", 8, 128, "output", (7, 1), _limits(vllm=(1.25, 1.5), llamacpp=(1.6, 1.9), hf=(4.5, 5.0))),
    Row("b32", "demo", 32, 128, "output", (5, 1), _limits(vllm=(1.1, 1.4), llamacpp=(2.0, 2.6), hf=(3.2, 3.6))),
    Row("prefill", "demo", 4, 1024, "prompt", (5, 1), _limits(vllm=(1.15, 1.35), llamacpp=(1.6, 2.0), hf=(2.0, 2.4))),
    Row("ctx2k", "demo", 8, 2048, "decode", (3, 1), _limits(vllm=(1.2, 1.5), llamacpp=(1.3, 1.6), hf=(4.0, 5.0))),
    Row("big_b1", "big", 1, 128, "output", (3, 1), _EQUAL),
    Row("big_b8", "big", 8, 128, "output", (3, 1), _EQUAL),
    Row("big_prefill", "big", 4, 1024, "prompt", (3, 1), _EQUAL, quick_batch=1),
)
KEYS = (*(row.key for row in ROWS), START)


@dataclass(frozen=True, slots=True)
class Options:
    """What of all to run."""

    rows: tuple[Row, ...]
    peers: tuple[str, ...]
    starts: bool
    quick: bool
    serve_flags: tuple[str, ...]


@dataclass(slots=True)
class Measured:
    """What a run found: rates by row and system, seconds of the starts, what failed, and other figures.

    Bandwidths are in bytes/s: what the machine reads, and what our decode steps at batch 1 read of weights.
    """

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    starts: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    agreeing_tokens: dict[str, int] = field(default_factory=dict)
    bandwidth: float | None = None
    used_bandwidth: float | None = None
