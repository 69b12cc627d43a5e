"""What the last stage samples, on every rank of the group, so that the next step finds it there."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.batch import StepBatch
from worker_service.runtime.group import RankGroup
from worker_service.runtime.sampler import Sampled
from worker_service.runtime.step import StepInput

IntArray = NDArray[np.int64]

# In the place of a token, for a row whose logits were not finite.
_FAILED = -1


@dataclass(slots=True)
class _Awaited:
    """A batch whose tokens are on their way, and those of its sequences that were dropped meanwhile."""

    step_id: int
    batch: StepBatch
    sequence_ids: frozenset[int]
    dropped: set[int] = field(default_factory=set)


class SharedTokens:
    """Brings sampled tokens to all ranks of a group. Used by the device thread alone.

    The ranks of the last stage all sample, from the same logits; that they go on with the same tokens is made sure of
    by taking those of tensor rank 0. A rank of an earlier stage goes on with other sequences until it needs the tokens.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._awaited: deque[_Awaited] = deque()
        # Of the batch that is being sampled: its rows that are, and the token of each.
        self._places = self._tokens = np.zeros(0, np.int64)

    @property
    def samples(self) -> bool:
        """Whether this rank samples; the others await tokens."""
        return self._group.place.is_last_stage

    def begin(self, batch: StepBatch) -> None:
        """Of the last stage: a batch is to be sampled. Those of its sequences that never are count as failed."""
        self._places = batch.sampled_tokens
        self._tokens = np.full(len(batch.sampled), _FAILED, np.int64)

    def share(self, batch: StepBatch, sampled: Sampled) -> Sampled:
        """Of the last stage: what was sampled of `batch`, as tensor rank 0 has it."""
        tokens = np.where(sampled.failed, _FAILED, sampled.token_ids)
        if self._group.place.tensor_parallel_size > 1:
            tokens = self._group.agree(tokens)
        self._tokens[np.searchsorted(self._places, batch.sampled_tokens)] = tokens
        return _sampled(tokens, sampled)

    def publish(self) -> None:
        """Of the last stage: sends the tokens of the batch to the stages before."""
        if self._group.place.pipeline_parallel_size > 1 and len(self._tokens):
            self._group.send_tokens(self._tokens)

    def expect(self, step_id: int, batch: StepBatch) -> None:
        """Of an earlier stage: the tokens of this step are to come."""
        if len(batch.sampled):
            self._group.expect_tokens(len(batch.sampled))
            self._awaited.append(_Awaited(step_id, batch, frozenset(batch.sequence_ids[batch.sampled].tolist())))

    def needed_for(self, step: StepInput) -> Iterator[tuple[int, StepBatch, Sampled]]:
        """Of an earlier stage: what must be recorded before a step, oldest first, with its step id; waits for it."""
        if not self._awaited:
            return
        gone = {*step.finished_sequence_ids, *step.preempted_sequence_ids}
        going_on = set(step.sequence_ids) - gone
        for awaited in self._awaited:
            awaited.dropped |= awaited.sequence_ids & gone
        last = max(
            (i for i, each in enumerate(self._awaited, 1) if not going_on.isdisjoint(each.sequence_ids)), default=0
        )
        for _ in range(last):
            awaited = self._awaited.popleft()
            tokens = self._group.take_tokens()
            batch, ids = awaited.batch, awaited.batch.sequence_ids[awaited.batch.sampled]
            kept = np.fromiter((i not in awaited.dropped for i in ids.tolist()), np.bool_, len(ids))
            yield awaited.step_id, batch.sampled_at(kept), _sampled(tokens[kept])

    def drop(self) -> None:
        """Takes and forgets what is awaited, unless the group is left."""
        while self._awaited:
            self._awaited.popleft()
            if self._group.is_formed:
                self._group.take_tokens()


def _sampled(tokens: IntArray, sampled: Sampled | None = None) -> Sampled:
    if sampled is None:
        return Sampled(tokens, tokens == _FAILED)
    return Sampled(tokens, tokens == _FAILED, sampled.logprobs, sampled.reasons)
