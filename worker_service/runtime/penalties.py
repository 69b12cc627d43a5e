"""Which tokens a sequence has seen, kept on the device, for those that are penalised for it."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.runtime.sequences import SamplingColumns

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens that count as output so far where something is sampled behind them: `token_ids` [n], each at one
    of `places` [n]."""

    places: IntArray
    token_ids: IntArray

    def among(self, chosen: IntArray, num_places: int) -> "Drafted":
        """Those at some of `num_places` places, which are numbered anew."""
        number = np.full(num_places, -1)
        number[chosen] = np.arange(len(chosen))
        places = number[self.places]
        return Drafted(places[places >= 0], self.token_ids[places >= 0])


class Penalties:
    """Repetition, presence and frequency penalties. Only sequences that have one take up memory here."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._num_outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def add(self, row: int, prompt: IntArray, output: IntArray) -> None:
        """Takes in the sequence at a row of the table, with its tokens so far."""
        if not self._free:
            self._grow()
        slot = self._slot_of[row] = self._free.pop()
        output_ids = torch.from_numpy(output).to(self._device)
        self._num_outputs[slot] = torch.bincount(output_ids, minlength=self._vocab_size)
        self._seen[slot] = False
        self._seen[slot, torch.from_numpy(prompt).to(self._device)] = True
        self._seen[slot, output_ids] = True

    def remove(self, row: int) -> None:
        """Forgets the sequence at a row; nothing happens when it has no penalty."""
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """Counts one more output token of each of these rows, all of which must have been added."""
        slots, tokens = self._slots(rows), torch.from_numpy(token_ids).to(self._device)
        self._num_outputs.index_put_((slots, tokens), self._num_outputs.new_ones(()), accumulate=True)
        self._seen[slots, tokens] = True

    def apply(
        self,
        scores: torch.Tensor,
        which: IntArray,
        rows: IntArray,
        sampling: SamplingColumns,
        drafted: Drafted | None = None,
    ) -> None:
        """Penalises scores[which] in place: float32 [*, at least vocab_size], of the sequences at `rows`.

        `drafted`, whose places are those of `rows`, counts as output too.
        """
        slots, targets = self._slots(rows), torch.from_numpy(which).to(scores.device)
        penalised = scores[targets, : self._vocab_size]
        repetition = self._column(sampling.repetition_penalty[rows])
        repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
        seen, counts = self._seen[slots], self._num_outputs[slots]
        if drafted is not None:
            index = (
                torch.from_numpy(drafted.places).to(seen.device),
                torch.from_numpy(drafted.token_ids).to(seen.device),
            )
            counts.index_put_(index, counts.new_ones(()), accumulate=True)
            seen[index] = True
        penalised = torch.where(seen, repeated, penalised)
        penalised.sub_(counts * self._column(sampling.frequency_penalty[rows]))
        penalised.sub_((counts > 0) * self._column(sampling.presence_penalty[rows]))
        scores[targets, : self._vocab_size] = penalised

    def _slots(self, rows: IntArray) -> torch.Tensor:
        return torch.tensor([self._slot_of[int(row)] for row in rows], device=self._device)

    def _column(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)[:, None]

    def _grow(self) -> None:
        have = len(self._seen)
        more = max(4, have)
        self._num_outputs = torch.cat((self._num_outputs, self._num_outputs.new_zeros(more, self._vocab_size)))
        self._seen = torch.cat((self._seen, self._seen.new_zeros(more, self._vocab_size)))
        self._free.extend(range(have + more - 1, have - 1, -1))
