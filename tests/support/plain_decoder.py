"""Random decoders with every option of the compiled kernels, and what they compute, written from the definition."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional

from worker_service.kernels.kv_rounding import restore_heads, round_heads
from worker_service.kernels.layout import KvLayout, pack_gate_up, pack_linear
from worker_service.kernels.native import BatchTables, Decoder, Pool
from worker_service.kernels.spec import DecoderSpec, LayerWeights, RopeTable

VOCAB = 150


@dataclass(frozen=True)
class Shape:
    """What a random decoder is like."""

    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    """What keys and values are rounded to."""
    hidden: int = 48
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 64
    num_layers: int = 2
    biases: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    windows: tuple[int | None, ...] = (None,)
    softcap: float = 0.0
    activation: str = "silu"
    rotary_half: int = 8
    block_size: int = 16
    num_positions: int = 200
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0


@dataclass
class PlainDecoder:
    """Weights of one decoder, unpacked."""

    shape: Shape
    seed: int = 0
    layers: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        s, self.draws = self.shape, torch.Generator().manual_seed(self.seed)
        qkv, heads, kv_heads = (s.heads + 2 * s.kv_heads) * s.head_dim, s.heads * s.head_dim, s.kv_heads * s.head_dim
        for _ in range(s.num_layers):
            layer = {
                "qkv": self._weight(qkv, s.hidden),
                "output": self._weight(s.hidden, heads),
                "gate": self._weight(s.inner, s.hidden),
                "up": self._weight(s.inner, s.hidden),
                "down": self._weight(s.hidden, s.inner),
            }
            if s.biases:
                sizes = {"qkv": qkv, "output": s.hidden, "gate_up": 2 * s.inner, "down": s.hidden}
                layer |= {f"{name}_bias": torch.randn(size, generator=self.draws) / 4 for name, size in sizes.items()}
            names = [*(["input_norm", "mlp_norm"] if s.pre_norms else [])]
            names += ["post_attention_norm", "post_mlp_norm"] if s.post_norms else []
            layer |= {name: self._norm(s.hidden) for name in names}
            if s.head_norms or s.whole_norms:
                layer["query_norm"] = self._norm(heads if s.whole_norms else s.head_dim)
                layer["key_norm"] = self._norm(kv_heads if s.whole_norms else s.head_dim)
            self.layers.append(layer)
        self.embedding = torch.randn(VOCAB, s.hidden, generator=self.draws).to(s.dtype)
        self.final_norm = self._norm(s.hidden)
        self.head = self._weight(VOCAB, s.hidden)
        self.rope = [self._rope(10.0), self._rope(1000.0)]

    def spec(self) -> DecoderSpec:
        """For the kernels."""
        s, layers = self.shape, []
        for number, layer in enumerate(self.layers):
            rest = {name: value for name, value in layer.items() if name.endswith(("_norm", "_bias"))}
            packed = {name: pack_linear(layer[name]) for name in ("qkv", "output", "down")}
            gate_up = pack_gate_up(layer["gate"], layer["up"])
            layers.append(LayerWeights(**packed, gate_up=gate_up, **rest, window=self._window(number), rope=number % 2))
        return DecoderSpec(
            dtype=s.dtype, hidden_size=s.hidden, num_heads=s.heads, num_kv_heads=s.kv_heads, head_dim=s.head_dim,
            inner_size=s.inner, layers=layers, rope=self.rope, eps=1e-5, softcap=s.softcap,
            activation=s.activation,  # type: ignore[arg-type]
            vocab_size=VOCAB, embedding=self.embedding, embedding_scale=s.embedding_scale,
            final_norm=self.final_norm, head=pack_linear(self.head), logit_softcap=s.logit_softcap,
        )  # fmt: skip

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of every position of one sequence, float64 [length, VOCAB], without any cache."""
        x = self.embedding[token_ids].double() * self.shape.embedding_scale
        for number, layer in enumerate(self.layers):
            x = x + self.attention(number, x)
            x = x + self.mlp(layer, x)
        logits = _rms_norm(x, self.final_norm) @ self.head.double().T
        return _cap(logits, self.shape.logit_softcap)

    def attention(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One layer's attention branch over a whole sequence [length, hidden]."""
        s, layer, length = self.shape, self.layers[number], len(x)
        sizes = [count * s.head_dim for count in (s.heads, s.kv_heads, s.kv_heads)]
        parts = _linear(_rms_norm(x, layer.get("input_norm")), layer["qkv"], layer.get("qkv_bias")).split(sizes, -1)
        query, key, value = (part.reshape(length, -1, s.head_dim) for part in parts)
        if s.whole_norms:
            query = _rms_norm(query.flatten(1), layer["query_norm"]).view_as(query)
            key = _rms_norm(key.flatten(1), layer["key_norm"]).view_as(key)
        elif s.head_norms:
            query, key = _rms_norm(query, layer["query_norm"]), _rms_norm(key, layer["key_norm"])
        query, key = (_rotate(each, self.rope[number % 2]).transpose(0, 1) for each in (query, key))
        if s.stored is not None:
            key, value = (restore_heads(*round_heads(each, s.stored), torch.float64) for each in (key, value))
        key, value = (each.repeat_interleave(s.heads // s.kv_heads, 0) for each in (key, value.transpose(0, 1)))
        scores = _cap(query @ key.transpose(1, 2) * s.head_dim**-0.5, s.softcap)
        back = torch.arange(length)[:, None] - torch.arange(length)
        window = self._window(number)
        scores = scores.masked_fill((back < 0) | (back >= (window or length)), -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        branch = _linear(attended, layer["output"], layer.get("output_bias"))
        return _rms_norm(branch, layer.get("post_attention_norm"))

    def mlp(self, layer: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The other branch."""
        x = _rms_norm(x, layer.get("mlp_norm"))
        both = layer["gate_up_bias"].split(self.shape.inner) if "gate_up_bias" in layer else (None, None)
        gate, up = _linear(x, layer["gate"], both[0]), _linear(x, layer["up"], both[1])
        gate = functional.silu(gate) if self.shape.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return _rms_norm(_linear(gate * up, layer["down"], layer.get("down_bias")), layer.get("post_mlp_norm"))

    def _window(self, number: int) -> int | None:
        return self.shape.windows[number % len(self.shape.windows)]

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=self.draws) / columns**0.5).to(self.shape.dtype)

    def _norm(self, size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=self.draws) / 4

    def _rope(self, theta: float) -> RopeTable:
        half = self.shape.rotary_half
        angles = torch.arange(self.shape.num_positions)[:, None] * theta ** (-torch.arange(half) / half)
        return angles.cos(), angles.sin()


class Server:
    """A decoder of the kernels with a cache, and sequences that grow in it."""

    def __init__(self, pool: Pool, plain: PlainDecoder, *, num_blocks: int = 80, seed: int = 0) -> None:
        s = plain.shape
        self.layout = KvLayout(num_blocks, s.num_layers, s.kv_heads, s.block_size, s.head_dim, s.dtype, s.stored)
        self.cache = self.layout.allocate()
        # What a block's former owner left there must never matter.
        self.cache.view(torch.int8).fill_(-1)  # which as a float is no number
        self.decoder = Decoder(pool, plain.spec(), self.layout, self.cache)
        self.blocks_per_sequence = -(-s.num_positions // s.block_size)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def batch(self, counts: dict[str, int]) -> BatchTables:
        """The tables for so many new tokens of each named sequence, which grow by them."""
        for name in counts:
            if name not in self._tables:
                self._tables[name] = [self._free.pop() for _ in range(self.blocks_per_sequence)]
        computed = [self._lengths.get(name, 0) for name in counts]
        self._lengths |= {name: length + counts[name] for name, length in zip(counts, computed, strict=True)}
        return BatchTables(
            np.cumsum([0, *counts.values()], dtype=np.int32),
            np.array(computed, np.int32),
            np.array([self._tables[name] for name in counts], np.int32),
        )

    def step(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Logits of all new tokens of each sequence."""
        batch = self.batch({name: len(ids) for name, ids in tokens.items()})
        ids = torch.cat(list(tokens.values()))
        logits = self.decoder.forward(ids, batch, torch.arange(len(ids)))
        return dict(zip(tokens, logits.split([len(each) for each in tokens.values()]), strict=True))


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids int64 [length]."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def variant(shape: Shape, **changes: object) -> Shape:
    """`shape` with changes."""
    return replace(shape, **changes)  # type: ignore[arg-type]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight.double(), None if bias is None else bias.double())


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


def _cap(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit) if limit else x


def _rotate(heads: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    half = rope[0].shape[1]
    cos, sin = (table[: len(heads), None].double() for table in rope)
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
