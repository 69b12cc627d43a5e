"""What a decoder is made of, for the compiled kernels, and whether they can compute it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from worker_service.kernels.layout import DTYPES, LANES, PANEL, KvLayout, depth_of
from worker_service.kernels.quantised_layout import QuantisedProduct

MAX_HEAD_DIM = 512
RopeTable = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each float32 [positions, rotary_dim / 2]."""

Product = torch.Tensor | QuantisedProduct
"""A packed weight: of `layout.pack_linear`, or quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Products are packed, norms and biases float32; None where a family has none.

    `qkv` holds the rows of all query heads, then keys, then values; `gate_up_bias` [2 * inner] the gate's
    first. Norms are given as they multiply: Gemma's as 1 + weight. The post norms act on a branch's
    output before it joins the residual. `query_norm` and `key_norm` are [head_dim], or as wide as
    their projection when they normalise all heads at once. `window` counts the positions a token
    sees, itself among them. `rope` is an index into `DecoderSpec.rope`.
    """

    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder: sizes, its layers, and where this rank has them `embedding` [vocab, hidden], not packed unless it is
    quantised, `final_norm` and packed `head`."""

    dtype: torch.dtype
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    layers: Sequence[LayerWeights]
    rope: Sequence[RopeTable]
    eps: float
    scale: float | None = None
    """Of scores; head_dim ** -0.5 by default."""
    softcap: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    vocab_size: int = 0
    embedding: Product | None = None
    embedding_scale: float = 1.0
    final_norm: torch.Tensor | None = None
    head: Product | None = None
    logit_softcap: float = 0.0


def check_spec(spec: DecoderSpec, layout: KvLayout) -> None:
    """Raises ValueError, naming what does not fit, when the kernels cannot compute `spec` with such a cache."""
    for name in ("hidden_size", "head_dim", "inner_size"):
        if getattr(spec, name) % LANES or getattr(spec, name) < LANES:
            raise ValueError(f"{name} {getattr(spec, name)} is not a multiple of {LANES}")
    if spec.head_dim > MAX_HEAD_DIM or spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"head_dim {spec.head_dim} exceeds {MAX_HEAD_DIM}, or heads do not share evenly")
    stored = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype)
    if stored != (len(spec.layers), spec.num_kv_heads, spec.head_dim, spec.dtype):
        raise ValueError(f"the cache is for another decoder: layers, kv heads, head_dim, dtype are {stored}")
    for cos, sin in spec.rope:
        check_tensor("rope", cos, torch.float32, tuple(cos.shape))
        check_tensor("rope", sin, torch.float32, tuple(cos.shape))
        if cos.ndim != 2 or 2 * cos.shape[1] > spec.head_dim:
            raise ValueError(f"rope tables {list(cos.shape)} are not [positions, at most head_dim / 2]")
    hidden, vocab, dtype = spec.hidden_size, spec.vocab_size, spec.dtype
    if isinstance(spec.embedding, QuantisedProduct):
        check_quantised("embedding", spec.embedding, vocab, hidden)
    else:
        check_tensor("embedding", spec.embedding, dtype, (vocab, hidden))
    _check_product("head", spec.head, dtype, vocab, hidden)
    check_tensor("final_norm", spec.final_norm, torch.float32, (hidden,))
    for number, layer in enumerate(spec.layers):
        _check_layer(f"layers[{number}]", layer, spec)


def _check_layer(where: str, layer: LayerWeights, spec: DecoderSpec) -> None:
    hidden, inner, dtype = spec.hidden_size, spec.inner_size, spec.dtype
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = heads + 2 * kv_heads
    for name, out, depth in (
        ("qkv", qkv, hidden),
        ("output", hidden, heads),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
    ):
        _check_product(f"{where}.{name}", getattr(layer, name), dtype, out, depth)
        check_tensor(f"{where}.{name}_bias", getattr(layer, f"{name}_bias"), torch.float32, (out,))
    for name in ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
        check_tensor(f"{where}.{name}", getattr(layer, name), torch.float32, (hidden,))
    if (layer.query_norm is None) != (layer.key_norm is None):
        raise ValueError(f"{where} has one of query_norm and key_norm")
    whole = norm_whole(spec)
    check_tensor(f"{where}.query_norm", layer.query_norm, torch.float32, (heads if whole else spec.head_dim,))
    check_tensor(f"{where}.key_norm", layer.key_norm, torch.float32, (kv_heads if whole else spec.head_dim,))
    if not 0 <= layer.rope < len(spec.rope):
        raise ValueError(f"{where}.rope {layer.rope} is none of {len(spec.rope)} tables")
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"{where}.window {layer.window} must be at least 1")


def _check_product(name: str, product: Product | None, dtype: torch.dtype, out: int, depth: int) -> None:
    if isinstance(product, QuantisedProduct):
        check_quantised(name, product, out, depth)
    else:
        check_tensor(name, product, dtype, packed_shape(out, depth, dtype))


def check_quantised(name: str, product: QuantisedProduct, out: int, depth: int) -> None:
    """Raises ValueError when `product` is no weight [out, depth] that the kernels can read without leaving it."""
    if (product.num_outputs, product.depth) != (out, depth):
        raise ValueError(f"{name} must be [{out}, {depth}], not [{product.num_outputs}, {product.depth}]")
    panels, inputs, groups, span = -(-out // PANEL), product.num_inputs, product.num_groups, product.span
    if product.bits not in (4, 8) or span < LANES or span % LANES or groups < 1 or inputs % (groups * span):
        raise ValueError(f"{name} has {inputs} inputs of {product.bits} bits in {groups} groups, by spans of {span}")
    if product.scales.dtype not in DTYPES:
        raise ValueError(f"{name}.scales must be of {DTYPES}, not {product.scales.dtype}")
    check_tensor(f"{name}.words", product.words, torch.uint8, (panels, inputs * product.bits // 32, PANEL, 4))
    _check_scales(name, product, panels)
    check_tensor(f"{name}.order", product.order, torch.int32, (inputs,))
    if product.order is None:
        if inputs < depth:
            raise ValueError(f"{name} has {inputs} inputs, fewer than {depth}")
    elif int(product.order.max()) >= depth:
        raise ValueError(f"{name}.order names input {int(product.order.max())} of {depth}")
    size = None if product.activation is None else product.activation.group_size
    if size is not None and (size % span or product.order is not None):
        raise ValueError(f"{name} rounds its inputs by {size}, which are no whole spans of {span} in their order")


def _check_scales(name: str, product: QuantisedProduct, panels: int) -> None:
    groups, scales = product.num_groups, product.scales.shape[1] if product.scales.ndim == 3 else 0
    has_factors = product.factors is not None
    if not scales or groups % scales or (has_factors and (product.minima is None) != (product.minimum_factors is None)):
        raise ValueError(f"{name} has {groups} groups and {scales} scales, or minima that they do not fit")
    if product.minima is not None and product.activation is not None:
        raise ValueError(f"{name} has minima, and rounds its inputs")
    for part in ("scales", "minima"):
        check_tensor(f"{name}.{part}", getattr(product, part), product.scales.dtype, (panels, scales, PANEL))
    for part in ("factors", "minimum_factors", "zeros"):
        dtype = torch.uint8 if part == "zeros" else torch.int8
        check_tensor(f"{name}.{part}", getattr(product, part), dtype, (panels, groups, PANEL))


def norm_whole(spec: DecoderSpec) -> bool:
    """Whether query and key norms span all heads at once."""
    widths = {layer.query_norm.shape[0] for layer in spec.layers if layer.query_norm is not None}
    return bool(widths) and widths != {spec.head_dim}


def packed_shape(out: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of `pack_linear`'s result for a weight [out, depth]."""
    return (-(-out // PANEL), depth // depth_of(dtype), PANEL, depth_of(dtype))


def check_tensor(name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError when `tensor`, if there is one, is not such a contiguous one."""
    if tensor is None:
        return
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} must be {dtype} {list(shape)} on the CPU, not {found}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
