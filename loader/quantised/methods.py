"""What a quantization_config says of each product of a model: GPTQ, AWQ and native FP8. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence

from loader.fields import Fields
from loader.quantised.activations import Activation
from loader.quantised.compressed import compressed_schemes
from loader.quantised.schemes import AwqScheme, GptqScheme, GridScheme, Scheme
from loader.quantised.stated import MAX_PATTERNS, block_shape, group_size, match_starts, texts, unsupported

_GPTQ_BITS = (2, 3, 4, 8)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_OTHERS = "use the model quantised by GPTQ, AWQ, compressed-tensors or FP8, unquantised, or as a GGUF"

Parser = Callable[[Fields, Sequence[str]], dict[str, Scheme]]


def gptq_schemes(fields: Fields, names: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each product named, from a GPTQ config.

    Those that `dynamic` leaves out have none, nor has the output layer unless `lm_head` says so.
    """
    form = fields.text("checkpoint_format") or fields.text("format") or "gptq"
    if fields.boolean("is_marlin_format", default=False):
        form = "marlin"
    if form not in _ZERO_OFFSETS:
        remedy = "convert the model to the format gptq_v2 or gptq with GPTQModel"
        raise unsupported(fields, f"weights in GPTQ's format {form[:50]!r}", remedy, "gptq or gptq_v2", form)
    base = _gptq_scheme(fields, _ZERO_OFFSETS[form])
    has_head = fields.boolean("lm_head", default=False)
    schemes: dict[str, Scheme] = {name: base for name in names if has_head or name != "lm_head"}
    settled: set[str] = set()
    for pattern, matched, changes in _gptq_overrides(fields, names):
        for name in matched - settled:
            if pattern.startswith("-"):
                schemes.pop(name, None)
            else:
                merged = Fields(fields.file, {**fields.values, **changes}, fields.remedy)
                schemes[name] = _gptq_scheme(merged, _ZERO_OFFSETS[form])
        settled |= matched
    return schemes


def _gptq_scheme(fields: Fields, zero_offset: int) -> GptqScheme:
    bits = fields.integer("bits", (2, 8))
    if bits not in _GPTQ_BITS:
        raise fields.error("bits", f"is {bits}", "2, 3, 4 or 8", str(bits))
    return GptqScheme(
        bits=bits,
        group_size=group_size(fields, "group_size"),
        symmetric=fields.boolean("sym", default=True),
        act_order=fields.boolean("desc_act", default=False),
        zero_offset=zero_offset,
    )


def _gptq_overrides(fields: Fields, names: Sequence[str]) -> list[tuple[str, frozenset[str], Mapping[str, object]]]:
    """GPTQModel's `dynamic`: expressions, the first that matches a name counts; "-:" leaves it unquantised."""
    dynamic = fields.values.get("dynamic")
    if not dynamic:
        return []
    if (
        not isinstance(dynamic, dict)
        or len(dynamic) > MAX_PATTERNS
        or not all(isinstance(changes, dict) for changes in dynamic.values())
    ):
        raise fields.error("dynamic", "is no table of expressions", "settings by expression", repr(dynamic)[:200])
    patterns = list(dynamic)
    expressions = [pattern.removeprefix("+:").removeprefix("-:") for pattern in patterns]
    matches = match_starts(fields, expressions, names)
    return [(pattern, found, dynamic[pattern]) for pattern, found in zip(patterns, matches, strict=True)]


def awq_schemes(fields: Fields, names: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each product named, from an AWQ config, but for those in `modules_to_not_convert`."""
    version = (fields.text("version") or "gemm").lower()
    if version != "gemm":
        remedy = "use the model in AWQ's version gemm, or convert it to GPTQ or compressed-tensors"
        raise unsupported(fields, f"weights in AWQ's version {version[:50]!r}", remedy, "gemm", version)
    bits = fields.integer("bits" if fields.has("bits") else "w_bit", (1, 8), 4)
    if bits != 4:
        raise fields.error("bits", f"is {bits}", "4", str(bits))
    scheme = AwqScheme(group_size(fields, "group_size" if fields.has("group_size") else "q_group_size"))
    kept = texts(fields, "modules_to_not_convert")
    return {name: scheme for name in names if name != "lm_head" and not any(part in name for part in kept)}


def fp8_schemes(fields: Fields, names: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each product named, from the config of a native FP8 model.

    Which of them are quantised the stored types tell. With blocks the input is rounded by groups of a block's width,
    else by tokens: a scale over all tokens of a step would let one request change another.
    """
    form = fields.text("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(fields, f"8-bit floats of the form {form[:50]!r}", _OTHERS, "e4m3", form)
    activation = fields.text("activation_scheme") or "dynamic"
    if activation not in ("dynamic", "static"):
        raise fields.error("activation_scheme", f"is {activation!r}", "dynamic or static", activation)
    blocks = fields.values.get("weight_block_size")
    if blocks is None:
        scheme = GridScheme("F8_E4M3", 0, 0, Activation("fp8", is_static=activation == "static"))
    else:
        rows, columns = block_shape(fields, "weight_block_size", blocks)
        rounding = Activation("fp8", group_size=columns)
        if activation == "static":
            raise fields.error("activation_scheme", "is static", "dynamic, for weights with blocks", activation)
        scheme = GridScheme("F8_E4M3", rows, columns, rounding, "weight_scale_inv")
    return dict.fromkeys(names, scheme)


METHODS: Mapping[str, Parser] = {
    "gptq": gptq_schemes,
    "awq": awq_schemes,
    "fp8": fp8_schemes,
    "compressed-tensors": compressed_schemes,
}
"""What reads each quant_method that is supported."""


def method_of(fields: Fields) -> str:
    """The method that a quantization_config names. Raises CheckpointError "unsupported" for one that we do not have."""
    method = (fields.text("quant_method") or "").lower()
    if not method:
        method = "compressed-tensors" if fields.has("config_groups") else "gptq" if fields.has("bits") else ""
    if method not in METHODS:
        found = method or "an unnamed method"
        raise unsupported(fields, f"weights quantised by {found[:100]!r}", _OTHERS, ", ".join(METHODS), found)
    return method
