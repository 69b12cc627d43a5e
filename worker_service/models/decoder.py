"""The decoder of Llama and its kin, over a packed batch: the new tokens of all sequences as one row after the other."""

from collections.abc import Mapping
from typing import Protocol

import torch

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.layout import NORM_NAMES, Embedding, Linear, Parameter, Vector, parameters
from loader.shares import RankPlace, stage_layers, whole_share
from worker_service.kernels.linear import can_pack
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.models.collectives import Collectives
from worker_service.models.experts import ACTIVATIONS, GatedMlp, MixtureOfExperts, linear_of
from worker_service.models.layers import (
    ColumnParallelLinear,
    HeadNorms,
    LmHead,
    ProjectionNorms,
    RmsNorm,
    RowParallelLinear,
    Tensors,
    VocabParallelEmbedding,
)
from worker_service.models.lora import RowAdapters
from worker_service.models.rope import RotaryEmbedding, apply_rope, rope_frequencies, rope_shape
from worker_service.models.scores import Scores
from worker_service.profiled import part

_Rotation = tuple[torch.Tensor, torch.Tensor]


class Attention(Protocol):
    """Attention over the paged KV cache, bound to one step's batch."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores the new keys and values and attends to everything its sequence may see.

        `layer` counts from 0 on this rank. query [num_tokens, heads, head_dim], key and value
        [num_tokens, kv_heads, head_dim] -> [num_tokens, heads * head_dim].
        """
        ...


class Decoder:
    """This rank's part of a decoder: its stage's layers, its share of heads and of the vocabulary.

    Knows nothing of sequences; attention is given with each call.
    """

    def __init__(self, config: ModelConfig, place: RankPlace, group: Collectives | None) -> None:
        """Raises CheckpointError for a config this class does not compute, ValueError for one that
        cannot be split over the group."""
        _check(config)
        held = {parameter.name: parameter for parameter in parameters(config, place)}
        self.config = config
        self.rank_place = place
        numbers = stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)
        self.layers = [_Layer(config, held, number, place, group) for number in numbers]
        self.num_kv_heads = self.layers[0].num_kv_heads
        # How far back each layer of this rank sees; None for all the way.
        sliding = frozenset(config.sliding_layers)
        self.windows = [config.sliding_window if number in sliding else None for number in numbers]
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.scores = [Scores(scale, config.attention_softcap) for _ in numbers]
        self._rotates_locally = [config.local_rope is not None and number in sliding for number in numbers]
        self._embedding: VocabParallelEmbedding | None = None
        self._norm: RmsNorm | None = None
        self._head: LmHead | None = None
        table = held.get("model.embed_tokens")
        if isinstance(table, Embedding):
            self._embedding = VocabParallelEmbedding(table, group)
        if place.is_last_stage:
            self._norm = RmsNorm(_vector(held, "model.norm"), config.rms_norm_eps, config.norm_offset)
            self._head = LmHead(self._head_part(held), place.tensor_parallel_size, group)
        self._rope: RotaryEmbedding | None = None
        self._local_rope: RotaryEmbedding | None = None
        self._embedding_scale = 1.0

    def place_weights(self, tensors: Tensors, make: MakeLinear = make_joined_linear, /) -> int:
        """Takes the tensors of this rank's parameters out of `tensors`, layer by layer: none is held twice for long.

        `make` makes products with quantised weights. Answers the bytes that the weights occupy, as they were given.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        for layer in self.layers:
            layer.place(tensors, make)
        if self._embedding is not None:
            self._embedding.place(tensors)
        if self._norm is not None and self._head is not None:
            self._norm.place(tensors)
            if self._embedding is not None and self.config.tie_word_embeddings:
                weight = self._embedding.weight
                self._head.use(weight, make)
                # What is packed is a copy, and looking up rows needs the weight as it was.
                num_bytes += weight.nbytes if isinstance(weight, torch.Tensor) and can_pack(weight) else 0
            else:
                self._head.place(tensors, make)
        return num_bytes

    def prepare(self, served_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Makes ready for contexts of up to `served_length` tokens."""
        config = self.config
        self._rope = RotaryEmbedding(rope_shape(config, config.rope, served_length), dtype=dtype, device=device)
        if config.local_rope is not None:
            shape = rope_shape(config, config.local_rope, served_length)
            self._local_rope = RotaryEmbedding(shape, dtype=dtype, device=device)
        if self._embedding is not None:
            self._embedding.prepare(dtype)
        # As the models were trained: rounded to the type that it is multiplied in.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """One pass over this stage's layers.

        `x` is token ids [num_tokens] on the first stage, the stage before's hidden states
        [num_tokens, hidden_size] on the others. Answers hidden states, not yet normalised.
        """
        if self._rope is None:
            raise RuntimeError("prepare() comes before forward()")
        hidden = x
        if self._embedding is not None and self.rank_place.is_first_stage:
            hidden = self._embedding(x)
            if self._embedding_scale != 1.0:
                hidden = hidden * self._embedding_scale
        rotation = self._rope.select(positions)
        local = rotation if self._local_rope is None else self._local_rope.select(positions)
        for number, layer in enumerate(self.layers):
            with part(f"layer {number}"):
                chosen = local if self._rotates_locally[number] else rotation
                hidden = layer(hidden, chosen, number, attention, adapters)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] of the last stage's `forward` -> [rows, vocab_size]."""
        if self._norm is None or self._head is None:
            raise RuntimeError("only the last stage produces logits")
        logits, softcap = self._head(self._norm(hidden)), self.config.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap).mul_(softcap)

    def _head_part(self, held: Mapping[str, Parameter]) -> Linear:
        table = held.get("model.embed_tokens")
        if self.config.tie_word_embeddings and isinstance(table, Embedding):
            return Linear("lm_head", table.rows, whole_share(table.columns))
        return linear_of(held, "lm_head")


class _Layer:
    """Attention and MLP, each with its norms and the residual around it."""

    def __init__(
        self,
        config: ModelConfig,
        held: Mapping[str, Parameter],
        number: int,
        place: RankPlace,
        group: Collectives | None,
    ) -> None:
        prefix = f"model.layers.{number}"
        self._norms = [
            None
            if name is None
            else RmsNorm(_vector(held, f"{prefix}.{name}"), config.rms_norm_eps, config.norm_offset)
            for name in NORM_NAMES[config.norms]
        ]
        query, key, value = (linear_of(held, f"{prefix}.self_attn.{name}_proj") for name in ("q", "k", "v"))
        self._head_dim = config.head_dim
        self._num_heads = len(query.outputs) // config.head_dim
        self.num_kv_heads = len(key.outputs) // config.head_dim
        self._qkv = ColumnParallelLinear([query, key, value])
        self._head_norms: HeadNorms | ProjectionNorms | None = None
        if config.qk_norm:
            q_norm, k_norm = (_vector(held, f"{prefix}.self_attn.{name}_norm") for name in ("q", "k"))
            if config.qk_norm_whole:
                self._head_norms = ProjectionNorms(
                    q_norm, k_norm, config.rms_norm_eps, place.tensor_parallel_size, group
                )
            else:
                kinds = ((q_norm, self._num_heads), (k_norm, self.num_kv_heads))
                self._head_norms = HeadNorms(kinds, config.rms_norm_eps, config.norm_offset)
        self._output = RowParallelLinear(linear_of(held, f"{prefix}.self_attn.o_proj"), group)
        self._mlp = _mlp(config, held, number, group)

    def place(self, tensors: Tensors, make: MakeLinear) -> None:
        for norm in (*self._norms, self._head_norms):
            if norm is not None:
                norm.place(tensors)
        for product in (self._qkv, self._output, self._mlp):
            product.place(tensors, make)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: _Rotation,
        number: int,
        attention: Attention,
        adapters: RowAdapters | None,
    ) -> torch.Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        x = hidden if before_attention is None else before_attention(hidden)
        x = self._attend(x, rotation, number, attention, adapters)
        hidden = hidden + (x if after_attention is None else after_attention(x))
        x = self._mlp(hidden if before_mlp is None else before_mlp(hidden), adapters)
        return hidden + (x if after_mlp is None else after_mlp(x))

    def _attend(
        self, x: torch.Tensor, rotation: _Rotation, number: int, attention: Attention, adapters: RowAdapters | None
    ) -> torch.Tensor:
        qkv = self._qkv(x, adapters).view(x.shape[0], -1, self._head_dim)
        # Queries and keys lie side by side, so one rotation serves both.
        query_key = qkv[:, : self._num_heads + self.num_kv_heads]
        if self._head_norms is not None:
            query_key = self._head_norms(query_key)
        rotated = apply_rope(query_key, *rotation)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        value = qkv[:, self._num_heads + self.num_kv_heads :]
        return self._output(attention(number, query, key, value), adapters)


def _mlp(
    config: ModelConfig, held: Mapping[str, Parameter], number: int, group: Collectives | None
) -> GatedMlp | MixtureOfExperts:
    prefix, activation = f"model.layers.{number}.mlp", ACTIVATIONS[config.hidden_act]
    if config.experts is not None and number in config.experts.layers:
        return MixtureOfExperts(config.experts, held, prefix, activation, group)
    return GatedMlp(held, prefix, activation, group)


def _vector(held: Mapping[str, Parameter], name: str) -> Vector:
    parameter = held[name]
    assert isinstance(parameter, Vector), name
    return parameter


def _check(config: ModelConfig) -> None:
    if config.hidden_act not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise CheckpointError(
            "unsupported",
            f"activation {config.hidden_act!r} is not supported for {config.architecture}",
            f"use a checkpoint with one of {names}",
            expected=names,
            found=config.hidden_act,
        )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            "invalid",
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly",
            "correct num_key_value_heads in config.json",
        )
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            rope_frequencies(rope_shape(config, rope, config.max_position_count))
