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

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import cast

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.deadlines import Deadlines
from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.plan import EndEvent, PromptEvent, StepPlan, StepResult, TokenEvent
from scheduler_service.core.planner import Planner
from scheduler_service.core.request import FinishReason, Request, Sequence, SequenceState
from scheduler_service.core.roster import Roster
from scheduler_service.core.speculation import check_accepted, take_accepted
from scheduler_service.core.suspects import Suspects

Event = TokenEvent | PromptEvent | EndEvent

# An output token keeps the device about as busy as two prompt tokens: the weights of the virtual token counter.
_OUTPUT_COST = 2


class Scheduler:
    """The owner of requests, queue, block pool and prefix cache. One task calls it."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._suspects = Suspects()
        self._roster = roster = Roster(config, clock, self._suspects.forget)
        self._planner = Planner(config, roster, self._suspects)
        self.stats = roster.stats
        self._blocks = roster.blocks
        self._live = roster.live
        self._in_flight = roster.in_flight
        self._deadlines = Deadlines()
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
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none: queued, held back for a sibling, or preempted."""
        return len(self._live) - len(self._roster.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._blocks.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Of the free blocks, those whose content the prefix cache still finds."""
        return self._blocks.num_cached

    @property
    def num_slots(self) -> tuple[int, int]:
        """Places for tokens in the blocks that sequences hold: those that a token has taken, and all of them; the rest
        is lost to whole blocks. May be read from any thread."""
        running = list(self._roster.running)
        num_slots = sum(len(each.block_ids) for each in running) * self.config.block_size
        return sum(each.computed for each in running), num_slots

    @property
    def is_idle(self) -> bool:
        """Whether nothing lives, nothing is in flight, and the workers have been told so."""
        return self._roster.is_quiet and not self._live

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
            raise QueueFull("sequences", limit, self.stats.seconds_for(self._roster.queued_tokens))

    def add_request(self, request: Request) -> list[Sequence]:
        """Accepts a request: its sequences wait from now on.

        Raises DuplicateRequest, NeverFits or QueueFull, and then nothing has changed.
        """
        self._check_admissible(request)
        sequences = self._roster.enter(request)
        if request.deadline is not None:
            self._deadlines.add(request, sequences[0].arrival, self._live.is_live)
        return sequences

    def end_request(self, request_id: str, reason: FinishReason) -> list[EndEvent]:
        """Ends what lives of a request: cancelled, or past its deadline. Unknown ids are ignored."""
        sequences = self.sequences_of(request_id)
        for sequence in sequences:
            self._roster.finish(sequence, reason)
        return [EndEvent(sequence, reason, "") for sequence in sequences]

    def end_sequence(self, sequence_id: int, reason: FinishReason) -> None:
        """Ends one sequence that the caller knows to be complete, by a stop string. Unknown ids are ignored."""
        sequence = self._live.by_id.get(sequence_id)
        if sequence is not None:
            self._roster.finish(sequence, reason)

    def withdraw(self, request_ids: Iterable[str]) -> list[list[Sequence]]:
        """Gives up what lives of some requests, for other schedulers to adopt; of each that lives its sequences.

        Answers that are in flight to them are ignored.
        """
        withdrawn = [sequences for request_id in request_ids if (sequences := self.sequences_of(request_id))]
        self._roster.give_up(chain.from_iterable(withdrawn))
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
        self._roster.adopt(sequences)
        if request.deadline is not None:
            self._deadlines.add(request, self._clock(), self._live.is_live)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a request's prompt that the prefix cache would spare it now. Changes nothing."""
        if self._blocks.num_leading_tokens(request) == 0:
            return 0
        probe = Sequence(0, 0, request, 0.0, list(request.prompt_token_ids), 0, self._blocks.key_chain(request))
        return len(self._blocks.find_prefix(probe)) * self.config.block_size

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return self._roster.queued_tokens

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
        if self._suspects.is_active and not self._planner.hold_trial():
            return None
        now = self._clock()
        plan = StepPlan(self._roster.next_step_id, now)
        plan.applied_step_id = self._roster.next_step_id - 1 - len(self._in_flight)
        self._roster.waiting.age(now)
        self._planner.fill(plan, may_start=not self._is_held)
        plan.finished_sequence_ids, self._roster.finished_ids = self._roster.finished_ids, []
        plan.preempted_sequence_ids, self._roster.preempted_ids = self._roster.preempted_ids, []
        if plan.is_empty:
            return None
        for leader in plan.leaders:
            self._roster.release_siblings(leader)
        self._roster.next_step_id += 1
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
            events += self._fail_sequence(plan, sequence_id, message, result.error_reasons.get(sequence_id))
        if result.prompt_logprobs:
            self._apply_prompt_logprobs(result, events)
        if plan.draft_counts:
            events += self._apply_accepted(plan, result)
        self._apply_tokens(result, events)
        self._in_flight.popleft()
        self._roster.requeue_drained()
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
            for sequence in list(self._roster.running):
                self._roster.preempt(sequence)

    def release(self) -> None:
        """Starts sequences again."""
        self._is_held = False

    @property
    def is_quiet(self) -> bool:
        """Whether no sequence runs, no step is in flight, and the workers have been told so."""
        return self._roster.is_quiet

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
        self._roster.forget_epoch()
        return [] if convicted is None else self.end_request(convicted.request_id, FinishReason.ERROR)

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks leak, are held twice, or a sequence stands in two places."""
        self._roster.check_integrity()

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
        if (
            self._roster.queued_tokens
            and self._roster.queued_tokens + request.n * prompt_len > config.max_queued_tokens
        ):
            raise QueueFull(
                "prompt tokens", config.max_queued_tokens, self.stats.seconds_for(self._roster.queued_tokens)
            )

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

    def _end_trial_if_past(self) -> None:
        """Clears the request on trial once it has got past where it stood; it makes way for the next suspect."""
        sequences = self._live.of(cast(Request, self._suspects.trial).request_id)
        if not self._suspects.is_past(sequences):
            return
        self._suspects.clear()
        if self._suspects.is_active:
            for sequence in sequences:
                if sequence.state is SequenceState.RUNNING:
                    self._roster.preempt(sequence)

    # Answers and ends.

    def _apply_accepted(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes the draft tokens that were right."""
        events = take_accepted(plan, result, self._live.by_id, self._blocks)
        self.stats.num_draft_tokens += result.num_draft_tokens
        self.stats.num_accepted_tokens += len(events)
        if self._roster.tenants.is_contested:
            for event in events:
                self._roster.tenants.charge(event.sequence.request.tenant, _OUTPUT_COST)
        return events

    def _apply_tokens(self, result: StepResult, events: list[Event]) -> None:
        live, stopped, logprobs = self._live.by_id, result.stopped_sequence_ids, result.logprobs
        if self._roster.tenants.is_contested:
            tenants = Counter(live[i].request.tenant for i in result.sequence_ids if i in live)
            for tenant, num in tenants.items():
                self._roster.tenants.charge(tenant, num * _OUTPUT_COST)
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
                self._roster.finish(sequence, reason)

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

    def _fail_sequence(self, plan: StepPlan, sequence_id: int, message: str, reason: str | None) -> list[Event]:
        """Ends a sequence that failed in a step, and restarts those that share what it failed to write."""
        if sequence_id not in plan.sequence_ids:
            return []
        index = plan.sequence_ids.index(sequence_id)
        sequence, good = plan.sequences[index], plan.computed_token_counts[index]
        spoiled = self._blocks.unpublish(sequence, good)
        is_live = sequence_id in self._live.by_id
        if is_live:
            self._roster.finish(sequence, FinishReason.ERROR)
        # Whoever holds a spoiled block started in this step or later, so the steps in flight name it.
        for later in self._in_flight:
            for new in later.new_sequences:
                if not spoiled.isdisjoint(new.block_ids):
                    self._roster.restart(new.sequence, good)
        return [EndEvent(sequence, FinishReason.ERROR, message, reason)] if is_live else []
