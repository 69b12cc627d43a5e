"""Which places of a batch count."""

import numpy as np
import pytest

from worker_service.runtime.batch import StepBatch
from worker_service.runtime.sampler import Sampled
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import NewSequence, Sampling
from worker_service.runtime.verification import drafted_before, final_places, last_places

NONE = np.zeros(0, np.int64)


def drafting(drafts: list[list[int]], stops: tuple[int, ...] = ()) -> tuple[StepBatch, SequenceTable]:
    """A batch of sequences of three tokens with these drafts."""
    table = SequenceTable(vocab_size=50, max_model_len=32, num_blocks=8, block_size=4)
    for number, tokens in enumerate(drafts):
        new = NewSequence(number, "r", [1, 2, 3], 3, Sampling(stop_token_ids=stops), [], token_limit=20)
        row = table.add(new, 2, failed=False)
        table.token_ids[row, 3 : 3 + len(tokens)] = tokens
    rows = np.array([table.row_of[i] for i in range(len(drafts))], np.int64)
    sampled = np.repeat(np.arange(len(drafts)), [1 + len(tokens) for tokens in drafts])
    offsets = np.array([i for tokens in drafts for i in range(1 + len(tokens))], np.int64)
    batch = StepBatch(NONE, NONE, rows, rows, NONE, NONE, NONE, sampled, sampled, NONE, offsets=offsets)
    return batch, table


def last(batch: StepBatch, table: SequenceTable, tokens: list[int], failed: tuple[int, ...] = ()) -> list[int]:
    sampled = Sampled(np.array(tokens, np.int64), np.isin(np.arange(len(tokens)), failed))
    assert batch.offsets is not None
    return last_places(batch, batch.offsets, sampled, table).tolist()


@pytest.mark.parametrize(
    ("tokens", "failed", "expected"),
    [
        ([7, 8, 9, 30, 5], (), [3, 4]),
        ([7, 8, 6, 30, 5], (), [2, 4]),
        ([6, 8, 9, 30, 5], (), [0, 4]),
        ([7, 11, 9, 30, 5], (), [1, 4]),
        ([7, 8, 9, 30, 5], (1,), [1, 4]),
        ([7, 8, 9, 30, 5], (0, 4), [0, 4]),
        # What fails behind the last that counts fails nobody.
        ([6, 8, 9, 30, 5], (1, 2), [0, 4]),
    ],
)
def test_a_run_ends_where_another_token_is_sampled_or_none(
    tokens: list[int], failed: tuple[int, ...], expected: list[int]
) -> None:
    batch, table = drafting([[7, 8, 9], []])
    assert last(batch, table, tokens, failed) == expected


def test_a_run_ends_with_a_stop_token_that_was_drafted() -> None:
    batch, table = drafting([[7, 8, 9], [8, 8]], stops=(8,))
    assert last(batch, table, [7, 8, 9, 30, 8, 8, 1]) == [1, 4]


def test_a_batch_whose_sequences_are_all_gone_has_no_places() -> None:
    batch, table = drafting([[7, 8], [9]])
    gone = batch.sampled_at(np.zeros(5, np.bool_))
    assert gone.offsets is not None
    assert last(gone, table, []) == final_places(gone.offsets).tolist() == []
    drafted = drafted_before(gone, table)
    assert drafted is not None and not len(drafted.places)


def test_the_drafts_before_each_place_are_told() -> None:
    batch, table = drafting([[7, 8], [], [9]])
    drafted = drafted_before(batch, table)
    assert drafted is not None
    assert drafted.places.tolist() == [1, 2, 2, 5]
    assert drafted.token_ids.tolist() == [7, 7, 8, 9]
    among = drafted.among(np.array([5, 2]), 6)
    assert (among.places.tolist(), among.token_ids.tolist()) == ([1, 1, 0], [7, 8, 9])
