"""Which slice of which tensor a rank needs. Pure functions; imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loader.config import ModelConfig
from loader.tensors import WeightSlice


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place among the tensor- and pipeline-parallel ranks. Raises ValueError for one outside its size."""

    tensor_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_rank: int = 0
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        places = (
            ("tensor", self.tensor_rank, self.tensor_parallel_size),
            ("pipeline", self.pipeline_rank, self.pipeline_parallel_size),
        )
        for name, rank, size in places:
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} does not lie in a group of {size}")

    @property
    def holds_embedding(self) -> bool:
        """Whether this rank embeds token ids: the first stage's does."""
        return self.pipeline_rank == 0

    @property
    def holds_head(self) -> bool:
        """Whether this rank produces logits: the last stage's does."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1


@dataclass(frozen=True, slots=True)
class Share:
    """The elements `[start, stop)` of a dimension of `size`."""

    size: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def scaled(self, width: int) -> "Share":
        """The same share where every element stands for `width` of them."""
        return Share(self.size * width, self.start * width, self.stop * width)


def even_share(size: int, rank: int, num_ranks: int, *, what: str) -> Share:
    """An even share. Raises ValueError, naming `what`, where `size` does not divide."""
    width, rest = divmod(size, num_ranks)
    if rest:
        raise ValueError(f"{what}, {size}, cannot be divided by {num_ranks}")
    return Share(size, width * rank, width * (rank + 1))


def grouped_share(num_kv_heads: int, rank: int, num_ranks: int) -> Share:
    """Key-value heads: an even share or, with more ranks than heads, one head that several ranks replicate.

    Raises ValueError where neither comes out even.
    """
    what = "the number of key-value heads"
    if num_kv_heads >= num_ranks:
        return even_share(num_kv_heads, rank, num_ranks, what=what)
    if num_ranks % num_kv_heads:
        raise ValueError(f"{what}, {num_kv_heads}, can neither be divided by {num_ranks} nor be replicated evenly")
    head = rank // (num_ranks // num_kv_heads)
    return Share(num_kv_heads, head, head + 1)


def vocabulary_share(vocab_size: int, rank: int, num_ranks: int) -> Share:
    """Token ids, as if padded to a multiple of `num_ranks`: the last shares may be smaller.

    Raises ValueError where some rank would be left with none.
    """
    width = -(-vocab_size // num_ranks)
    if width * (num_ranks - 1) >= vocab_size:
        raise ValueError(f"the vocabulary, {vocab_size}, leaves one of {num_ranks} ranks without a token")
    return Share(vocab_size, width * rank, min(width * (rank + 1), vocab_size))


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a pipeline stage; stages differ by one layer at most, earlier ones are the larger.

    Raises ValueError where a stage would have none.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages")
    size, rest = divmod(num_layers, num_stages)
    start = stage * size + min(stage, rest)
    return range(start, start + size + (stage < rest))


def tensor_parallel_problem(config: ModelConfig, size: int) -> str | None:
    """Why the model cannot be split over `size` tensor-parallel ranks; None when it can."""
    rules: tuple[Callable[[], Share], ...] = (
        lambda: even_share(config.num_heads, 0, size, what="the number of heads"),
        lambda: grouped_share(config.num_kv_heads, 0, size),
        lambda: even_share(config.intermediate_size, 0, size, what="intermediate_size"),
        lambda: vocabulary_share(config.vocab_size, 0, size),
    )
    for rule in rules:
        try:
            rule()
        except ValueError as error:
            return str(error)
    return None


def tensor_parallel_sizes(config: ModelConfig) -> tuple[int, ...]:
    """All tensor-parallel sizes that split the model, in order; 1 is always among them."""
    divisors = (size for size in range(1, config.num_heads + 1) if config.num_heads % size == 0)
    return tuple(size for size in divisors if tensor_parallel_problem(config, size) is None)


def weight_slices(config: ModelConfig, place: RankPlace) -> list[WeightSlice]:
    """All that a rank needs of a checkpoint. Raises ValueError for a size that cannot split the model."""
    layers = stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)
    shares = _Shares.of(config, place)
    wanted = [item for layer in layers for item in _layer_slices(config, place, shares, f"model.layers.{layer}")]
    vocabulary = vocabulary_share(config.vocab_size, place.tensor_rank, place.tensor_parallel_size)
    if place.holds_embedding or (place.holds_head and config.tie_word_embeddings):
        wanted.append(_column("model.embed_tokens.weight", vocabulary, config.hidden_size))
    if place.holds_head:
        wanted.append(_whole("model.norm.weight", config.hidden_size))
        if not config.tie_word_embeddings:
            wanted.append(_column("lm_head.weight", vocabulary, config.hidden_size))
    return wanted


@dataclass(frozen=True, slots=True)
class _Shares:
    query: Share
    key_value: Share
    inner: Share

    @classmethod
    def of(cls, config: ModelConfig, place: RankPlace) -> "_Shares":
        rank, size = place.tensor_rank, place.tensor_parallel_size
        return cls(
            even_share(config.num_heads, rank, size, what="the number of heads").scaled(config.head_dim),
            grouped_share(config.num_kv_heads, rank, size).scaled(config.head_dim),
            even_share(config.intermediate_size, rank, size, what="intermediate_size"),
        )


def _layer_slices(config: ModelConfig, place: RankPlace, shares: _Shares, prefix: str) -> Iterator[WeightSlice]:
    hidden, is_first = config.hidden_size, place.tensor_rank == 0
    yield _whole(f"{prefix}.input_layernorm.weight", hidden)
    projections = (("q", shares.query), ("k", shares.key_value), ("v", shares.key_value))
    for name, share in projections:
        yield _column(f"{prefix}.self_attn.{name}_proj.weight", share, hidden)
    if config.qkv_bias:
        for name, share in projections:
            yield _column(f"{prefix}.self_attn.{name}_proj.bias", share)
    if config.qk_norm:
        yield _whole(f"{prefix}.self_attn.q_norm.weight", config.head_dim)
        yield _whole(f"{prefix}.self_attn.k_norm.weight", config.head_dim)
    yield _row(f"{prefix}.self_attn.o_proj.weight", hidden, shares.query)
    # The sum over the ranks must hold the bias of a row-parallel product once.
    if config.output_bias and is_first:
        yield _whole(f"{prefix}.self_attn.o_proj.bias", hidden)
    yield _whole(f"{prefix}.post_attention_layernorm.weight", hidden)
    for name in ("gate", "up"):
        yield _column(f"{prefix}.mlp.{name}_proj.weight", shares.inner, hidden)
    if config.mlp_bias:
        for name in ("gate", "up"):
            yield _column(f"{prefix}.mlp.{name}_proj.bias", shares.inner)
    yield _row(f"{prefix}.mlp.down_proj.weight", hidden, shares.inner)
    if config.mlp_bias and is_first:
        yield _whole(f"{prefix}.mlp.down_proj.bias", hidden)


def _column(name: str, rows: Share, *rest: int) -> WeightSlice:
    return WeightSlice(name, (rows.size, *rest), 0, rows.start, rows.stop)


def _row(name: str, out_features: int, columns: Share) -> WeightSlice:
    return WeightSlice(name, (out_features, columns.size), 1, columns.start, columns.stop)


def _whole(name: str, size: int) -> WeightSlice:
    return WeightSlice(name, (size,), None, 0, size)
