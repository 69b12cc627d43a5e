"""One rank's part of a definition of transformers: cut down before it has weights, and connected with the others."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loader.config import ModelConfig
from loader.other_split import OtherSplit
from loader.shares import RankPlace, Share, even_share, stage_layers
from worker_service.models.collectives import Collectives

# What definitions give their layers beside hidden states, and each stage makes for itself.
_MADE_HERE = frozenset({"attention_mask", "causal_mask", "position_ids", "position_embeddings", "cache_position"})


class DefinitionPart:
    """What a rank holds of a definition, and what goes in and out of it.

    `layers` are the numbers of its layers. On a stage after the first the hidden states that it is given take the
    place of what its first layer would get; on one before the last, `leaving` is what the next layer would get.
    """

    def __init__(self, config: ModelConfig, place: RankPlace, group: Collectives | None) -> None:
        """Raises ValueError for a place that cannot be."""
        self._place = place
        self._num_layers, self._num_kv_heads = config.num_layers, config.num_kv_heads
        self._split = OtherSplit(config)
        # Asked for its parameters, it says why it cannot be split.
        self._names = {parameter.name for parameter in self._split.parameters(place)}
        self._group = group
        self._is_alone = False
        self._entering: torch.Tensor | None = None
        self._leaving: torch.Tensor | None = None
        self._row_split: list[nn.Linear] = []
        self.layers = stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the definition."""
        return self._place.num_ranks == 1

    @property
    def shares_embedding(self) -> bool:
        """Whether its head, if it has one, is the embedding."""
        return self.is_whole or (self._place.is_last_stage and self._split.head is None)

    def cut(self, model: PreTrainedModel) -> None:
        """Leaves of a definition without weights what this rank holds. Raises ValueError where it is built otherwise
        than its plan says."""
        if self._place.pipeline_parallel_size > 1:
            self._cut_stage(model)
        if self._place.tensor_parallel_size > 1:
            for layer in (_layers_of(model, self._num_layers)[number] for number in self.layers):
                self._cut_layer(layer)
            self._cut_vocabulary(model)

    def finish(self) -> None:
        """To be called when the weights are there: of a product that is summed over the ranks one adds the bias."""
        if self._place.tensor_rank > 0:
            for linear in self._row_split:
                linear.register_parameter("bias", None)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, it computes without the other ranks, as if they had nothing to add or the same as it: for comparing
        this part with itself."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @contextmanager
    def given(self, hidden: torch.Tensor) -> Iterator[None]:
        """Within, its first layer gets these hidden states, [num_tokens, hidden_size]."""
        self._entering = hidden[None]
        try:
            yield
        finally:
            self._entering = None

    def take_leaving(self) -> torch.Tensor:
        """What the pass that has just ended hands to the next stage, [num_tokens, hidden_size]."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            raise ValueError("its layers are not reached one after the other")
        return leaving[0]

    # Pipeline stages.

    def _cut_stage(self, model: PreTrainedModel) -> None:
        layers, place = _layers_of(model, self._num_layers), self._place
        for number, layer in enumerate(layers):
            if number not in self.layers:
                _replace(layer, self._leave if number == self.layers.stop else _hidden_of)
        first = layers[self.layers.start]
        names = list(inspect.signature(first.forward).parameters)
        first.register_forward_pre_hook(
            lambda _layer, inputs, named: self._enter(names, inputs, named), with_kwargs=True
        )
        embedding, head = _ends_of(model)
        if isinstance(embedding, nn.Embedding) and self._split.embedding not in (None, *self._names):
            width = embedding.embedding_dim
            _replace(embedding, lambda token_ids: self._entered().new_zeros(*token_ids.shape, width))
        if isinstance(head, nn.Module) and not place.is_last_stage:
            _replace(head, _hidden_of)

    def _enter(
        self, names: list[str], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, *others = {**dict(zip(names, inputs, strict=False)), **named}.items()
        for name, value in others:
            if isinstance(value, torch.Tensor) and name not in _MADE_HERE:
                raise ValueError(f"its layers take {name}, which only the first stage could have made")
        if self._place.is_first_stage:
            return inputs, named
        if inputs:
            return (self._entered(), *inputs[1:]), named
        return inputs, {**named, hidden[0]: self._entered()}

    def _entered(self) -> torch.Tensor:
        if self._entering is None:
            raise ValueError("a stage after the first was given no hidden states")
        return self._entering

    def _leave(self, *inputs: Any, **named: Any) -> Any:
        """Stands for the first layer of the next stage."""
        self._leaving = _hidden_of(*inputs, **named)
        return self._leaving

    # Tensor parallelism.

    def _cut_layer(self, layer: nn.Module) -> None:
        split, place = self._split, self._place
        for name, module in list(layer.named_modules()):
            style = split.style(name)
            if style == "moe_tp_experts":
                self._cut_experts(name, module)
            elif isinstance(module, nn.Linear) and style is not None:
                self._cut_linear(name, module, style)
            elif style in ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"):
                raise ValueError(f"its {name} is a {type(module).__name__}, which is not divided")
            if hasattr(module, "num_key_value_groups") and split.style(f"{name}.k_proj") == "colwise":
                # By which transformers' own attention, that ours is compared with, repeats keys.
                module.num_key_value_groups //= max(1, place.tensor_parallel_size // self._num_kv_heads)

    def _cut_experts(self, name: str, module: nn.Module) -> None:
        for parameter, whole in list(module.named_parameters(recurse=False)):
            style, shape = self._split.style(f"{name}.{parameter}"), whole.shape
            rank, size = self._place.tensor_rank, self._place.tensor_parallel_size
            if style is None:
                continue
            # Weights are [experts, outputs, inputs]; two of them lie one after the other where they are packed.
            dim, parts = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}[style]
            share = even_share(shape[dim] // parts, rank, size, what=f"a dimension of {name}.{parameter}")
            _cut_parameter(module, parameter, dim, parts * len(share))
        module.register_forward_hook(lambda _module, _inputs, made: self._sum(made))

    def _cut_linear(self, name: str, module: nn.Linear, style: str) -> None:
        weight, place = f"{name}.weight", self._place
        dim, share = self._split.part_of(weight, tuple(module.weight.shape), place)
        if share is None:
            return
        _cut_parameter(module, "weight", dim, len(share))
        module.out_features, module.in_features = module.weight.shape
        if dim == 0:
            if module.bias is not None:
                _cut_parameter(module, "bias", 0, len(share))
            if style == "colwise_gather_output":
                module.register_forward_hook(lambda _module, _inputs, made: self._gather(made))
            return
        self._row_split.append(module)
        if style == "rowwise_split_input":
            module.register_forward_pre_hook(lambda _module, inputs: (inputs[0][..., share.start : share.stop],))
        module.register_forward_hook(lambda _module, _inputs, made: self._sum(made))

    def _cut_vocabulary(self, model: PreTrainedModel) -> None:
        split, share = self._split, self._split.vocabulary(self._place)
        embedding, head = _ends_of(model)
        assert share is not None
        if isinstance(embedding, nn.Embedding) and split.embedding in self._names:
            _cut_parameter(embedding, "weight", 0, len(share))
            embedding.padding_idx = None
            look_up = embedding.forward
            _set(embedding, "forward", lambda token_ids: self._look_up(look_up, token_ids, share))
        if isinstance(head, nn.Linear) and self._place.is_last_stage and (split.head or split.embedding) in self._names:
            _cut_parameter(head, "weight", 0, len(share))
            if head.bias is not None:
                _cut_parameter(head, "bias", 0, len(share))
            head.register_forward_hook(lambda _module, _inputs, made: self._gather_vocabulary(made, share))

    def _look_up(self, look_up: Callable[..., torch.Tensor], token_ids: torch.Tensor, share: Share) -> torch.Tensor:
        if self._is_alone:
            return look_up(token_ids % len(share))
        local = token_ids - share.start
        elsewhere = (local < 0) | (local >= len(share))
        return self._sum(look_up(local.masked_fill_(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))

    def _gather_vocabulary(self, made: torch.Tensor, share: Share) -> torch.Tensor:
        # All ranks' parts must be equally wide to be gathered.
        missing = -(-share.size // self._place.tensor_parallel_size) - len(share)
        return self._gather(nn.functional.pad(made, (0, missing)))[..., : share.size]

    def _sum(self, made: torch.Tensor) -> torch.Tensor:
        return made if self._is_alone or self._group is None else self._group.all_reduce(made)

    def _gather(self, made: torch.Tensor) -> torch.Tensor:
        rows = made.reshape(-1, made.shape[-1])
        if self._is_alone or self._group is None:
            rows = rows.repeat(1, self._place.tensor_parallel_size)
        else:
            rows = self._group.all_gather(rows)
        return rows.view(*made.shape[:-1], -1)


def _ends_of(model: PreTrainedModel) -> tuple[object, object]:
    """Its embedding and its head."""
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _layers_of(model: PreTrainedModel, count: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"it has no list of {count} layers")


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Takes all weights out of a module, which is still asked for its other attributes, and what it does."""
    for held in (module._modules, module._parameters, module._buffers):
        held.update(dict.fromkeys(held))
    # By which transformers knows that there is nothing to draw.
    _set(module, "_is_hf_initialized", True)
    _set(module, "forward", forward)


def _set(module: nn.Module, name: str, value: object) -> None:
    """An attribute of one module, in place of its class's."""
    module.__dict__[name] = value


def _hidden_of(*inputs: Any, **named: Any) -> Any:
    """What a layer is called with, as its result: whoever computes it, it is not this stage."""
    return inputs[0] if inputs else next(iter(named.values()))


def _cut_parameter(module: nn.Module, name: str, dim: int, length: int) -> None:
    whole = module._parameters[name]
    assert whole is not None
    shape = list(whole.shape)
    shape[dim] = length
    module._parameters[name] = nn.Parameter(whole.new_empty(shape), requires_grad=False)
