"""What the runtime needs of a model, whoever defines it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from loader.config import ModelConfig
from loader.shares import RankPlace
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.models.decoder import Attention
from worker_service.models.layers import Tensors
from worker_service.models.lora import RowAdapters
from worker_service.models.scores import Scores


class Model(Protocol):
    """This rank's part of a model; see `worker_service.models.decoder.Decoder`.

    What follows from the config may be known for sure only when the weights are placed.
    """

    config: ModelConfig
    rank_place: RankPlace
    num_kv_heads: int
    windows: list[int | None]
    scores: list[Scores]

    @property
    def layers(self) -> Sequence[object]:
        """As many as this rank has."""
        ...

    def place_weights(self, tensors: Tensors, make: MakeLinear = make_joined_linear, /) -> int:
        """Takes the tensors of this rank's parameters out of `tensors`; answers the bytes that they occupy. `make`
        makes products with quantised weights."""
        ...

    def prepare(self, served_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Makes ready for contexts of up to `served_length` tokens."""
        ...

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """Token ids, or hidden states of the stage before -> [num_tokens, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""
        ...
