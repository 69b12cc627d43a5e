"""What a quantization_config of compressed-tensors says of each product of a model. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loader.fields import Fields
from loader.quantised.activations import Activation, ActivationKind
from loader.quantised.schemes import GridScheme, PackScheme, Scheme
from loader.quantised.stated import MAX_GROUP, MAX_PATTERNS, block_shape, match_starts, texts, unsupported

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_USE_OTHER = f"use the model in one of the formats {', '.join(_FORMATS)}, unquantised, or as a GGUF"
_MAX_GROUPS = 256
_CLASSES = ("Linear",)
_ORDERED = ("group", "dynamic", True)
_UNORDERED = (None, False, "weight", "static")


def compressed_schemes(fields: Fields, names: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each product named, from a config of compressed-tensors.

    A product takes the first group that names it, else the first with an expression for it, else the first for its
    class; those in `ignore` have none.
    """
    _refuse(fields)
    groups = list(_groups(fields))
    targets = [target for group in groups for target in group.targets]
    ignored = texts(fields, "ignore")
    matches = _Matches.of(fields, [*targets, *ignored], names)
    schemes: dict[str, Scheme] = {}
    for name in names:
        if any(matches.rank(target, name) is not None for target in ignored):
            continue
        ranked = [
            (rank, number)
            for number, group in enumerate(groups)
            for rank in (matches.rank(target, name) for target in group.targets)
            if rank is not None
        ]
        if ranked:
            schemes[name] = groups[min(ranked)[1]].scheme
    return schemes


@dataclass(frozen=True, slots=True)
class _Group:
    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class _Matches:
    """Which names the expressions among some targets match."""

    by_expression: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, fields: Fields, targets: Sequence[str], names: Sequence[str]) -> "_Matches":
        expressions = sorted({target for target in targets if target.startswith("re:")})
        if len(expressions) > MAX_PATTERNS:
            raise fields.error("targets", "are too many", f"at most {MAX_PATTERNS}", str(len(expressions)))
        found = match_starts(fields, [expression.removeprefix("re:") for expression in expressions], names)
        return cls(dict(zip(expressions, found, strict=True)))

    def rank(self, target: str, name: str) -> int | None:
        """How closely a target means a product: 0 by name, 1 by an expression, 2 by class; None not at all."""
        if target == name:
            return 0
        if name in self.by_expression.get(target, ()):
            return 1
        return 2 if target in _CLASSES else None


def _refuse(fields: Fields) -> None:
    """Raises for what would change what the model computes, and is not done here."""
    if fields.values.get("kv_cache_scheme"):
        remedy = "use the model without a quantised KV cache, which would be computed otherwise than it was tuned for"
        raise unsupported(fields, "scales of a quantised KV cache", remedy, "no kv_cache_scheme", "kv_cache_scheme")
    if fields.values.get("transform_config"):
        raise unsupported(fields, "transforms of weights", _USE_OTHER, "no transform_config", "transform_config")
    sparsity = fields.values.get("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, dict) else repr(sparsity)
    if form != "dense":
        remedy = "use the model without sparse weights"
        raise unsupported(fields, f"sparse weights in the format {str(form)[:50]!r}", remedy, "dense", str(form))


def _groups(fields: Fields) -> Iterator[_Group]:
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not groups or len(groups) > _MAX_GROUPS:
        raise fields.error("config_groups", "is no table of groups", f"1 to {_MAX_GROUPS} groups", repr(groups)[:200])
    common = fields.text("format")
    for label, content in groups.items():
        group = _inner(fields, f"config_groups.{label[:50]}", content)
        form = group.text("format") or common or ""
        if form not in _FORMATS:
            raise unsupported(fields, f"weights in the format {form[:50]!r}", _USE_OTHER, ", ".join(_FORMATS), form)
        if group.values.get("output_activations"):
            found = "output_activations"
            raise unsupported(fields, "products whose results are quantised", _USE_OTHER, "none", found)
        yield _Group(tuple(texts(group, "targets")), _scheme(group, form))


def _scheme(group: Fields, form: str) -> Scheme:
    weights = _inner(group, "weights", group.values.get("weights"))
    kind, bits = (weights.text("type") or "int").lower(), weights.integer("num_bits", (1, 32), 8)
    inputs = group.values.get("input_activations")
    activation = None if not inputs else _activation(_inner(group, "input_activations", inputs))
    if form == "pack-quantized":
        return _packed(weights, kind, bits, activation)
    expected = "float" if form == "float-quantized" else "int" if form == "int-quantized" else kind
    if kind != expected or bits != 8:
        raise unsupported(group, f"{kind} weights of {bits} bits as {form}", _USE_OTHER, f"{expected} of 8 bits", kind)
    if not weights.boolean("symmetric", default=True):
        raise unsupported(group, f"asymmetric weights as {form}", _USE_OTHER, "symmetric", "asymmetric")
    if activation is not None and activation.kind != ("fp8" if kind == "float" else "int8"):
        found = activation.kind
        raise unsupported(group, f"{kind} weights with inputs of another type", _USE_OTHER, "one type", found)
    rows, columns = _blocks(weights)
    return GridScheme("F8_E4M3" if kind == "float" else "I8", rows, columns, activation)


def _packed(weights: Fields, kind: str, bits: int, activation: Activation | None) -> PackScheme:
    if kind != "int" or bits not in (2, 4, 8):
        raise unsupported(weights, f"{kind} weights of {bits} bits, packed", _USE_OTHER, "int of 2, 4 or 8 bits", kind)
    if activation is not None:
        raise unsupported(weights, "packed weights with quantised inputs", _USE_OTHER, "weights alone", "inputs too")
    rows, columns = _blocks(weights)
    symmetric, order = weights.boolean("symmetric", default=True), weights.values.get("actorder")
    if rows > 1 or not (order in _ORDERED or order in _UNORDERED):
        raise unsupported(weights, "packed weights in blocks, or ordered so,", _USE_OTHER, "groups", str(order))
    if rows == 0 and not symmetric:
        raise unsupported(weights, "packed asymmetric weights with one scale", _USE_OTHER, "a scale a row", "one")
    return PackScheme(bits, columns, symmetric, order in _ORDERED, scale_rank=1 if rows == 0 else None)


def _blocks(weights: Fields) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 for all."""
    size = weights.integer("group_size", (-1, MAX_GROUP)) if weights.has("group_size") else None
    by_size = "tensor" if size is None else "group" if size > 0 else "channel"
    strategy = (weights.text("strategy") or by_size).lower()
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        if size is None or size < 1:
            raise weights.error("group_size", f"is {size}", "at least 1, for the strategy group", str(size))
        return 1, size
    if strategy == "block":
        return block_shape(weights, "block_structure", weights.values.get("block_structure"))
    raise unsupported(weights, f"scales by {strategy[:50]!r}", _USE_OTHER, "tensor, channel, group, block", strategy)


def _activation(inputs: Fields) -> Activation:
    kind, bits = (inputs.text("type") or "int").lower(), inputs.integer("num_bits", (1, 32), 8)
    if bits != 8 or kind not in ("int", "float"):
        raise unsupported(inputs, f"inputs of {bits} bits", _USE_OTHER, "8 bits", str(bits))
    if not inputs.boolean("symmetric", default=True):
        raise unsupported(inputs, "inputs rounded asymmetrically", _USE_OTHER, "symmetric", "asymmetric")
    form: ActivationKind = "int8" if kind == "int" else "fp8"
    size = inputs.integer("group_size", (-1, MAX_GROUP)) if inputs.has("group_size") else None
    dynamic = inputs.values.get("dynamic", False)
    strategy = (inputs.text("strategy") or ("group" if size and size > 0 else "tensor")).lower()
    if dynamic is True and strategy in ("token", "tensor"):
        # One scale over all tokens of a step would let one request change another: each token has its own.
        return Activation(form)
    if dynamic is True and strategy == "group" and size is not None and size > 0:
        return Activation(form, group_size=size)
    if dynamic is False and strategy == "tensor":
        return Activation(form, is_static=True)
    what = f"inputs rounded by {strategy[:50]!r}{' ahead' if dynamic is False else ''}"
    raise unsupported(inputs, what, _USE_OTHER, "token, group, or tensor", strategy)


def _inner(fields: Fields, name: str, value: object) -> Fields:
    if not isinstance(value, dict):
        raise fields.error(name, "is no table", "settings by name", repr(value)[:200])
    return Fields(fields.file, value, fields.remedy)
