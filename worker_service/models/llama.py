"""The decoder of Llama and its kin, over a packed batch: the new tokens of all sequences as one row after the other."""

from typing import Protocol

import torch
from torch.nn import functional

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.weights import WeightSlice
from worker_service.kernels.linear import can_pack
from worker_service.models.layers import (
    ColumnParallelLinear,
    ColumnPart,
    HeadNorms,
    LmHead,
    RmsNorm,
    RowParallelLinear,
    Tensors,
    VocabParallelEmbedding,
    even_part,
    kv_head_part,
    vocab_part,
)
from worker_service.models.parallel import Collectives, ParallelConfig
from worker_service.models.rope import RopeShape, RotaryEmbedding, apply_rope, rope_frequencies


class Attention(Protocol):
    """Attention over the paged KV cache, bound to one step's batch."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores the new keys and values and attends to everything its sequence may see.

        `layer` counts from 0 on this rank. query [num_tokens, heads, head_dim], key and value
        [num_tokens, kv_heads, head_dim] -> [num_tokens, heads * head_dim].
        """
        ...


class LlamaModel:
    """This rank's part of a decoder: its stage's layers, its share of heads and of the vocabulary.

    Knows nothing of sequences; attention is given with each call.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelConfig, group: Collectives) -> None:
        """Raises CheckpointError for a config this class does not compute, ValueError for one that
        cannot be split over `parallel`."""
        _check(config)
        self.config = config
        self.parallel = parallel
        self.num_heads = len(even_part(config.num_heads, parallel, what="the number of heads"))
        self.num_kv_heads = len(kv_head_part(config.num_kv_heads, parallel))
        layers = parallel.layer_range(config.num_layers)
        self.layers = [_Layer(config, parallel, group, number) for number in layers]
        # How far back each layer of this rank sees; None for all the way.
        sliding = frozenset(config.sliding_layers)
        self.windows = [config.sliding_window if number in sliding else None for number in layers]
        rows = vocab_part(config.vocab_size, parallel)
        self._embedding = VocabParallelEmbedding(
            "model.embed_tokens", rows, config.hidden_size, parallel=parallel, group=group
        )
        self._norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps)
        self._head = LmHead("lm_head", rows, config.hidden_size, parallel=parallel, group=group)
        self._rope: RotaryEmbedding | None = None

    def weight_slices(self) -> list[WeightSlice]:
        """All that this rank needs of the checkpoint."""
        wanted = [item for layer in self.layers for item in layer.slices()]
        if self._holds_embedding:
            wanted += self._embedding.slices()
        if self.parallel.is_last_stage:
            wanted += self._norm.slices()
            if not self.config.tie_word_embeddings:
                wanted += self._head.slices()
        return wanted

    def place_weights(self, tensors: Tensors) -> int:
        """Takes the tensors of `weight_slices` out of `tensors`, layer by layer: none is held twice for long.

        Answers the bytes that the weights occupy.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        for layer in self.layers:
            layer.place(tensors)
        if self._holds_embedding:
            self._embedding.place(tensors)
        if self.parallel.is_last_stage:
            self._norm.place(tensors)
            if self.config.tie_word_embeddings:
                self._head.share(self._embedding.weight)
                # What is packed is a copy, and looking up rows needs the weight as it was.
                num_bytes += self._embedding.weight.nbytes if can_pack(self._embedding.weight) else 0
            else:
                self._head.place(tensors)
        return num_bytes

    def prepare(self, served_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Makes ready for contexts of up to `served_length` tokens."""
        shape = RopeShape(self.config.rope, self.config.head_dim, self.config.max_position_count, served_length)
        self._rope = RotaryEmbedding(shape, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """One pass over this stage's layers.

        `x` is token ids [num_tokens] on the first stage, the stage before's hidden states
        [num_tokens, hidden_size] on the others. Answers hidden states, not yet normalised.
        """
        if self._rope is None:
            raise RuntimeError("prepare() comes before forward()")
        hidden = self._embedding(x) if self.parallel.is_first_stage else x
        cos, sin = self._rope.select(positions)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, number, attention)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] of the last stage's `forward` -> [rows, vocab_size]."""
        return self._head(self._norm(hidden))

    @property
    def _holds_embedding(self) -> bool:
        shares = self.parallel.is_last_stage and self.config.tie_word_embeddings
        return self.parallel.is_first_stage or shares


class _Layer:
    """Attention and MLP, each with its norm before it and the residual around it."""

    def __init__(self, config: ModelConfig, parallel: ParallelConfig, group: Collectives, number: int) -> None:
        prefix, hidden = f"model.layers.{number}", config.hidden_size
        heads = even_part(config.num_heads, parallel, what="the number of heads")
        kv_heads = kv_head_part(config.num_kv_heads, parallel)
        inner = even_part(config.intermediate_size, parallel, what="intermediate_size")
        query, key_value = heads.scaled(config.head_dim), kv_heads.scaled(config.head_dim)
        self._num_heads, self._num_kv_heads, self._head_dim = len(heads), len(kv_heads), config.head_dim
        self._input_norm = RmsNorm(f"{prefix}.input_layernorm", hidden, config.rms_norm_eps)
        self._qkv = ColumnParallelLinear(
            [
                ColumnPart(f"{prefix}.self_attn.q_proj", query),
                ColumnPart(f"{prefix}.self_attn.k_proj", key_value),
                ColumnPart(f"{prefix}.self_attn.v_proj", key_value),
            ],
            hidden,
            bias=config.qkv_bias,
        )
        self._head_norms = (
            HeadNorms(
                [(f"{prefix}.self_attn.q_norm", len(heads)), (f"{prefix}.self_attn.k_norm", len(kv_heads))],
                config.head_dim,
                config.rms_norm_eps,
            )
            if config.qk_norm
            else None
        )
        self._output = RowParallelLinear(
            f"{prefix}.self_attn.o_proj", query, hidden, bias=config.output_bias, parallel=parallel, group=group
        )
        self._mlp_norm = RmsNorm(f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self._gate_up = ColumnParallelLinear(
            [ColumnPart(f"{prefix}.mlp.gate_proj", inner), ColumnPart(f"{prefix}.mlp.up_proj", inner)],
            hidden,
            bias=config.mlp_bias,
        )
        self._down = RowParallelLinear(
            f"{prefix}.mlp.down_proj", inner, hidden, bias=config.mlp_bias, parallel=parallel, group=group
        )
        self._inner = len(inner)
        self._parts = (
            self._input_norm,
            self._qkv,
            *(() if self._head_norms is None else (self._head_norms,)),
            self._output,
            self._mlp_norm,
            self._gate_up,
            self._down,
        )

    def slices(self) -> list[WeightSlice]:
        return [item for part in self._parts for item in part.slices()]

    def place(self, tensors: Tensors) -> None:
        for part in self._parts:
            part.place(tensors)

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, number: int, attention: Attention
    ) -> torch.Tensor:
        qkv = self._qkv(self._input_norm(hidden)).view(hidden.shape[0], -1, self._head_dim)
        # Queries and keys lie side by side, so one rotation serves both.
        query_key = qkv[:, : self._num_heads + self._num_kv_heads]
        if self._head_norms is not None:
            query_key = self._head_norms(query_key)
        rotated = apply_rope(query_key, cos, sin)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        value = qkv[:, self._num_heads + self._num_kv_heads :]
        hidden = hidden + self._output(attention(number, query, key, value))
        gate_up = self._gate_up(self._mlp_norm(hidden))
        activated = functional.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :])
        return hidden + self._down(activated)


def _check(config: ModelConfig) -> None:
    if config.hidden_act != "silu":
        raise CheckpointError(
            "unsupported",
            f"activation {config.hidden_act!r} is not supported for {config.architecture}",
            "use a checkpoint with hidden_act 'silu'",
            expected="silu",
            found=config.hidden_act,
        )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            "invalid",
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly",
            "correct num_key_value_heads in config.json",
        )
    rope_frequencies(RopeShape(config.rope, config.head_dim, config.max_position_count, config.max_position_count))
