"""What grammars allow, as part of the scores of a step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.runtime.mask_threads import FEW
from worker_service.runtime.masks import Masks

IntArray = NDArray[np.int64]
Words = NDArray[np.uint32]


def narrow(masks: Masks, logits: torch.Tensor, places: Sequence[int]) -> tuple[torch.Tensor, IntArray]:
    """Of places that allow few tokens the scores of these alone, [places, FEW], -inf behind them; and their ids."""
    token_ids = np.zeros((len(places), FEW), np.int64)
    counts = np.zeros(len(places), np.int64)
    for i, place in enumerate(places):
        ids = masks.few[place]
        token_ids[i, : len(ids)], counts[i] = ids, len(ids)
    device = logits.device
    rows = torch.tensor(places, device=device)[:, None]
    scores = logits[rows, torch.from_numpy(token_ids).to(device)].float()
    return scores.masked_fill_(torch.from_numpy(np.arange(FEW) >= counts[:, None]).to(device), -torch.inf), token_ids


def forbid(masks: Masks, scores: torch.Tensor, which: IntArray) -> None:
    """Makes what is not allowed -inf in scores [*, at least vocab_size] of the rows `which`, in place.

    `which` rises; places that are not among them are left out.
    """
    present = np.isin(masks.places, which)
    if not present.any():
        return
    forbidden = _forbidden(masks.words[present], scores.device)
    targets = np.searchsorted(which, masks.places[present]).tolist()
    for target, row in zip(targets, forbidden, strict=True):
        scores[target, : masks.vocab_size].masked_fill_(row[: masks.vocab_size], -torch.inf)


def _forbidden(words: Words, device: torch.device) -> torch.Tensor:
    """[places, bits], on a device; bits travel, and become booleans there."""
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    return unset_on_cpu(octets) if device.type == "cpu" else unset_bits(torch.from_numpy(octets).to(device))


def unset_bits(octets: torch.Tensor) -> torch.Tensor:
    """Which bits of octets [rows, n] are not set, [rows, 8 n], the lowest of each first."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=octets.device)
    return ((octets[:, :, None] & weights) == 0).flatten(1)


def unset_on_cpu(octets: NDArray[np.uint8]) -> torch.Tensor:
    """What `unset_bits` answers, several times as fast as torch does it on a CPU."""
    return torch.from_numpy(np.unpackbits(~octets, axis=1, bitorder="little").view(np.bool_))
