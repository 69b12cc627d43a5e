"""Of several sequences the best: all output is held back until it is known which those are.

A sequence's score is the sum of its tokens' log-probabilities under the raw logits: the cumulative
log-probability by which vLLM's `best_of` chose (`CompletionOutput.cumulative_logprob`, not divided by the
length). It can only fall, so a sequence whose score has fallen below that of enough ended ones is beaten.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from scheduler_service.engine.output import LOGPROBS_COST, MAX_BACKLOG, MAX_MERGED_TOKENS, merge_output
from scheduler_service.engine.values import Output
from stepwire.rpc.errors import StepwireError


class _TokenLogprob(Protocol):
    @property
    def logprob(self) -> float: ...


class _PositionLogprobs(Protocol):
    """Of a position's log-probabilities, what is looked at here."""

    @property
    def sampled(self) -> _TokenLogprob: ...


@dataclass(frozen=True, slots=True)
class BestOfRule:
    """How many sequences are delivered, and whether with log-probabilities."""

    num_best: int
    has_logprobs: bool

    def check_size(self, num_sequences: int, max_tokens: int) -> None:
        """Raises FIELD_OUT_OF_RANGE for more output than may be held back for one request.

        As much as one client may leave untaken: so what is delivered at the end always fits its stream.
        """
        limit = MAX_BACKLOG // (1 + LOGPROBS_COST if self.has_logprobs else 1)
        num_tokens = num_sequences * max_tokens
        if num_tokens > limit:
            raise StepwireError(
                "FIELD_OUT_OF_RANGE",
                f"best_of {num_sequences} would hold back up to {max_tokens} tokens of each sequence; at most {limit} "
                f"together are held back{' with logprobs' if self.has_logprobs else ''}: lower best_of, or max_tokens "
                f"to at most {limit // num_sequences}",
                {"field": "best_of", "value": str(num_tokens), "allowed": f"at most {limit} tokens"},
            )


class BestOf:
    """What the sequences of one request have brought so far. Used on the event loop alone."""

    def __init__(self, rule: BestOfRule) -> None:
        self._rule = rule
        self._held: dict[int, list[Output]] = {}
        self._scores: dict[int, float] = {}
        self._ended: list[float] = []
        self._beaten: set[int] = set()
        self.num_best_tokens = 0

    def take(self, output: Output) -> bool:
        """Keeps a message of one token; True when its sequence is beaten by it, and is to be ended.

        Messages of a beaten sequence that come later are dropped.
        """
        index = output.sequence_index
        if index in self._beaten:
            return False
        position = cast(_PositionLogprobs, output.logprobs[0])
        # Rounding must not make a sequence rise.
        score = self._scores.get(index, 0.0) + min(0.0, position.sampled.logprob)
        self._scores[index] = score
        if output.finish_reason is not None:
            self._note_end(score)
        elif self._is_below_best(score):
            self._beaten.add(index)
            self._held.pop(index, None)
            return True
        if not self._rule.has_logprobs:
            output.logprobs.clear()
        self._hold(output)
        return False

    def best(self) -> list[Output]:
        """The messages of the best sequences, the best first, by their place among them. All must have ended."""
        kept = sorted(self._held, key=lambda index: (-self._scores[index], index))[: self._rule.num_best]
        outputs = []
        for place, index in enumerate(kept):
            for output in self._held[index]:
                output.sequence_index = place
                self.num_best_tokens += len(output.token_ids)
                outputs.append(output)
        self._held.clear()
        return outputs

    def _hold(self, output: Output) -> None:
        held = self._held.setdefault(output.sequence_index, [])
        if held and len(held[-1].token_ids) < MAX_MERGED_TOKENS:
            merge_output(held[-1], output)
        else:
            held.append(output)

    def _note_end(self, score: float) -> None:
        self._ended.append(score)
        self._ended.sort(reverse=True)
        del self._ended[self._rule.num_best :]

    def _is_below_best(self, score: float) -> bool:
        return len(self._ended) == self._rule.num_best and score < self._ended[-1]
