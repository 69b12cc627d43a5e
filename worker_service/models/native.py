"""Decoders for the compiled CPU kernels: which they compute, and the parameters of `loader.layout` packed for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
import torch

from loader.adapters.load import LoraFactors
from loader.config import ModelConfig, RopeConfig
from loader.layout import NORM_NAMES
from loader.quantised.packed import Packed, take_packed
from loader.quantised.roundings import Rounding
from loader.quantised.schemes import GridScheme, Scheme
from loader.shares import RankPlace, Share, even_share, grouped_share, stage_layers, vocabulary_share
from worker_service.kernels.adapters import AdapterWeights, PackedFactors, pack_factors
from worker_service.kernels.layout import DTYPES, LANES, pack_gate_up, pack_linear
from worker_service.kernels.quantised_layout import QuantisedProduct, flatten_product, pack_quantised, product_of
from worker_service.kernels.quantised_parts import can_compute
from worker_service.kernels.spec import MAX_HEAD_DIM, DecoderSpec, LayerWeights, Product, RopeTable
from worker_service.models.rope import rope_frequencies, rope_shape

LAYOUT = "native-3"
"""Names what `pack_weights` makes; to be changed with it."""

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# The kernels' names for what NORM_NAMES lists.
_NORMS = ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")

# The products of a layer, and of which they are made.
_PARTS = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "output": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}

Tensors = dict[str, torch.Tensor]


_log = structlog.stdlib.get_logger(__name__)


def computes(
    config: ModelConfig,
    place: RankPlace,
    dtype: torch.dtype,
    rounding: Rounding | None = None,
    stored: torch.dtype | None = None,
) -> bool:
    """Whether the kernels compute this rank's part: all of a dense decoder, in a type and in sizes that they have,
    its weights, and what is `stored` in the cache, unquantised or integers."""
    schemes = () if config.quantisation is None else config.quantisation.schemes.values()
    return (
        dtype in DTYPES
        and stored in (None, torch.int8)
        and config.family != "transformers"
        and config.experts is None
        and rounding != "fp8"
        and all(_computes_scheme(scheme) for scheme in schemes)
        and config.hidden_act in _ACTIVATIONS
        and not (config.qk_norm_whole and place.tensor_parallel_size > 1)
        and not any(size % LANES for size in (config.hidden_size, config.head_dim, part_of(config, place).inner_size))
        and config.head_dim <= MAX_HEAD_DIM
    )


@dataclass(frozen=True, slots=True)
class NativePart:
    """What of a decoder a rank computes: its stage's layers, its heads, inner features and token ids."""

    layers: range
    num_heads: int
    num_kv_heads: int
    inner_size: int
    vocabulary: Share
    place: RankPlace


def part_of(config: ModelConfig, place: RankPlace) -> NativePart:
    """The part of the rank at `place`. Raises ValueError for a size that cannot split the model."""
    rank, size = place.tensor_rank, place.tensor_parallel_size
    return NativePart(
        layers=stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size),
        num_heads=len(even_share(config.num_heads, rank, size, what="the number of heads")),
        num_kv_heads=len(grouped_share(config.num_kv_heads, rank, size)),
        inner_size=len(even_share(config.intermediate_size, rank, size, what="intermediate_size")),
        vocabulary=vocabulary_share(config.vocab_size, rank, size),
        place=place,
    )


def _computes_scheme(scheme: Scheme) -> bool:
    if not isinstance(scheme, GridScheme):
        return True
    # Groups of inputs must not be put into another order where the inputs themselves are rounded by groups.
    in_order = scheme.activation is None or scheme.block_columns % LANES == 0
    return scheme.dtype == "I8" and can_compute(scheme.activation) and in_order


def pack_weights(config: ModelConfig, part: NativePart, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Takes the tensors of a part out of `tensors`, layer by layer, and answers them packed, under our own names.

    Quantised products of one input that have no layout in common are made whole, in `dtype`.
    """
    packed: Tensors = {}
    for number in part.layers:
        layer = _pack_layer(config, f"model.layers.{number}", tensors, dtype)
        packed.update((f"layers.{number}.{name}", tensor) for name, tensor in layer.items())
    packed |= _pack_vocabulary(config, part, tensors, dtype)
    if part.place.is_last_stage:
        packed["final_norm"] = _norm_weight(config, tensors.pop("model.norm.weight"))
    return packed


def _pack_vocabulary(config: ModelConfig, part: NativePart, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The embedding and the head, where this rank has them."""
    packed: Tensors = {}
    embedding = take_packed("model.embed_tokens", tensors) or tensors.pop("model.embed_tokens.weight", None)
    if embedding is not None and not isinstance(embedding, torch.Tensor):
        # A head that shares its weight is where rows are looked up, too.
        packed |= _named("head" if config.tie_word_embeddings else "embedding", _packed_product([embedding], dtype))
    elif embedding is not None and part.place.is_first_stage:
        packed["embedding"] = embedding.contiguous()
    if part.place.is_last_stage and not any(name.startswith("head") for name in packed):
        head = embedding if config.tie_word_embeddings and embedding is not None else _taken("lm_head", tensors)
        packed |= _named("head", _packed_product([head], dtype))
    return packed


def pack_adapter(part: NativePart, factors: Mapping[str, LoraFactors]) -> AdapterWeights:
    """An adapter's factors, in the model's type, by the modules of `loader.layout`, packed for the kernels."""
    layers: list[dict[str, PackedFactors]] = [{} for _ in part.layers]
    for name, each in factors.items():
        _, _, number, _, module = name.split(".")
        layers[int(number) - part.layers.start][module.removesuffix("_proj")] = pack_factors(
            each.a, each.b, each.scaling
        )
    return AdapterWeights(layers)


def _taken(name: str, tensors: Tensors) -> torch.Tensor | Packed:
    packed = take_packed(name, tensors)
    return tensors.pop(f"{name}.weight") if packed is None else packed


def _packed_product(
    weights: Sequence[torch.Tensor | Packed], dtype: torch.dtype, *, interleave: bool = False
) -> Product:
    """Weights of one input as one product; with `interleave` they are a gate's and an up's."""
    quantised = [weight for weight in weights if not isinstance(weight, torch.Tensor)]
    if len(quantised) == len(weights):
        product = pack_quantised(quantised, dtype, interleave=interleave)
        if product is not None:
            return product
    if quantised:
        shapes = [list(weight.shape) for weight in weights]
        _log.warning("quantised_weights_made_whole", shapes=shapes, reason="they have no layout in common")
    whole = [weight if isinstance(weight, torch.Tensor) else weight.dequantise().to(dtype) for weight in weights]
    if interleave:
        gate, up = whole
        return pack_gate_up(gate, up)
    return pack_linear(whole[0] if len(whole) == 1 else torch.cat(whole))


def _named(name: str, product: Product) -> Tensors:
    return flatten_product(name, product) if isinstance(product, QuantisedProduct) else {name: product}


def decoder_spec(
    config: ModelConfig, part: NativePart, packed: Mapping[str, torch.Tensor], dtype: torch.dtype, served_length: int
) -> DecoderSpec:
    """A part of a decoder in `dtype`, on weights of `pack_weights`, for contexts of up to `served_length` tokens."""
    ropes = [_rope_table(config, config.rope, served_length)]
    if config.local_rope is not None:
        ropes.append(_rope_table(config, config.local_rope, served_length))
    by_layer: dict[int, dict[str, Any]] = {number: {} for number in part.layers}
    rest: dict[str, Product] = {}
    for name, product in _products(packed).items():
        if name.startswith("layers."):
            _, index, module = name.split(".")
            by_layer[int(index)][module] = product
        else:
            rest[name] = product
    layers = []
    for number, weights in by_layer.items():
        is_sliding = number in config.sliding_layers
        is_local = is_sliding and config.local_rope is not None
        window = config.sliding_window if is_sliding else None
        layers.append(LayerWeights(**weights, window=window, rope=int(is_local)))
    final_norm = rest.get("final_norm")
    assert final_norm is None or isinstance(final_norm, torch.Tensor)
    head, place = rest.get("head"), part.place
    return DecoderSpec(
        dtype=dtype,
        hidden_size=config.hidden_size,
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=config.head_dim,
        inner_size=part.inner_size,
        layers=layers,
        rope=ropes,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
        activation=_ACTIVATIONS[config.hidden_act],
        vocab_size=len(part.vocabulary),
        embedding=rest.get("embedding", head) if place.is_first_stage else None,
        # As the models were trained: rounded to the type that it is multiplied in.
        embedding_scale=torch.tensor(config.embedding_scale, dtype=dtype).item(),
        final_norm=final_norm,
        head=head if place.is_last_stage else None,
        logit_softcap=config.logit_softcap or 0.0,
    )


def _products(packed: Mapping[str, torch.Tensor]) -> dict[str, Product]:
    """The tensors, those that stand for one quantised product as one."""
    products: dict[str, Product] = {}
    parts: dict[str, Tensors] = {}
    quantised = {name.removesuffix(".form") for name in packed if name.endswith(".form")}
    for name, tensor in packed.items():
        owner, _, part = name.rpartition(".")
        if owner in quantised:
            parts.setdefault(owner, {})[part] = tensor
        else:
            products[name] = tensor
    return products | {name: product_of(tensors) for name, tensors in parts.items()}


def _pack_layer(config: ModelConfig, prefix: str, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    packed: Tensors = {}
    for name, parts in _PARTS.items():
        names = [f"{prefix}.{part}_proj" for part in parts]
        weights = [_taken(part, tensors) for part in names]
        biases = [tensors.pop(f"{part}.bias", None) for part in names]
        if any(bias is not None for bias in biases):
            # Some writers of GPTQ store one beside a weight, and none beside the next.
            present = [
                torch.zeros(weight.shape[0]) if bias is None else bias.float()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            packed[f"{name}_bias"] = torch.cat(present)
        packed |= _named(name, _packed_product(weights, dtype, interleave=name == "gate_up"))
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
