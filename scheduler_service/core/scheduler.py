"""Continuous batching over paged KV blocks: what each step computes, and what its answer changes.

There are no prefill and decode phases. A sequence has tokens that are known or pending, and a
count of those whose KV is computed; each step moves the second towards the first, within a budget
of tokens. A step is *sent* when it is planned and *applied* when it is answered; up to
`max_in_flight` are between the two, so a plan is made before the previous step's tokens are known.

The rules that make this exact are those of the design, "In flight":

* Workers run steps in order, so a block freed now may be written by another sequence in any step
  planned from now on, even while steps that still write it for the old owner are in flight.
* A block enters the prefix cache when the tokens that fill it are planned and all their ids are
  known; sequences planned after them may then hold it, in the same step too.
* Lengths are planned exactly. A stop token is a surprise: the worker skips the sequence in the
  steps already sent, and what they would have answered never comes.
* A preempted sequence keeps the answers in flight and waits again after the last of them.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import cast

from scheduler_service.core.adapters import has_adapter_place
from scheduler_service.core.cohorts import cohort_size, ready_sequences
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.deadlines import Deadlines
from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.kv_blocks import BlockManager
from scheduler_service.core.live import LiveSequences
from scheduler_service.core.plan import EndEvent, NewSequence, PromptEvent, StepPlan, StepResult, TokenEvent
from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.request import FinishReason, Request, Sequence, SequenceState
from scheduler_service.core.speculation import (
    check_accepted,
    check_possible,
    draft_share,
    num_drafts_for,
    take_accepted,
)
from scheduler_service.core.stats import SchedulerStats
from scheduler_service.core.suspects import Suspects
from scheduler_service.core.tenants import TenantLedger

Event = TokenEvent | PromptEvent | EndEvent

# An output token keeps the device about as busy as two prompt tokens: the weights of the virtual token counter.
_OUTPUT_COST = 2


def _running_order(sequence: Sequence) -> tuple[int, float, int]:
    return (-sequence.request.priority, sequence.arrival, sequence.sequence_id)


class Scheduler:
    """The owner of requests, queue, block pool and prefix cache. One task calls it."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self._clock = clock
        self._blocks = BlockManager(config)
        self._tenants = TenantLedger(config.tenant_weights)
        self._waiting = WaitingQueue(self._tenants, config.ageing_s)
        self._running: list[Sequence] = []
        self._draining: list[Sequence] = []
        self._in_flight: deque[StepPlan] = deque()
        self._live = LiveSequences()
        self._deadlines = Deadlines()
        self._suspects = Suspects()
        self._queued_tokens = 0
        self._finished_ids: list[int] = []
        self._preempted_ids: list[int] = []
        self._next_step_id = 1
        self._applied_at = clock()
        self._is_held = False

    # What stands where.

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not applied."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none: queued, held back for a sibling, or preempted."""
        return len(self._live) - len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._blocks.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Of the free blocks, those whose content the prefix cache still finds."""
        return self._blocks.num_cached

    @property
    def is_idle(self) -> bool:
        """Whether nothing lives, nothing is in flight, and the workers have been told so."""
        return not (self._live.by_id or self._in_flight or self._finished_ids or self._preempted_ids)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The live sequences of a request."""
        return self._live.of(request_id)

    # Requests come and go.

    def check_queue(self, num_sequences: int, num_arriving: int = 0) -> None:
        """Raises QueueFull when so many more sequences may not wait, beside those that are about to be added.

        An empty queue takes any number: they could never come in otherwise.
        """
        limit, ahead = self.config.max_queued_requests, self.num_waiting + num_arriving
        if ahead and ahead + num_sequences > limit:
            raise QueueFull("sequences", limit, self.stats.seconds_for(self._queued_tokens))

    def add_request(self, request: Request) -> list[Sequence]:
        """Accepts a request: its sequences wait from now on.

        Raises DuplicateRequest, NeverFits or QueueFull, and then nothing has changed.
        """
        self._check_admissible(request)
        arrival = self._clock()
        sequences = self._live.add(request, arrival, self._blocks.key_chain)
        self._queued_tokens += sum(len(sequence.token_ids) for sequence in sequences)
        self._tenants.enter(request.tenant, len(sequences))
        self._waiting.push(sequences[0], arrival)
        if self._blocks.num_leading_tokens(request) == 0:
            self._release_siblings(sequences[0])
        if request.deadline is not None:
            self._deadlines.add(request, arrival, self._live.is_live)
        return sequences

    def end_request(self, request_id: str, reason: FinishReason) -> list[EndEvent]:
        """Ends what lives of a request: cancelled, or past its deadline. Unknown ids are ignored."""
        sequences = self.sequences_of(request_id)
        for sequence in sequences:
            self._finish(sequence, reason)
        return [EndEvent(sequence, reason, "") for sequence in sequences]

    def end_sequence(self, sequence_id: int, reason: FinishReason) -> None:
        """Ends one sequence that the caller knows to be complete, by a stop string. Unknown ids are ignored."""
        sequence = self._live.by_id.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason)

    def withdraw(self, request_ids: Iterable[str]) -> list[list[Sequence]]:
        """Gives up what lives of some requests, for other schedulers to adopt; of each that lives its sequences.

        Answers that are in flight to them are ignored.
        """
        withdrawn = [sequences for request_id in request_ids if (sequences := self.sequences_of(request_id))]
        for sequence in chain.from_iterable(withdrawn):
            sequence.num_preemptions += sequence.state is not SequenceState.WAITING
            self._take_out(sequence, publish_tokens=len(sequence.token_ids) - 1)
            sequence.pending = sequence.possible = 0
        # What it remembers of them must not be taken for theirs where they will wait.
        self._waiting.forget_departed()
        return withdrawn

    def fits(self, request: Request) -> bool:
        """Whether a request can ever run here, and no other has its id."""
        try:
            self._check_fits(request)
        except (DuplicateRequest, NeverFits):
            return False
        return True

    def adopt(self, sequences: list[Sequence]) -> None:
        """Takes the live sequences of a request that another scheduler has withdrawn; they wait, as if preempted.

        What was accepted once is not refused for a full queue. Raises DuplicateRequest or NeverFits, and then nothing
        has changed.
        """
        request = sequences[0].request
        self._check_fits(request)
        now = self._clock()
        self._live.adopt(sequences)
        self._tenants.enter(request.tenant, len(sequences))
        for sequence in sequences:
            self._waiting.push(sequence, now)
            self._queued_tokens += len(sequence.token_ids)
        if request.deadline is not None:
            self._deadlines.add(request, now, self._live.is_live)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a request's prompt that the prefix cache would spare it now. Changes nothing."""
        if self._blocks.num_leading_tokens(request) == 0:
            return 0
        probe = Sequence(0, 0, request, 0.0, list(request.prompt_token_ids), 0, self._blocks.key_chain(request))
        return len(self._blocks.find_prefix(probe)) * self.config.block_size

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return self._queued_tokens

    def expire(self) -> list[EndEvent]:
        """Ends the requests whose deadline has passed, and those that have not started and cannot meet it any more."""
        ended: list[EndEvent] = []
        now = self._clock()
        for request in list(self._deadlines.due(now, self._live.is_live)):
            check_at = self._next_deadline_check(request)
            if check_at > now:
                self._deadlines.add(request, check_at, self._live.is_live)
            else:
                self.stats.num_hopeless += now < cast(float, request.deadline)
                ended += self.end_request(request.request_id, FinishReason.DEADLINE)
        return ended

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next, on the scheduler's clock."""
        return self._deadlines.next(self._live.is_live)

    # Steps.

    def schedule(self) -> StepPlan | None:
        """Plans the next step, which counts as sent from now on; None when there is nothing to send."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        if self._suspects.is_active and not self._hold_trial():
            return None
        now = self._clock()
        plan = StepPlan(self._next_step_id, now)
        plan.applied_step_id = self._next_step_id - 1 - len(self._in_flight)
        self._waiting.age(now)
        if not self._is_held:
            self._preempt_for_priority()
        budget = self._schedule_running(plan)
        if not self._is_held:
            self._schedule_waiting(plan, budget)
        plan.finished_sequence_ids, self._finished_ids = self._finished_ids, []
        plan.preempted_sequence_ids, self._preempted_ids = self._preempted_ids, []
        if plan.is_empty:
            return None
        for leader in plan.leaders:
            self._release_siblings(leader)
        self._next_step_id += 1
        self._in_flight.append(plan)
        return plan

    def apply(self, result: StepResult) -> list[Event]:
        """Takes a step's answer, oldest step first; returns what is to be delivered, in order.

        Raises ValueError, and changes nothing, when the answer is not to the oldest step in flight, or holds more
        tokens than that one may bring.
        """
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ValueError(f"the answer is to step {result.step_id}; the oldest in flight is {expected}")
        plan = self._in_flight[0]
        if result.accepted:
            check_accepted(plan, result, self._live.by_id)
        events: list[Event] = []
        for sequence_id, message in result.errors.items():
            events += self._fail_sequence(plan, sequence_id, message)
        if result.prompt_logprobs:
            self._apply_prompt_logprobs(result, events)
        if plan.draft_counts:
            events += self._apply_accepted(plan, result)
        self._apply_tokens(result, events)
        self._in_flight.popleft()
        self._requeue_drained()
        if self._suspects.trial is not None:
            self._end_trial_if_past()
        now = self._clock()
        num_tokens = plan.num_tokens
        is_full = 2 * num_tokens >= self.config.max_step_tokens
        self.stats.count_step(num_tokens, now - max(plan.sent_at, self._applied_at), is_full=is_full)
        self._applied_at = now
        return events

    def hold(self, *, preempt: bool) -> None:
        """Starts no sequence any more until `release`: those that run go on to their ends, or are preempted now.

        What waits goes on waiting, siblings and preempted sequences of requests that have begun among it.
        """
        self._is_held = True
        if preempt:
            for sequence in list(self._running):
                self._preempt(sequence)

    def release(self) -> None:
        """Starts sequences again."""
        self._is_held = False

    @property
    def is_quiet(self) -> bool:
        """Whether no sequence runs, no step is in flight, and the workers have been told so."""
        return not (self._running or self._in_flight or self._finished_ids or self._preempted_ids)

    def forget_content(self) -> None:
        """Empties the prefix cache: the KV tensors' content is gone. Nothing may run."""
        self._blocks.forget_content()

    def end_epoch(self, *, by_fault: bool = False) -> list[EndEvent]:
        """Forgets every step in flight and all KV: the running sequences wait again, as if preempted.

        With `by_fault` a fault inside a worker ended it: requests that were in flight are under suspicion, and the
        one that was in flight alone for it is ended; its ends are answered.
        """
        live = self._live.by_id
        in_flight = {s.sequence_id: s for plan in self._in_flight for s in plan.sequences if s.sequence_id in live}
        convicted = self._suspects.blame(in_flight.values()) if by_fault else None
        self._in_flight.clear()
        self._finished_ids.clear()
        self._preempted_ids.clear()
        self._next_step_id = 1
        for sequence in self._running:
            self._blocks.release(sequence)
            sequence.num_preemptions += 1
        again, self._running, self._draining = self._running + self._draining, [], []
        for sequence in again:
            sequence.pending = sequence.possible = 0
            self._enqueue(sequence)
        self._blocks.forget_content()
        return [] if convicted is None else self.end_request(convicted.request_id, FinishReason.ERROR)

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks leak, are held twice, or a sequence stands in two places."""
        self._blocks.check_integrity(self._running)
        places = [*self._running, *self._draining, *self._waiting]
        self._live.check_integrity(places)
        check_possible(self._in_flight, places)
        held_back = [sequence for siblings in self._live.held_back.values() for sequence in siblings]
        if self._queued_tokens != sum(len(s.token_ids) for s in [*self._waiting, *held_back]):
            raise RuntimeError("queued tokens are counted wrong")
        if len(self._waiting) != sum(1 for _ in self._waiting):
            raise RuntimeError("waiting sequences are counted wrong")
        if any(s.block_ids for s in places if s.state is not SequenceState.RUNNING):
            raise RuntimeError("a sequence that does not run holds blocks")

    # Admission.

    def _check_fits(self, request: Request) -> None:
        config = self.config
        if request.request_id in self._live:
            raise DuplicateRequest(request.request_id)
        needed = self._blocks.num_blocks_for(len(request.prompt_token_ids) + request.max_tokens - 1)
        if needed > config.num_blocks:
            raise NeverFits(needed, config.num_blocks, config.num_blocks * config.block_size + 1)

    def _check_admissible(self, request: Request) -> None:
        self._check_fits(request)
        config, prompt_len = self.config, len(request.prompt_token_ids)
        self.check_queue(request.n)
        if self._queued_tokens and self._queued_tokens + request.n * prompt_len > config.max_queued_tokens:
            raise QueueFull("prompt tokens", config.max_queued_tokens, self.stats.seconds_for(self._queued_tokens))

    def _next_deadline_check(self, request: Request) -> float:
        """When a request with a deadline is to be looked at next; a time that has passed means that it must end.

        One that has not started is looked at when prefill at the best measured speed and one step
        would just meet the deadline.
        """
        deadline = cast(float, request.deadline)
        sequences = self._live.of(request.request_id)
        if any(s.state is not SequenceState.WAITING or s.last_step for s in sequences):
            return deadline
        num = sequences[0].prompt_token_count
        latest = deadline - self.stats.least_seconds_to_first_token(num)
        if latest > self._clock():
            return latest
        num -= len(self._blocks.find_prefix(sequences[0])) * self.config.block_size
        return deadline - self.stats.least_seconds_to_first_token(num)

    def _enqueue(self, sequence: Sequence) -> None:
        """Lets a sequence wait again that has run before."""
        self._waiting.push(sequence, self._clock())
        self._queued_tokens += len(sequence.token_ids)

    # Planning.

    def _schedule_running(self, plan: StepPlan) -> int:
        """Gives each running sequence its tokens, most important first; returns the budget left."""
        budget, blocks, running = self.config.max_step_tokens, self._blocks, SequenceState.RUNNING
        candidates, owed_after = list(self._running), blocks.num_promised
        if self.config.num_stages > 1:
            oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
            candidates = ready_sequences(candidates, oldest, cohort_size(len(candidates), self.config.num_stages))
            owed_after = sum(map(blocks.num_owed, candidates))
        num_after = len(candidates)
        share = draft_share(self.config.max_running, len(self._live), self._live.num_speculating)
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
        most = self.config.max_running
        if self.config.num_stages > 1:
            most = cohort_size(min(most, len(self._running) + len(self._waiting)), self.config.num_stages)
        while budget > 0 and len(plan.sequences) < most and (sequence := self._next_waiting()) is not None:
            hits = self._hits_if_startable(sequence)
            if hits is None:
                break
            self._start(sequence, hits)
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
        block_size = self.config.block_size
        share = max(budget // 2, min(budget, block_size))
        head = self._next_waiting()
        if head is not None and self._hits_if_startable(head) is not None:
            return share
        return max(share, budget - owed_after * block_size)

    def _hits_if_startable(self, sequence: Sequence) -> list[int] | None:
        """The cached prefix of a waiting sequence, or None when there is no place or too few blocks for it."""
        if len(self._running) >= self.config.max_running:
            return None
        if not has_adapter_place(sequence, self._running, self.config.max_running_adapters):
            return None
        hits = self._blocks.find_prefix(sequence)
        return None if self._blocks.num_lacking(sequence, hits) else hits

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        """Makes the next waiting sequence run, from the prefix that is cached."""
        self._waiting.pop()
        self._queued_tokens -= len(sequence.token_ids)
        sequence.token_ids = list(sequence.token_ids)
        sequence.state = SequenceState.RUNNING
        self._blocks.start(sequence, hits)
        if sequence.num_preemptions == 0:
            sequence.cached = min(sequence.computed, sequence.prompt_token_count)
        self.stats.count_prefix(len(sequence.token_ids), sequence.computed)
        self._tenants.charge(sequence.request.tenant, len(sequence.token_ids) - sequence.computed)
        insort(self._running, sequence, key=_running_order)

    # Suspects.

    def _hold_trial(self) -> bool:
        """Lets only the request on trial start; False while steps of the one before it are in flight."""
        if self._suspects.trial is None:
            if self._in_flight:
                return False
            self._suspects.begin()
        trial = cast(Request, self._suspects.trial)
        for sequence in self._live.of(trial.request_id):
            # Siblings that are held back have no ticket: they are not in the queue yet.
            if sequence.state is SequenceState.WAITING and sequence.ticket and self._waiting.peek() is not sequence:
                self._waiting.put_first(sequence)
        return True

    def _end_trial_if_past(self) -> None:
        """Clears the request on trial once it has got past where it stood; it makes way for the next suspect."""
        sequences = self._live.of(cast(Request, self._suspects.trial).request_id)
        if not self._suspects.is_past(sequences):
            return
        self._suspects.clear()
        if self._suspects.is_active:
            for sequence in sequences:
                if sequence.state is SequenceState.RUNNING:
                    self._preempt(sequence)

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that may start next; during a trial only one of the request on trial."""
        head, trial = self._waiting.peek(), self._suspects.trial
        return None if trial is not None and head is not None and head.request is not trial else head

    # Preemption.

    def _make_room(self, sequence: Sequence, num: int) -> bool:
        """Preempts until `num` blocks are free; False when the sequence itself had to go."""
        while self._blocks.num_free < num:
            victim = min(self._unplanned(), key=self._preemption_cost)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _unplanned(self) -> list[Sequence]:
        """The running sequences that the step being planned has not reached."""
        return [sequence for sequence in self._running if sequence.last_step != self._next_step_id]

    def _preempt_for_priority(self) -> None:
        """Makes room for the next waiting sequence at the cost of running ones of lower priority, if that is enough."""
        head = self._next_waiting()
        if head is None or not self._running or self._running[-1].request.priority >= head.request.priority:
            return
        if self._hits_if_startable(head) is not None:
            return
        lower = [s for s in self._running if s.request.priority < head.request.priority]
        if not has_adapter_place(head, self._running[: -len(lower)], self.config.max_running_adapters):
            return
        lacking = self._blocks.num_lacking(head, self._blocks.find_prefix(head))
        if sum(self._blocks.num_released_by(s) + self._blocks.num_owed(s) for s in lower) < lacking:
            return
        while self._hits_if_startable(head) is None and lower:
            victim = min(lower, key=self._preemption_cost)
            lower.remove(victim)
            self._preempt(victim)
        # A victim that is older must not take the place back that it had to leave.
        self._waiting.put_first(head)

    def _preemption_cost(self, sequence: Sequence) -> tuple[int, bool, float, float, int]:
        """Lowest base priority goes first; then one that has gained since its last preemption as much as
        it lost by it; then the least recomputation for each block freed; then the youngest."""
        freed = self._blocks.num_released_by(sequence)
        is_protected = sequence.computed < sequence.protected_until
        per_block = sequence.computed / freed if freed else float("inf")
        return (sequence.request.priority, is_protected, per_block, -sequence.arrival, -sequence.sequence_id)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it waits again once its answers in flight have come."""
        self.stats.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.protected_until = 2 * sequence.computed
        sequence.state = SequenceState.PREEMPTED
        self._running.remove(sequence)
        self._blocks.release(sequence)
        self._preempted_ids.append(sequence.sequence_id)
        self._draining.append(sequence)
        self._requeue_drained()

    def _requeue_drained(self) -> None:
        """Lets the preempted sequences wait again that are in no step in flight."""
        if not self._draining:
            return
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        drained = [sequence for sequence in self._draining if sequence.last_step < oldest]
        self._draining = [sequence for sequence in self._draining if sequence.last_step >= oldest]
        for sequence in drained:
            self._enqueue(sequence)

    # Answers and ends.

    def _apply_accepted(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes the draft tokens that were right."""
        events = take_accepted(plan, result, self._live.by_id, self._blocks)
        self.stats.num_draft_tokens += result.num_draft_tokens
        self.stats.num_accepted_tokens += len(events)
        if self._tenants.is_contested:
            for event in events:
                self._tenants.charge(event.sequence.request.tenant, _OUTPUT_COST)
        return events

    def _apply_tokens(self, result: StepResult, events: list[Event]) -> None:
        live, stopped, logprobs = self._live.by_id, result.stopped_sequence_ids, result.logprobs
        if self._tenants.is_contested:
            tenants = Counter(live[i].request.tenant for i in result.sequence_ids if i in live)
            for tenant, num in tenants.items():
                self._tenants.charge(tenant, num * _OUTPUT_COST)
        for sequence_id, token_id in zip(result.sequence_ids, result.token_ids, strict=True):
            sequence = live.get(sequence_id)
            if sequence is None:
                continue
            sequence.token_ids.append(token_id)
            sequence.pending -= 1
            num_tokens = len(sequence.token_ids)
            reason = None
            if sequence_id in stopped:
                reason = FinishReason.STOP
            elif num_tokens > sequence.kv_limit:
                reason = FinishReason.LENGTH
            position = num_tokens - sequence.prompt_token_count - 1
            events.append(TokenEvent(sequence, token_id, position, logprobs.get(sequence_id), reason))
            if reason is not None:
                self._finish(sequence, reason)

    def _apply_prompt_logprobs(self, result: StepResult, events: list[Event]) -> None:
        for sequence_id, part in result.prompt_logprobs:
            sequence = self._live.by_id.get(sequence_id)
            if sequence is None:
                continue
            if part.position != sequence.scored:
                text = f"prompt position {part.position} is told of; {sequence.scored} is next"
                raise ValueError(f"the answer to step {result.step_id} is wrong about sequence {sequence_id}: {text}")
            sequence.scored += part.num
            events.append(PromptEvent(sequence, part))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a live sequence; its blocks are free from now on."""
        # The last token's own KV may never be written: of a stop token it is not.
        self._take_out(sequence, publish_tokens=0 if reason is FinishReason.ERROR else len(sequence.token_ids) - 1)
        sequence.finish_reason = reason

    def _take_out(self, sequence: Sequence, *, publish_tokens: int) -> None:
        """Takes a live sequence out of wherever it stands, its blocks from it, and lets its siblings go on."""
        state, sequence.state = sequence.state, SequenceState.FINISHED
        if state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._blocks.release(sequence, publish_tokens=publish_tokens)
            self._finished_ids.append(sequence.sequence_id)
        elif state is SequenceState.PREEMPTED:
            self._draining.remove(sequence)
        else:
            self._queued_tokens -= len(sequence.token_ids)
            if not self._live.drop_held_back(sequence):
                self._waiting.note_departure()
        self._live.remove(sequence)
        if sequence.request.request_id not in self._live:
            self._suspects.forget(sequence.request.request_id)
        self._tenants.leave(sequence.request.tenant)
        self._release_siblings(sequence)

    def _release_siblings(self, leader: Sequence) -> None:
        """Lets the siblings of a leader wait in the queue: what they share is computed, or never will be."""
        for sibling in self._live.take_held_back(leader):
            self._waiting.push(sibling, self._clock())

    def _fail_sequence(self, plan: StepPlan, sequence_id: int, message: str) -> list[Event]:
        """Ends a sequence that failed in a step, and restarts those that share what it failed to write."""
        if sequence_id not in plan.sequence_ids:
            return []
        index = plan.sequence_ids.index(sequence_id)
        sequence, good = plan.sequences[index], plan.computed_token_counts[index]
        spoiled = self._blocks.unpublish(sequence, good)
        is_live = sequence_id in self._live.by_id
        if is_live:
            self._finish(sequence, FinishReason.ERROR)
        # Whoever holds a spoiled block started in this step or later, so the steps in flight name it.
        for later in self._in_flight:
            for new in later.new_sequences:
                if not spoiled.isdisjoint(new.block_ids):
                    self._restart(new.sequence, good)
        return [EndEvent(sequence, FinishReason.ERROR, message)] if is_live else []

    def _restart(self, sequence: Sequence, num_good_tokens: int) -> None:
        """Preempts a sequence that computed over spoiled blocks; its answers in flight are void.

        A new id makes them void: answers to unknown ids are ignored. What the sequence published
        itself rests on the spoiled blocks and goes too.
        """
        self._blocks.unpublish(sequence, num_good_tokens)
        if sequence.state is SequenceState.RUNNING:
            self._preempt(sequence)
        if sequence.state is not SequenceState.PREEMPTED:
            return
        self._live.renew_id(sequence)
        sequence.pending = sequence.possible = 0
        self._draining.remove(sequence)
        self._enqueue(sequence)
