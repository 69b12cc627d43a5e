"""What the roster's own check finds: sequences that stand nowhere or twice, counts and blocks that do not agree."""

from collections.abc import Callable

import pytest

from scheduler_service.core.request import Sequence
from scheduler_service.core.roster import Roster
from tests.support.scheduler_rig import SchedulerRig


def _forget(roster: Roster, sequence: Sequence) -> None:
    roster.running.remove(sequence)


def _drain_too(roster: Roster, sequence: Sequence) -> None:
    roster.draining.append(sequence)


def _count_more(roster: Roster, sequence: Sequence) -> None:
    roster.queued_tokens += len(sequence.token_ids)


def _expect_drafts(roster: Roster, sequence: Sequence) -> None:
    sequence.possible += 1


def _lose_a_block(roster: Roster, sequence: Sequence) -> None:
    sequence.block_ids.pop()


@pytest.mark.parametrize("spoil", [_forget, _drain_too, _count_more, _expect_drafts, _lose_a_block])
def test_the_check_finds_what_is_wrong(spoil: Callable[[Roster, Sequence], None]) -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5)
    rig.step()
    rig.scheduler.check_integrity()
    spoil(rig.scheduler._roster, sequence)
    with pytest.raises(RuntimeError):
        rig.scheduler.check_integrity()
