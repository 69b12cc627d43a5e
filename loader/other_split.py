"""How a model that transformers defines is divided: which part of each stored tensor a rank holds. Imports no torch.

Tensor-parallel ranks divide layers by transformers' own plan, and embedding and head by token ids. Pipeline stages
divide the list of layers; what belongs to no layer, and is neither embedding nor head, every stage holds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from loader.config import ModelConfig
from loader.other_plans import BY_COLUMNS, BY_ROWS, PLANS, Plan
from loader.shares import RankPlace, Share, even_share, grouped_share, stage_layers, vocabulary_share
from loader.tensors import WeightSlice

# A tensor's place in a list of modules, and its name from there.
_NUMBERED = re.compile(r"(.+?)\.(\d{1,5})\.(.+)")
_EXPERT = re.compile(r"\bexperts\.\d{1,5}\.(\w+)$")
# What experts are stored as, and the parameters of all of them together that transformers makes of it.
_JOINED_EXPERTS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
_HEADS = ("lm_head", "embed_out")
# The products that make keys, alone or with others.
_KEYS = (".k_proj", ".query_key_value")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model whose layers we do not know, of which a rank takes `share` along `dim`, or all of it."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    share: Share | None = None

    @property
    def size(self) -> int:
        """How many values the whole tensor has."""
        return prod(self.shape)

    def slices(self) -> Iterator[WeightSlice]:
        """What is wanted of the checkpoint."""
        if self.share is None or self.share.is_whole:
            yield WeightSlice(self.name, self.shape)
        else:
            yield WeightSlice(self.name, self.shape, self.dim, self.share.start, self.share.stop)


class OtherSplit:
    """What is known, from config and names of tensors alone, of how such a model divides.

    `layers` is the name of the list of layers, None where there is not one of the right length. `embedding` and `head`
    are the names of tensors, None where none is stored that can be told: a head that is not stored is the embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.other is not None
        self._config = config
        self._shapes = config.other.tensors
        self._plan: Plan | None = PLANS.get(str(config.other.content.get("model_type")))
        self.layers = self._find_layers()
        self.embedding = self._find(_EMBEDDINGS)
        self.head = self._find(_HEADS)

    def parameters(self, place: RankPlace) -> Iterator[Stored]:
        """What the rank at `place` holds. Raises ValueError for a size that cannot split the model."""
        reason = self.tensor_parallel_problem(place.tensor_parallel_size)
        reason = reason or self.pipeline_parallel_problem(place.pipeline_parallel_size)
        if reason is not None:
            raise ValueError(reason)
        own = stage_layers(self._config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)
        for name, shape in self._shapes.items():
            layer, rest = self._in_layer(name)
            if layer is None:
                if self._is_on(place, name):
                    share = None
                    if name == self.embedding or self._is_of_head(name):
                        share = self.vocabulary(place)
                    yield Stored(name, shape, 0, share)
            elif layer in own:
                yield Stored(name, shape, *self.part_of(rest, shape, place))

    def tensor_parallel_problem(self, size: int) -> str | None:
        """Why it cannot be split over `size` tensor-parallel ranks; None when it can."""
        if size == 1:
            return None
        config = self._config
        if self._plan is None:
            return f"{self._own_definition}, and there is no plan that splits its layers"
        if self.layers is None:
            return self._no_list
        parts = {(_module_of(rest), shape): rest for rest, shape in self._layer_tensors()}
        try:
            even_share(config.num_heads, 0, size, what="the number of heads")
            vocabulary_share(config.vocab_size, 0, size)
            for (_, shape), rest in parts.items():
                self.part_of(rest, shape, RankPlace(0, size))
        except ValueError as error:
            return str(error)
        return None

    def pipeline_parallel_problem(self, num_stages: int) -> str | None:
        """Why it cannot be split over `num_stages` pipeline stages; None when it can."""
        if num_stages <= self.max_pipeline_parallel_size:
            return None
        return self._no_list if self.layers is None else f"the model has {self._config.num_layers} layers"

    @property
    def max_pipeline_parallel_size(self) -> int:
        """The most pipeline stages that it can be split over."""
        return 1 if self.layers is None else self._config.num_layers

    def style(self, module: str) -> str | None:
        """How a module of a layer, by its name there, is divided over tensor-parallel ranks; None for not at all."""
        return None if self._plan is None else self._plan.get(module)

    def part_of(self, name: str, shape: tuple[int, ...], place: RankPlace) -> tuple[int, Share | None]:
        """Along which dimension a tensor of a layer, by its name there, is divided, and the rank's share; None for
        all of it.

        Raises ValueError where the plan cannot be followed.
        """
        rank, size = place.tensor_rank, place.tensor_parallel_size
        module, style = _module_of(name), self.style(_module_of(name))
        if size == 1 or style is None:
            return 0, None
        what = f"a dimension of {module}"
        if style in BY_COLUMNS and not name.endswith(".bias"):
            dim = len(shape) - 1
            return dim, even_share(shape[dim], rank, size, what=what)
        if style not in BY_ROWS:
            return 0, None
        heads = self._config.num_kv_heads
        if style == "colwise" and module.endswith((".k_proj", ".v_proj")) and shape[0] % heads == 0:
            return 0, grouped_share(heads, rank, size).scaled(shape[0] // heads)
        return 0, even_share(shape[0], rank, size, what=what)

    def vocabulary(self, place: RankPlace) -> Share | None:
        """The rank's token ids; None for all of them."""
        size = place.tensor_parallel_size
        return None if size == 1 else vocabulary_share(self._config.vocab_size, place.tensor_rank, size)

    def num_kv_heads(self, place: RankPlace) -> int:
        """How many key-value heads the rank at `place` keeps: where their products are gathered, all of them."""
        size, heads = place.tensor_parallel_size, self._config.num_kv_heads
        keys = (style for module, style in (self._plan or {}).items() if module.endswith(_KEYS))
        return len(grouped_share(heads, place.tensor_rank, size)) if "colwise" in keys else heads

    @property
    def _own_definition(self) -> str:
        return f"{self._config.architecture} runs through transformers' own definition"

    @property
    def _no_list(self) -> str:
        return f"{self._own_definition}, and its tensors are not those of one list of {self._config.num_layers} layers"

    def _is_on(self, place: RankPlace, name: str) -> bool:
        """Whether a stage needs a tensor that belongs to no layer."""
        if self._is_of_head(name):
            return place.is_last_stage
        return name != self.embedding or place.is_first_stage or (place.is_last_stage and self.head is None)

    def _is_of_head(self, name: str) -> bool:
        """Whether it is the head's weight or bias."""
        return self.head is not None and name.rpartition(".")[0] == self.head.rpartition(".")[0]

    def _layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self._shapes.items():
            layer, rest = self._in_layer(name)
            if layer is not None:
                yield rest, shape

    def _in_layer(self, name: str) -> tuple[int | None, str]:
        found = _NUMBERED.fullmatch(name)
        if found is None or found[1] != self.layers:
            return None, name
        return int(found[2]), found[3]

    def _find_layers(self) -> str | None:
        lists: dict[str, set[int]] = {}
        for name in self._shapes:
            found = _NUMBERED.fullmatch(name)
            if found is not None:
                lists.setdefault(found[1], set()).add(int(found[2]))
        names = [name for name, numbers in lists.items() if numbers == set(range(self._config.num_layers))]
        return names[0] if len(names) == 1 else None

    def _find(self, modules: tuple[str, ...]) -> str | None:
        """The tensor of one of these modules that has a row for each token id."""
        for name, shape in self._shapes.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            if module in modules and len(shape) == 2 and shape[0] == self._config.vocab_size:
                return name
        return None


def _module_of(name: str) -> str:
    """The module of a layer that a tensor belongs to; of experts that are stored apart, what they are joined to."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    expert = _EXPERT.search(module)
    if expert is None:
        return module
    leaf = expert[1]
    joined = "down_proj" if leaf == "w2" else _JOINED_EXPERTS.get(leaf, leaf)
    # Whatever the experts' module is called where it is stored.
    return f"mlp.experts.{joined}"
