"""Decoders for the compiled CPU kernels: which they compute, and the parameters of `loader.layout` packed for them."""

from collections.abc import Mapping
from typing import Literal

import torch

from loader.adapters.load import LoraFactors
from loader.config import ModelConfig, RopeConfig
from loader.layout import NORM_NAMES
from loader.shares import RankPlace
from worker_service.kernels.adapters import AdapterWeights, PackedFactors, pack_factors
from worker_service.kernels.layout import DTYPES, LANES, pack_gate_up, pack_linear
from worker_service.kernels.spec import MAX_HEAD_DIM, DecoderSpec, LayerWeights, RopeTable
from worker_service.models.rope import rope_frequencies, rope_shape

LAYOUT = "native-1"
"""Names what `pack_weights` makes; to be changed with it."""

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# The kernels' names for what NORM_NAMES lists.
_NORMS = ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")

Tensors = dict[str, torch.Tensor]


def computes(config: ModelConfig, place: RankPlace, dtype: torch.dtype) -> bool:
    """Whether the kernels compute this rank's part: all of a dense decoder, in a type and in sizes that they have."""
    return (
        dtype in DTYPES
        and config.family != "transformers"
        and config.experts is None
        and config.quantisation is None
        and config.hidden_act in _ACTIVATIONS
        and place.tensor_parallel_size == place.pipeline_parallel_size == 1
        and not any(size % LANES for size in (config.hidden_size, config.head_dim, config.intermediate_size))
        and config.head_dim <= MAX_HEAD_DIM
    )


def pack_weights(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Takes a model's tensors out of `tensors`, layer by layer, and answers them packed, under our own names."""
    packed: Tensors = {}
    for number in range(config.num_layers):
        layer = _pack_layer(config, f"model.layers.{number}", tensors)
        packed.update((f"layers.{number}.{name}", tensor) for name, tensor in layer.items())
    embedding = tensors.pop("model.embed_tokens.weight")
    packed["embedding"] = embedding.contiguous()
    packed["head"] = pack_linear(embedding if config.tie_word_embeddings else tensors.pop("lm_head.weight"))
    packed["final_norm"] = _norm_weight(config, tensors.pop("model.norm.weight"))
    return packed


def pack_adapter(config: ModelConfig, factors: Mapping[str, LoraFactors]) -> AdapterWeights:
    """An adapter's factors, in the model's type, by the modules of `loader.layout`, packed for the kernels."""
    layers: list[dict[str, PackedFactors]] = [{} for _ in range(config.num_layers)]
    for name, each in factors.items():
        _, _, number, _, module = name.split(".")
        layers[int(number)][module.removesuffix("_proj")] = pack_factors(each.a, each.b, each.scaling)
    return AdapterWeights(layers)


def decoder_spec(config: ModelConfig, packed: Mapping[str, torch.Tensor], served_length: int) -> DecoderSpec:
    """The decoder on weights that `pack_weights` made, for contexts of up to `served_length` tokens."""
    ropes = [_rope_table(config, config.rope, served_length)]
    if config.local_rope is not None:
        ropes.append(_rope_table(config, config.local_rope, served_length))
    by_layer: list[Tensors] = [{} for _ in range(config.num_layers)]
    for name, tensor in packed.items():
        if name.startswith("layers."):
            _, index, part = name.split(".")
            by_layer[int(index)][part] = tensor
    layers = []
    for number, weights in enumerate(by_layer):
        is_sliding = number in config.sliding_layers
        is_local = is_sliding and config.local_rope is not None
        window = config.sliding_window if is_sliding else None
        layers.append(LayerWeights(**weights, window=window, rope=int(is_local)))
    dtype = packed["embedding"].dtype
    return DecoderSpec(
        dtype=dtype,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner_size=config.intermediate_size,
        layers=layers,
        rope=ropes,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
        activation=_ACTIVATIONS[config.hidden_act],
        vocab_size=config.vocab_size,
        embedding=packed["embedding"],
        # As the models were trained: rounded to the type that it is multiplied in.
        embedding_scale=torch.tensor(config.embedding_scale, dtype=dtype).item(),
        final_norm=packed["final_norm"],
        head=packed["head"],
        logit_softcap=config.logit_softcap or 0.0,
    )


def _pack_layer(config: ModelConfig, prefix: str, tensors: Tensors) -> Tensors:
    def taken(kind: str, *names: str) -> list[torch.Tensor]:
        return [tensors.pop(f"{prefix}.{name}_proj.{kind}") for name in names]

    attention, mlp = ("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")
    packed = {
        "qkv": pack_linear(torch.cat(taken("weight", *attention))),
        "output": pack_linear(*taken("weight", "self_attn.o")),
        "gate_up": pack_gate_up(*taken("weight", *mlp)),
        "down": pack_linear(*taken("weight", "mlp.down")),
    }
    if config.qkv_bias:
        packed["qkv_bias"] = torch.cat(taken("bias", *attention)).float()
    if config.output_bias:
        packed["output_bias"] = torch.cat(taken("bias", "self_attn.o")).float()
    if config.mlp_bias:
        packed["gate_up_bias"] = torch.cat(taken("bias", *mlp)).float()
        packed["down_bias"] = torch.cat(taken("bias", "mlp.down")).float()
    norms = [
        (ours, stored) for ours, stored in zip(_NORMS, NORM_NAMES[config.norms], strict=True) if stored is not None
    ]
    if config.qk_norm:
        norms += [("query_norm", "self_attn.q_norm"), ("key_norm", "self_attn.k_norm")]
    for ours, stored in norms:
        packed[ours] = _norm_weight(config, tensors.pop(f"{prefix}.{stored}.weight"))
    return packed


def _norm_weight(config: ModelConfig, weight: torch.Tensor) -> torch.Tensor:
    return weight.float() + config.norm_offset


def _rope_table(config: ModelConfig, rope: RopeConfig, served_length: int) -> RopeTable:
    frequencies, factor = rope_frequencies(rope_shape(config, rope, served_length))
    angles = torch.arange(served_length, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
