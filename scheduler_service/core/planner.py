"""What a step is to do: who gets how many tokens, who starts, and who has to make room."""

from typing import cast

from scheduler_service.core.adapters import has_adapter_place
from scheduler_service.core.cohorts import cohort_size, ready_sequences
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import NewSequence, StepPlan
from scheduler_service.core.request import Request, Sequence, SequenceState
from scheduler_service.core.roster import Roster
from scheduler_service.core.speculation import draft_share, num_drafts_for
from scheduler_service.core.suspects import Suspects


class Planner:
    """Fills plans from a roster."""

    def __init__(self, config: SchedulerConfig, roster: Roster, suspects: Suspects) -> None:
        self._config = config
        self._roster = roster
        self._blocks = roster.blocks
        self._live = roster.live
        self._waiting = roster.waiting
        self._suspects = suspects

    def fill(self, plan: StepPlan, *, may_start: bool) -> None:
        """Plans for the running sequences, and unless `may_start` is False for those that can start beside them."""
        if may_start:
            self._preempt_for_priority()
        budget = self._schedule_running(plan)
        if may_start:
            self._schedule_waiting(plan, budget)

    def _schedule_running(self, plan: StepPlan) -> int:
        """Gives each running sequence its tokens, most important first; returns the budget left."""
        budget, blocks, running = self._config.max_step_tokens, self._blocks, SequenceState.RUNNING
        candidates, owed_after = list(self._roster.running), blocks.num_promised
        if self._config.num_stages > 1:
            oldest = self._roster.oldest_step_id
            candidates = ready_sequences(candidates, oldest, cohort_size(len(candidates), self._config.num_stages))
            owed_after = sum(map(blocks.num_owed, candidates))
        num_after = len(candidates)
        share = draft_share(self._config.max_running, len(self._live), self._live.num_speculating)
        for sequence in candidates:
            num_after -= 1
            if sequence.state is not running:
                continue
            known = len(sequence.token_ids) + sequence.pending
            num = (known if known <= sequence.kv_limit else sequence.kv_limit) - sequence.computed
            if num <= 0:
                continue
            if num > 1:
                # The sequences after this one are left a token each, so a prefill delays no decode.
                owed_after -= blocks.num_owed(sequence)
                num = min(num, budget - num_after, self._chunk_limit(budget, owed_after))
            drafts = num_drafts_for(sequence, blocks, min(share, budget - num_after - 1)) if share else 0
            missing = blocks.num_missing(sequence, num + drafts)
            if missing > 0:
                if not self._make_room(sequence, missing):
                    continue
                plan.new_block_ids += blocks.grow(sequence, missing)
                plan.new_block_counts.append(missing)
            else:
                plan.new_block_counts.append(0)
            self._put(plan, sequence, num)
            budget -= num
            if drafts:
                plan.draft_counts[sequence.sequence_id] = drafts
                sequence.possible += drafts
                budget -= drafts
        return budget

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        """Starts waiting sequences in their order while budget, places and blocks allow."""
        most = self._config.max_running
        if self._config.num_stages > 1:
            most = cohort_size(min(most, len(self._roster.running) + len(self._waiting)), self._config.num_stages)
        while budget > 0 and len(plan.sequences) < most and (sequence := self._next_waiting()) is not None:
            hits = self._hits_if_startable(sequence)
            if hits is None:
                break
            self._roster.start(sequence, hits)
            num = len(sequence.token_ids) - sequence.computed
            if num > 1:
                num = min(num, self._chunk_limit(budget, 0))
            missing = self._blocks.num_missing(sequence, num)
            if missing > 0:
                self._blocks.grow(sequence, missing)
            plan.new_sequences.append(
                NewSequence(sequence, sequence.sequence_id, list(sequence.token_ids), list(sequence.block_ids))
            )
            plan.new_block_counts.append(0)
            self._put(plan, sequence, num)
            budget -= num

    def _put(self, plan: StepPlan, sequence: Sequence, num: int) -> None:
        """Puts `num` tokens of a sequence, whose blocks it holds, into the plan."""
        known = len(sequence.token_ids) + sequence.pending
        plan.sequences.append(sequence)
        plan.sequence_ids.append(sequence.sequence_id)
        plan.scheduled_token_counts.append(num)
        plan.computed_token_counts.append(sequence.computed)
        sequence.last_step = plan.step_id
        self._blocks.advance(sequence, num)
        if sequence.computed == known:
            sequence.pending += 1
        if sequence.sequence_id in self._live.held_back and sequence.computed >= self._blocks.num_leading_tokens(
            sequence.request
        ):
            plan.leaders.append(sequence)

    def _chunk_limit(self, budget: int, owed_after: int) -> int:
        """Most prefill tokens that one sequence gets: half of what is left, or more when those after it need less.

        `owed_after` is the number of blocks that running sequences have yet to fill after it in this step.
        """
        block_size = self._config.block_size
        share = max(budget // 2, min(budget, block_size))
        head = self._next_waiting()
        if head is not None and self._hits_if_startable(head) is not None:
            return share
        return max(share, budget - owed_after * block_size)

    def _hits_if_startable(self, sequence: Sequence) -> list[int] | None:
        """The cached prefix of a waiting sequence, or None when there is no place or too few blocks for it."""
        if len(self._roster.running) >= self._config.max_running:
            return None
        if not has_adapter_place(sequence, self._roster.running, self._config.max_running_adapters):
            return None
        hits = self._blocks.find_prefix(sequence)
        return None if self._blocks.num_lacking(sequence, hits) else hits

    def _make_room(self, sequence: Sequence, num: int) -> bool:
        """Preempts until `num` blocks are free; False when the sequence itself had to go."""
        while self._blocks.num_free < num:
            victim = min(self._unplanned(), key=self._preemption_cost)
            self._roster.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _unplanned(self) -> list[Sequence]:
        """The running sequences that the step being planned has not reached."""
        return [sequence for sequence in self._roster.running if sequence.last_step != self._roster.next_step_id]

    def _preempt_for_priority(self) -> None:
        """Makes room for the next waiting sequence at the cost of running ones of lower priority, if that is enough."""
        head = self._next_waiting()
        if (
            head is None
            or not self._roster.running
            or self._roster.running[-1].request.priority >= head.request.priority
        ):
            return
        if self._hits_if_startable(head) is not None:
            return
        lower = [s for s in self._roster.running if s.request.priority < head.request.priority]
        if not has_adapter_place(head, self._roster.running[: -len(lower)], self._config.max_running_adapters):
            return
        lacking = self._blocks.num_lacking(head, self._blocks.find_prefix(head))
        if sum(self._blocks.num_released_by(s) + self._blocks.num_owed(s) for s in lower) < lacking:
            return
        while self._hits_if_startable(head) is None and lower:
            victim = min(lower, key=self._preemption_cost)
            lower.remove(victim)
            self._roster.preempt(victim)
        # A victim that is older must not take the place back that it had to leave.
        self._waiting.put_first(head)

    def _preemption_cost(self, sequence: Sequence) -> tuple[int, bool, float, float, int]:
        """Lowest base priority goes first; then one that has gained since its last preemption as much as
        it lost by it; then the least recomputation for each block freed; then the youngest."""
        freed = self._blocks.num_released_by(sequence)
        is_protected = sequence.computed < sequence.protected_until
        per_block = sequence.computed / freed if freed else float("inf")
        return (sequence.request.priority, is_protected, per_block, -sequence.arrival, -sequence.sequence_id)

    def hold_trial(self) -> bool:
        """Lets only the request on trial start; False while steps of the one before it are in flight."""
        if self._suspects.trial is None:
            if self._roster.in_flight:
                return False
            self._suspects.begin()
        trial = cast(Request, self._suspects.trial)
        for sequence in self._live.of(trial.request_id):
            # Siblings that are held back have no ticket: they are not in the queue yet.
            if sequence.state is SequenceState.WAITING and sequence.ticket and self._waiting.peek() is not sequence:
                self._waiting.put_first(sequence)
        return True

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that may start next; during a trial only one of the request on trial."""
        head, trial = self._waiting.peek(), self._suspects.trial
        return None if trial is not None and head is not None and head.request is not trial else head
