"""Draft tokens without a draft model: what followed the last tokens when they came before, in prompt or output.

Drafts are a function of a sequence's token ids and of how its earlier drafts fared. They decide how many tokens a
step brings and nothing else: a draft is kept only while it is the token that is sampled anyway.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.sequences import SequenceTable

IntArray = NDArray[np.int64]

LEAST_MATCH = 2
_LONGEST_MATCH = 8
# In tokens: what a sequence may lose by drafts before it rests, and after a rest.
_FIRST_CREDIT, _LATER_CREDIT = 2.0, 0.5
_SHORTEST_REST, _LONGEST_REST = 8, 128
# As many drafts are tried always as together cost this part of a step.
_ALWAYS_TRIED = 0.125


def look_up(tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """`most` tokens that may follow `tokens` [n]; none where their last ones did not come before.

    They are those that followed the longest match of the last LEAST_MATCH tokens or more, the latest one of several.
    A match that runs into the end is a loop, and is taken round.
    """
    end = len(tokens)
    starts = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for length in range(2, _LONGEST_MATCH + 1):
        longer = starts[starts >= length]
        longer = longer[tokens[longer - length] == tokens[end - length]]
        if not len(longer):
            if length <= LEAST_MATCH:
                return tokens[:0]
            break
        starts = longer
    return np.resize(tokens[starts[-1] :], most)


@dataclass(slots=True)
class _Pace:
    """How one sequence drafts. `cost` is that of a draft, in tokens, and `least` how many are tried in any case.

    `width` is how many are tried next: more after drafts that were all right, fewer after others. `credit` is what
    drafts may still cost more than they bring; when it is spent, the sequence waits `rest` steps, and longer each time.
    """

    cost: float
    least: int
    width: int = 2
    credit: float = _FIRST_CREDIT
    rest: int = _SHORTEST_REST
    waits: int = 0

    def begin_step(self) -> bool:
        """Whether to draft in this step; counts it as rested otherwise."""
        if self.waits:
            self.waits -= 1
            return False
        return True

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        self.width = 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1
        self.credit = min(_FIRST_CREDIT, self.credit + num_accepted - self.cost * num_drafts)
        if num_accepted:
            self.rest = _SHORTEST_REST
        if self.credit < 0:
            # A few drafts tell, after the rest, whether the text has become one that repeats itself.
            self.credit, self.waits = _LATER_CREDIT, self.rest
            self.rest = min(2 * self.rest, _LONGEST_REST)


class Drafter:
    """Drafts for the sequences of a table. Those whose drafts are mostly wrong rest for a while.

    `token_cost` is the time that a draft adds to a step, as a part of the step's.
    """

    def __init__(self, table: SequenceTable, token_cost: float) -> None:
        self._table = table
        self._token_cost = token_cost
        self._paces: dict[int, _Pace] = {}

    def remove(self, row: int) -> None:
        """Forgets the sequence at a row; nothing happens when it never drafted."""
        self._paces.pop(row, None)

    def draft(self, rows: IntArray, most: IntArray, num_spare: int) -> IntArray:
        """Writes up to `most` draft tokens of each row behind its tokens, `num_spare` in all; answers how many.

        A row that is skipped gets none, and none more than its token limit leaves room for beside the token that is
        sampled after them.
        """
        table = self._table
        counts = np.zeros(len(rows), np.int64)
        room = np.where(table.skipped[rows], 0, np.minimum(most, table.token_limit[rows] - table.num_tokens[rows] - 1))
        places = [place for place in np.flatnonzero(room > 0).tolist() if self._pace(int(rows[place])).begin_step()]
        for num_left, place in zip(range(len(places), 0, -1), places, strict=True):
            row = int(rows[place])
            pace = self._pace(row)
            share = min(int(room[place]), num_spare // num_left, max(pace.width, pace.least))
            if share <= 0:
                continue
            count = int(table.num_tokens[row])
            drafted = look_up(table.token_ids[row, :count], share)
            table.token_ids[row, count : count + len(drafted)] = drafted
            counts[place] = len(drafted)
            num_spare -= len(drafted)
        return counts

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Notes how a row's drafts fared."""
        self._pace(row).learn(num_drafts, num_accepted)

    def _pace(self, row: int) -> _Pace:
        pace = self._paces.get(row)
        if pace is None:
            pace = self._paces[row] = _Pace(self._token_cost, int(_ALWAYS_TRIED / self._token_cost))
        return pace
