"""The parameters of a decoder, and which part of each a rank holds: stated once, for the check of a checkpoint, for
the reader and for the layers that compute. Pure functions; imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from loader.config import ExpertsConfig, ModelConfig, Norms
from loader.other_split import OtherSplit, Stored
from loader.quantised.config import Quantisation
from loader.quantised.schemes import Scheme
from loader.shares import (
    RankPlace,
    Share,
    even_share,
    grouped_share,
    stage_layers,
    vocabulary_share,
    whole_share,
)
from loader.tensors import WeightSlice


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with the weight [outputs.size, inputs.size], of which a rank holds its shares.

    At most one of the shares is not whole: the outputs' where a layer is split by columns, the inputs' where it is
    split by rows. `name` is the tensors' without ".weight" or ".bias"; `bias` tells whether this rank adds one, and
    `scheme` how the weight is stored where it is quantised.
    """

    name: str
    outputs: Share
    inputs: Share
    bias: bool = False
    scheme: Scheme | None = None

    def slices(self) -> Iterator[WeightSlice]:
        """What is wanted of the checkpoint."""
        if self.scheme is None:
            yield self._weight_slice()
        else:
            yield from self.scheme.parts(self.name, self.outputs, self.inputs)
        yield from self.bias_slices()

    def _weight_slice(self) -> WeightSlice:
        shape = (self.outputs.size, self.inputs.size)
        if self.inputs.is_whole:
            return WeightSlice(f"{self.name}.weight", shape, 0, self.outputs.start, self.outputs.stop)
        return WeightSlice(f"{self.name}.weight", shape, 1, self.inputs.start, self.inputs.stop)

    def bias_slices(self) -> Iterator[WeightSlice]:
        """The bias, where this rank adds one."""
        if self.bias:
            yield WeightSlice(f"{self.name}.bias", (self.outputs.size,), 0, self.outputs.start, self.outputs.stop)


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector, such as the weight of a norm; `name` is the tensor's without ".weight".

    A rank holds `share` of it, or all of it.
    """

    name: str
    size: int
    share: Share | None = None

    def slices(self) -> Iterator[WeightSlice]:
        """What is wanted of the checkpoint."""
        if self.share is None:
            yield WeightSlice(f"{self.name}.weight", (self.size,), None, 0, self.size)
        else:
            yield WeightSlice(f"{self.name}.weight", (self.size,), 0, self.share.start, self.share.stop)


@dataclass(frozen=True, slots=True)
class Embedding:
    """A table [rows.size, columns] that is looked up by token id.

    `name` is the tensor's without ".weight", and `scheme` tells how it is stored where it is quantised.
    """

    name: str
    rows: Share
    columns: int
    scheme: Scheme | None = None

    @property
    def outputs(self) -> Share:
        """Its rows: as the weight of a product, which it may be too."""
        return self.rows

    @property
    def inputs(self) -> Share:
        """Its columns."""
        return whole_share(self.columns)

    def slices(self) -> Iterator[WeightSlice]:
        """What is wanted of the checkpoint."""
        if self.scheme is None:
            yield WeightSlice(f"{self.name}.weight", (self.rows.size, self.columns), 0, self.rows.start, self.rows.stop)
        else:
            yield from self.scheme.parts(self.name, self.rows, self.inputs)


Parameter = Linear | Vector | Embedding | Stored


def parameters(config: ModelConfig, place: RankPlace) -> Iterator[Parameter]:
    """All that the rank at `place` holds of a model, under Hugging Face names; `RankPlace()` holds everything.

    Raises ValueError for a size that cannot split the model.
    """
    for parameter in _unquantised(config, place):
        if isinstance(parameter, Linear | Embedding) and config.quantisation is not None:
            yield _with_scheme(parameter, config.quantisation)
        else:
            yield parameter


def _with_scheme(part: Linear | Embedding, quantisation: Quantisation) -> Linear | Embedding:
    scheme = quantisation.schemes.get(part.name)
    if scheme is None:
        return part
    if isinstance(part, Embedding):
        return replace(part, scheme=scheme)
    # Of a product that is split by rows one rank adds the bias.
    bias = part.bias or (part.name in quantisation.biased and part.inputs.start == 0)
    return replace(part, scheme=scheme, bias=bias)


def _unquantised(config: ModelConfig, place: RankPlace) -> Iterator[Parameter]:
    if config.other is not None:
        yield from OtherSplit(config).parameters(place)
        return
    shares = _Shares.of(config, place)
    for layer in stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size):
        yield from _layer(config, shares, layer)
    if place.is_first_stage or (place.is_last_stage and config.tie_word_embeddings):
        yield Embedding("model.embed_tokens", shares.vocabulary, config.hidden_size)
    if place.is_last_stage:
        yield Vector("model.norm", config.hidden_size)
        if not config.tie_word_embeddings:
            yield Linear("lm_head", shares.vocabulary, whole_share(config.hidden_size))


def weight_slices(config: ModelConfig, place: RankPlace) -> list[WeightSlice]:
    """All that a rank needs of a checkpoint. Raises ValueError for a size that cannot split the model."""
    return [want for parameter in parameters(config, place) for want in parameter.slices()]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of the model must hold."""
    return {want.name: want.shape for want in weight_slices(config, RankPlace())}


def tensor_parallel_problem(config: ModelConfig, size: int) -> str | None:
    """Why the model cannot be split over `size` tensor-parallel ranks; None when it can."""
    if config.other is not None:
        return OtherSplit(config).tensor_parallel_problem(size)
    rules: tuple[Callable[[], Share], ...] = (
        lambda: even_share(config.num_heads, 0, size, what="the number of heads"),
        lambda: grouped_share(config.num_kv_heads, 0, size),
        lambda: _inner_share(config, 0, size),
        lambda: _expert_share(config, 0, size),
        lambda: vocabulary_share(config.vocab_size, 0, size),
    )
    for rule in rules:
        try:
            rule()
        except ValueError as error:
            return str(error)
    return None


def pipeline_parallel_problem(config: ModelConfig, num_stages: int) -> str | None:
    """Why the model cannot be split over `num_stages` pipeline stages; None when it can."""
    if config.other is not None:
        return OtherSplit(config).pipeline_parallel_problem(num_stages)
    return f"the model has {config.num_layers} layers" if num_stages > config.num_layers else None


def max_pipeline_parallel_size(config: ModelConfig) -> int:
    """The most pipeline stages that the model can be split over."""
    return config.num_layers if config.other is None else OtherSplit(config).max_pipeline_parallel_size


def tensor_parallel_sizes(config: ModelConfig) -> tuple[int, ...]:
    """All tensor-parallel sizes that split the model, in order; 1 is always among them."""
    divisors = (size for size in range(1, config.num_heads + 1) if config.num_heads % size == 0)
    return tuple(size for size in divisors if tensor_parallel_problem(config, size) is None)


def num_held_kv_heads(config: ModelConfig, place: RankPlace) -> int:
    """Of how many key-value heads the rank at `place` keeps keys and values."""
    if config.other is not None:
        return OtherSplit(config).num_kv_heads(place)
    return len(grouped_share(config.num_kv_heads, place.tensor_rank, place.tensor_parallel_size))


@dataclass(frozen=True, slots=True)
class _Shares:
    """A rank's features of every kind that is divided, and whether it is the one that adds a shared bias."""

    query: Share
    key_value: Share
    inner: Share
    experts: Share
    vocabulary: Share
    is_first: bool

    @classmethod
    def of(cls, config: ModelConfig, place: RankPlace) -> "_Shares":
        rank, size = place.tensor_rank, place.tensor_parallel_size
        return cls(
            even_share(config.num_heads, rank, size, what="the number of heads").scaled(config.head_dim),
            grouped_share(config.num_kv_heads, rank, size).scaled(config.head_dim),
            _inner_share(config, rank, size),
            _expert_share(config, rank, size),
            vocabulary_share(config.vocab_size, rank, size),
            rank == 0,
        )


def _inner_share(config: ModelConfig, rank: int, size: int) -> Share:
    if config.experts is not None and len(config.experts.layers) == config.num_layers:
        return whole_share(config.intermediate_size)  # no layer has an MLP without experts
    return even_share(config.intermediate_size, rank, size, what="intermediate_size")


def _expert_share(config: ModelConfig, rank: int, size: int) -> Share:
    if config.experts is None:
        return whole_share(0)
    return even_share(config.experts.num_experts, rank, size, what="the number of experts")


NORM_NAMES: Mapping[Norms, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""A layer's norms of attention's input and output, and of the MLP's, by where a model normalises; None for none."""


def _layer(config: ModelConfig, shares: _Shares, layer: int) -> Iterator[Parameter]:
    prefix, hidden = f"model.layers.{layer}", whole_share(config.hidden_size)
    for norm in NORM_NAMES[config.norms]:
        if norm is not None:
            yield Vector(f"{prefix}.{norm}", config.hidden_size)
    for name, share in (("q", shares.query), ("k", shares.key_value), ("v", shares.key_value)):
        yield Linear(f"{prefix}.self_attn.{name}_proj", share, hidden, config.qkv_bias)
        if config.qk_norm and name != "v":
            whole = Vector(f"{prefix}.self_attn.{name}_norm", share.size, share)
            yield whole if config.qk_norm_whole else Vector(whole.name, config.head_dim)
    # The sum over the ranks must hold the bias of a product that is split by rows once.
    yield Linear(f"{prefix}.self_attn.o_proj", hidden, shares.query, config.output_bias and shares.is_first)
    if config.experts is not None and layer in config.experts.layers:
        yield from _experts(config.experts, shares.experts, f"{prefix}.mlp", hidden)
        return
    for name in ("gate", "up"):
        yield Linear(f"{prefix}.mlp.{name}_proj", shares.inner, hidden, config.mlp_bias)
    yield Linear(f"{prefix}.mlp.down_proj", hidden, shares.inner, config.mlp_bias and shares.is_first)


def _experts(config: ExpertsConfig, share: Share, prefix: str, hidden: Share) -> Iterator[Parameter]:
    """A router, which every rank holds, and this rank's experts, whole."""
    inner = whole_share(config.intermediate_size)
    yield Linear(f"{prefix}.gate", whole_share(config.num_experts), hidden)
    for expert in range(share.start, share.stop):
        for name in ("gate", "up"):
            yield Linear(f"{prefix}.experts.{expert}.{name}_proj", inner, hidden)
        yield Linear(f"{prefix}.experts.{expert}.down_proj", hidden, inner)
