"""Paged attention by torch's own flash attention, of torch 2.12 and later, on a CUDA device."""

import importlib
from importlib.util import find_spec

import torch

from worker_service.kernels.paged.problem import PagedBatch, Pages, Rule

_PAGE_MULTIPLE = 256


class FlashKernel:
    """See PagedKernel. For float16 and bfloat16 without softcap.

    Flash attention 2, which torch brings, takes pages of multiples of 256 positions; 3, which torch takes from the
    package flash_attn_interface, any.
    """

    name = "flash"

    def __init__(self, block_size: int, device: torch.device) -> None:
        """Raises ValueError where this torch's flash attention does not take such pages."""
        arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
        if not any(argument.name == "block_table" for argument in arguments):
            raise ValueError(f"the flash attention of torch {torch.__version__} takes no block tables")
        if not _takes_any_page(device) and block_size % _PAGE_MULTIPLE:
            raise ValueError(f"block_size {block_size} is no multiple of {_PAGE_MULTIPLE}")
        # It brings torch's compiler with it, which takes seconds to import.
        self._varlen = importlib.import_module("torch.nn.attention.varlen")

    def attend(self, query: torch.Tensor, pages: Pages, batch: PagedBatch, rule: Rule) -> torch.Tensor:
        """See PagedKernel. Raises ValueError for what it does not compute."""
        if rule.scores.softcap is not None or pages.key_scales is not None:
            raise ValueError("flash attention has neither softcaps nor scales of keys and values")
        # With more splits than one, version 2 answers wrongly for all sequences but the first.
        attended: torch.Tensor = self._varlen.varlen_attn(
            query,
            pages.keys.transpose(1, 2),
            pages.values.transpose(1, 2),
            batch.query_start,
            None,
            batch.most_new,
            batch.longest,
            scale=rule.scores.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            enable_gqa=True,
            seqused_k=batch.lengths,
            block_table=batch.tables,
            num_splits=1,
        )
        return attended

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
        """See PagedKernel."""
        block_size = pages.keys.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        pages.keys[blocks, :, offsets] = key
        pages.values[blocks, :, offsets] = value


def _takes_any_page(device: torch.device) -> bool:
    """Whether torch's flash attention is version 3 from now on, which is for Hopper GPUs alone."""
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    attention = importlib.import_module("torch.nn.attention")
    if attention.current_flash_attention_impl() != "FA3":
        attention.activate_flash_attention_impl("FA3")
    return True
