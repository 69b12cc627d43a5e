"""Which of the tokens sampled at draft tokens count: those up to the first that is not what was drafted."""

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.batch import StepBatch
from worker_service.runtime.penalties import Drafted
from worker_service.runtime.sampler import Sampled
from worker_service.runtime.sequences import SequenceTable

IntArray = NDArray[np.int64]


def drafted_before(batch: StepBatch, table: SequenceTable) -> Drafted | None:
    """The draft tokens that count as output where a batch is sampled; None when nobody drafts."""
    if batch.offsets is None:
        return None
    offsets = batch.offsets
    places = np.repeat(np.arange(len(offsets)), offsets)
    within = np.arange(len(places)) - np.repeat(np.cumsum(offsets) - offsets, offsets)
    rows = batch.rows[batch.sampled[places]]
    return Drafted(places, table.token_ids[rows, table.num_tokens[rows] + within].astype(np.int64))


def last_places(batch: StepBatch, offsets: IntArray, sampled: Sampled, table: SequenceTable) -> IntArray:
    """Of each sequence the last place whose token counts: the first where sampling does not go on as drafted.

    That is where another token was sampled than was drafted next, a stop token was, nothing could be, or no draft is
    left.
    """
    rows = batch.rows[batch.sampled]
    next_draft = table.token_ids[rows, table.num_tokens[rows] + offsets]
    ends = (sampled.token_ids != next_draft) | sampled.failed | table.sampling.is_stop(rows, sampled.token_ids)
    ends[final_places(offsets)] = True
    firsts = np.flatnonzero(offsets == 0)
    places = np.flatnonzero(ends)
    last: IntArray = places[np.searchsorted(places, firsts)]
    return last


def final_places(offsets: IntArray) -> IntArray:
    """Of each sequence the last place: that of its last draft."""
    return np.flatnonzero(np.append(offsets == 0, True)[1:])
