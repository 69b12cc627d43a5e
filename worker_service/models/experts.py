"""MLPs with a gate, and mixtures of them, cut for one rank of a tensor-parallel group."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from loader.config import ExpertsConfig
from loader.layout import Linear, Parameter
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.models.collectives import Collectives
from worker_service.models.layers import ColumnParallelLinear, RowParallelLinear, Tensors
from worker_service.models.lora import RowAdapters

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
"""The activations of gated MLPs, by the names that configs use."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)), its inner features split over the ranks."""

    def __init__(
        self, held: Mapping[str, Parameter], prefix: str, activation: Activation, group: Collectives | None
    ) -> None:
        gate, up, down = (linear_of(held, f"{prefix}.{name}_proj") for name in ("gate", "up", "down"))
        self._inner = len(gate.outputs)
        self._activation = activation
        self._gate_up = ColumnParallelLinear([gate, up])
        self._down = RowParallelLinear(down, group)

    def place(self, tensors: Tensors, make: MakeLinear = make_joined_linear) -> None:
        """Takes its tensors out of `tensors`; `make` makes the products."""
        self._gate_up.place(tensors, make)
        self._down.place(tensors, make)

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, hidden_size], whole on every rank."""
        gate_up = self._gate_up(x, adapters)
        return self._down(self._activation(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :]), adapters)


class MixtureOfExperts:
    """A router that sends each token through a few of many gated MLPs, which are spread over the ranks.

    Tokens are sorted by expert, so that each expert with any is computed once a step. Which those are is asked of the
    device, which makes a step wait for the router of each such layer.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        held: Mapping[str, Parameter],
        prefix: str,
        activation: Activation,
        group: Collectives | None,
    ) -> None:
        self._config = config
        self._group = group
        self._router = ColumnParallelLinear([linear_of(held, f"{prefix}.gate")])
        self._experts = {
            number: GatedMlp(held, f"{prefix}.experts.{number}", activation, None)
            for number in range(config.num_experts)
            if f"{prefix}.experts.{number}.down_proj" in held
        }

    def place(self, tensors: Tensors, make: MakeLinear = make_joined_linear) -> None:
        """Takes its tensors out of `tensors`; `make` makes the products."""
        self._router.place(tensors, make)
        for expert in self._experts.values():
            expert.place(tensors, make)

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size], whole on every rank."""
        num_chosen = self._config.num_chosen
        weights, chosen = self._router(x, adapters).softmax(-1, dtype=torch.float32).topk(num_chosen, -1)
        if self._config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        tokens, weights = order // num_chosen, weights.view(-1)[order]
        counts = torch.bincount(chosen.view(-1), minlength=self._config.num_experts).tolist()
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for number, count in enumerate(counts):
            if count and number in self._experts:
                rows = slice(start, start + count)
                chosen_tokens = tokens[rows]
                own = None if adapters is None else adapters.select(chosen_tokens)
                made = self._experts[number](x[chosen_tokens], own)
                total.index_add_(0, tokens[rows], made * weights[rows, None])
            start += count
        summed = total if self._group is None else self._group.all_reduce(total)
        return summed.to(x.dtype)


def linear_of(held: Mapping[str, Parameter], name: str) -> Linear:
    """The product of that name among a rank's parameters."""
    parameter = held[name]
    assert isinstance(parameter, Linear), name
    return parameter
