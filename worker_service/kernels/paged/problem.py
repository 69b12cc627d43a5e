"""Attention over pages of a KV cache, as kernels take it: what lies where, who asks, and by which rule."""

from dataclasses import dataclass
from typing import Protocol

import torch

from worker_service.models.scores import Scores


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's keys and values, each [num_blocks, kv_heads, block_size, head_dim], their last dimension dense.

    Codes of eight bits have scales, float32 [num_blocks, kv_heads, block_size], that multiply them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """New tokens of sequences, one after the other, whose keys and values are in the pages already. All int32.

    Tokens query_start[i] to query_start[i + 1] are the last positions of `lengths[i]`; `tables` [sequences, width]
    say in which blocks those lie. `most_new` is the most new tokens of one sequence. `longest` bounds the lengths, and
    is best the same at every call: it decides how decodes are split.
    """

    query_start: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    most_new: int
    longest: int


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are made, and how many positions, its own among them, a token sees; None for all before it."""

    scores: Scores
    window: int | None = None


class PagedKernel(Protocol):
    """Attends to pages, and stores into them."""

    name: str

    def attend(self, query: torch.Tensor, pages: Pages, batch: PagedBatch, rule: Rule) -> torch.Tensor:
        """query [num_tokens, heads, head_dim] -> [num_tokens, heads, head_dim]. No value of the device is asked for, so
        that a CUDA graph can hold it."""
        ...

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
        """Stores key and value [num_tokens, kv_heads, head_dim] at slots, int64 [num_tokens]: block id x block_size +
        offset."""
        ...
