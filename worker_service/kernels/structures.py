"""From a decoder in tensors to the structures of the C interface, which hold addresses: what they point to must outlive
them."""

import ctypes
from dataclasses import fields

import torch

from worker_service.kernels import abi
from worker_service.kernels.layout import DTYPES, KvLayout
from worker_service.kernels.quantised_layout import QuantisedProduct
from worker_service.kernels.spec import DecoderSpec, LayerWeights, Product, norm_whole


def address(tensor: torch.Tensor | None) -> int | None:
    """Where its first value lies; None where there is none."""
    return None if tensor is None else tensor.data_ptr()


_PRODUCTS = ("qkv", "output", "gate_up", "down")


class QuantisedStructures:
    """The descriptions of quantised weights that the C side holds addresses of."""

    def __init__(self) -> None:
        self._kept: list[abi.Quantised] = []

    def fields(self, name: str, product: Product | None) -> dict[str, int | None]:
        """The two fields of a product, one of them null."""
        if not isinstance(product, QuantisedProduct):
            return {name: address(product), f"quantised_{name}": None}
        self._kept.append(quantised_structure(product))
        return {name: None, f"quantised_{name}": ctypes.addressof(self._kept[-1])}


def quantised_structure(product: QuantisedProduct) -> abi.Quantised:
    """SwQuantised."""
    activation, inputs = product.activation, product.num_inputs
    return abi.Quantised(
        words=address(product.words),
        scales=address(product.scales),
        minima=address(product.minima),
        factors=address(product.factors),
        minimum_factors=address(product.minimum_factors),
        zeros=address(product.zeros),
        order=address(product.order),
        bits=product.bits,
        inputs=inputs,
        depth=product.depth,
        groups=product.num_groups,
        groups_of_scale=product.num_groups // product.scales.shape[1],
        span=product.span,
        zero=product.zero,
        scale_type=DTYPES.index(product.scales.dtype),
        rounding=int(activation is not None),
        rounding_group=inputs if activation is None else activation.group_size or inputs,
    )


def layer_structure(layer: LayerWeights, spec: DecoderSpec, quantised: QuantisedStructures) -> abi.Layer:
    """SwLayer."""
    pointers = {
        each.name: address(getattr(layer, each.name))
        for each in fields(layer)
        if each.name not in ("window", "rope", *_PRODUCTS)
    }
    for name in _PRODUCTS:
        pointers |= quantised.fields(name, getattr(layer, name))
    cos, sin = spec.rope[layer.rope]
    return abi.Layer(**pointers, cos=address(cos), sin=address(sin), window=layer.window or 0, rotary_half=cos.shape[1])


def model_structure(
    spec: DecoderSpec,
    layout: KvLayout,
    layers: "ctypes.Array[abi.Layer]",
    cache: torch.Tensor,
    quantised: QuantisedStructures,
) -> abi.Model:
    """SwModel."""
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "inner_size", "vocab_size")
    return abi.Model(
        dtype=DTYPES.index(spec.dtype),
        **{name: getattr(spec, name) for name in sizes},
        num_layers=len(spec.layers),
        is_gelu=int(spec.activation == "gelu_tanh"),
        norm_whole=int(norm_whole(spec)),
        block_size=layout.block_size,
        rounds_cache=int(layout.stored is not None),
        eps=spec.eps,
        scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
        softcap=spec.softcap,
        embedding_scale=spec.embedding_scale,
        logit_softcap=spec.logit_softcap,
        layers=layers,
        **quantised.fields("embedding", spec.embedding),
        final_norm=address(spec.final_norm),
        **quantised.fields("head", spec.head),
        cache=address(cache),
    )
