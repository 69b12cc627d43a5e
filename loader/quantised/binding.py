"""The quantisation of a checkpoint: what its config says of each product, settled by what its headers show.

Writers differ in what they store of one scheme, and configs in how exactly they name what is quantised. A weight stored
as it is needs no scheme, whatever the config says; one stored quantised that the config does not name is refused by the
check of completeness. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.fields import Fields
from loader.files import read_json_object
from loader.layout import Linear, parameters
from loader.quantised.config import Quantisation
from loader.quantised.methods import METHODS, method_of
from loader.quantised.schemes import (
    SCALE_DTYPES,
    WORD_BITS,
    AwqScheme,
    GptqScheme,
    GridScheme,
    PackScheme,
    Scheme,
)
from loader.shares import RankPlace
from loader.tensors import TensorInfo

QUANTISATION_FILES = ("quantize_config.json", "quant_config.json")
"""Where writers of GPTQ and AWQ put what others put into config.json."""
_REMEDY = "restore the quantisation settings the model was published with"

Tensors = Mapping[str, TensorInfo]


def quantised_config(config: ModelConfig, fields: Fields, tensors: Tensors) -> ModelConfig:
    """`config` with the quantisation that `fields` state, as `tensors` are stored.

    Raises CheckpointError "unsupported" for what we do not have, "invalid" for settings that are missing, out of
    bounds, or at odds with the model.
    """
    products = [part for part in parameters(config, RankPlace()) if isinstance(part, Linear)]
    method = method_of(fields)
    stated = METHODS[method](fields, [product.name for product in products])
    schemes: dict[str, Scheme] = {}
    biased: set[str] = set()
    for product in products:
        scheme = stated.get(product.name)
        if scheme is None or _is_plain(product.name, tensors):
            continue
        schemes[product.name] = _bound(fields, product, scheme, tensors)
        if not product.bias and f"{product.name}.bias" in tensors:
            biased.add(product.name)
    return replace(config, quantisation=Quantisation(method, schemes, frozenset(biased)))


def stated_quantisation(folder: Path) -> Fields | None:
    """What the files of `folder` state of a quantisation, by a method that we have; None where they state none.

    Raises CheckpointError "unsupported" for another method.
    """
    fields = _stated(folder)
    if fields is not None:
        method_of(fields)
    return fields


def _stated(folder: Path) -> Fields | None:
    path = folder / "config.json"
    values = Fields(path, read_json_object(path), _REMEDY)
    for name in ("quantization_config", "compression_config"):
        content = values.values.get(name)
        if not content:
            continue
        if not isinstance(content, dict):
            raise values.error(name, "is no table", "settings by name", repr(content)[:200])
        nested = content.get("quantization_config")
        return Fields(path, nested if isinstance(nested, dict) and nested else content, _REMEDY)
    for file in (folder / name for name in QUANTISATION_FILES):
        if file.exists():
            content = read_json_object(file)
            default = "awq" if file.name == "quant_config.json" or "w_bit" in content else "gptq"
            return Fields(file, {"quant_method": default, **content}, _REMEDY)
    return None


def _is_plain(name: str, tensors: Tensors) -> bool:
    weight = tensors.get(f"{name}.weight")
    return weight is not None and weight.dtype in SCALE_DTYPES


def _bound(fields: Fields, product: Linear, scheme: Scheme, tensors: Tensors) -> Scheme:
    """The scheme as the product is stored in it."""
    name = product.name
    if isinstance(scheme, GptqScheme):
        _check_packing(fields, product, scheme.bits, (product.inputs.size, product.outputs.size))
        has_g_idx = scheme.act_order or f"{name}.g_idx" in tensors
        return replace(scheme, has_g_idx=has_g_idx, scale_bytes=_scale_bytes(tensors.get(f"{name}.scales")))
    if isinstance(scheme, AwqScheme):
        _check_packing(fields, product, scheme.bits, (product.outputs.size,))
        return replace(scheme, scale_bytes=_scale_bytes(tensors.get(f"{name}.scales")))
    if isinstance(scheme, PackScheme):
        return _bound_packed(scheme, name, tensors)
    assert isinstance(scheme, GridScheme)
    return _bound_grid(scheme, product, tensors)


def _bound_packed(scheme: PackScheme, name: str, tensors: Tensors) -> PackScheme:
    scale = tensors.get(f"{name}.weight_scale")
    return replace(
        scheme,
        act_order=scheme.act_order or f"{name}.weight_g_idx" in tensors,
        scale_rank=None if scheme.scale_rank is None else _rank(scale, scheme.scale_rank),
        has_shape=f"{name}.weight_shape" in tensors,
        scale_bytes=_scale_bytes(scale),
    )


def _bound_grid(scheme: GridScheme, product: Linear, tensors: Tensors) -> GridScheme:
    names = (scheme.scale_name, "weight_scale", "weight_scale_inv")
    scale_name = next((name for name in names if f"{product.name}.{name}" in tensors), scheme.scale_name)
    scale = tensors.get(f"{product.name}.{scale_name}")
    rows, columns = scheme.block_rows, scheme.block_columns
    by_row = ((product.outputs.size, 1), (product.outputs.size,))
    # Native FP8 has no setting for a scale a row, and writers who store one.
    if (rows, columns) == (0, 0) and scale is not None and scale.shape in by_row:
        rows = 1
    is_simple = columns == 0
    return replace(
        scheme,
        block_rows=rows,
        scale_name=scale_name,
        scale_rank=_rank(scale, 2) if is_simple else 2,
        input_scale_rank=_rank(tensors.get(f"{product.name}.input_scale"), 0),
        scale_bytes=_scale_bytes(scale),
    )


def _rank(scale: TensorInfo | None, default: int) -> int:
    return default if scale is None else min(len(scale.shape), 2)


def _scale_bytes(scale: TensorInfo | None) -> int:
    return 4 if scale is not None and scale.dtype == "F32" else 2


def _check_packing(fields: Fields, product: Linear, bits: int, sizes: tuple[int, ...]) -> None:
    """Raises where values of so many bits do not fill whole words: the format has no padding."""
    for size in sizes:
        if size * bits % WORD_BITS:
            shape = [product.outputs.size, product.inputs.size]
            raise CheckpointError(
                "invalid",
                f"{fields.file}: {bits}-bit weights {shape} of {product.name} do not fill words of {WORD_BITS} bits",
                "check that config and weights belong together",
                file=fields.file,
                tensor=product.name,
                expected=f"a multiple of {WORD_BITS // bits}",
                found=str(size),
            )
