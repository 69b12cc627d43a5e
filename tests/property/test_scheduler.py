"""Long random histories: whatever happens, each request ends once, with the tokens of an undisturbed run."""

import os
import random
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import NeverFits, QueueFull
from scheduler_service.core.plan import EndEvent, PromptEvent, StepPlan, StepResult
from scheduler_service.core.request import FinishReason, Request, Sequence
from scheduler_service.core.scheduler import Event, Scheduler
from tests.support.model_worker import ModelWorker, prompt_scores, undisturbed

STOP_ONE_IN = 12
NUM_OPERATIONS = 200_000 if os.environ.get("STEPWIRE_TEST_FULL") else 8_000
STEPS_PER_EXAMPLE = 100


class SchedulerHistory(RuleBasedStateMachine):
    """Drives a scheduler and a worker that checks every plan and computes with real slot contents."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 6),
        extra_tokens=st.integers(0, 20),
        prefix_caching=st.booleans(),
        max_in_flight=st.integers(1, 4),
        num_stages=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        extra_tokens: int,
        prefix_caching: bool,
        max_in_flight: int,
        num_stages: int,
    ) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_running=max_running,
                max_step_tokens=max_running + extra_tokens,
                prefix_caching=prefix_caching,
                max_in_flight=max_in_flight,
                num_stages=num_stages,
                max_queued_requests=40,
                ageing_s=7.0,
                tenant_weights={"t1": 2.0},
            ),
            clock=lambda: self.now,
        )
        self.worker = ModelWorker(num_blocks, block_size, STOP_ONE_IN)
        self.sent: deque[StepPlan] = deque()
        self.live: dict[Sequence, list[int]] = {}
        self.scores: dict[Sequence, list[bytes]] = {}
        self.transcripts: list[list[int]] = []
        self.num_requests = 0

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        patience=st.one_of(st.none(), st.integers(1, 20)),
        num_drafts=st.sampled_from([0, 0, 1, 3, 6]),
    )
    def add(
        self, stem: int, length: int, max_tokens: int, n: int, priority: int, patience: int | None, num_drafts: int
    ) -> None:
        # Prompts of one stem share prefixes of every length.
        prompt = [1 + (stem * 7 + i * i) % 40 for i in range(length)]
        self.submit(prompt, max_tokens, n, priority, patience, num_drafts)

    @precondition(lambda self: self.transcripts)
    @rule(data=st.data(), extra=st.integers(0, 4), max_tokens=st.integers(1, 10), num_drafts=st.sampled_from([0, 4]))
    def continue_conversation(self, data: st.DataObject, extra: int, max_tokens: int, num_drafts: int) -> None:
        transcript = data.draw(st.sampled_from(self.transcripts))
        self.submit(transcript + [7] * extra, max_tokens, 1, 0, None, num_drafts)

    def submit(
        self, prompt: list[int], max_tokens: int, n: int, priority: int, patience: int | None, num_drafts: int
    ) -> None:
        request = Request(
            tenant=f"t{self.num_requests % 3}",
            request_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            scores_prompt=self.num_requests % 4 == 3,
            max_draft_tokens=num_drafts,
        )
        self.num_requests += 1
        try:
            sequences = self.scheduler.add_request(request)
        except (NeverFits, QueueFull):
            assert not self.scheduler.sequences_of(request.request_id)
            return
        self.live.update({sequence: [] for sequence in sequences})

    @rule(rounds=st.integers(1, 6), data=st.data())
    def run(self, rounds: int, data: st.DataObject) -> None:
        """As many rounds as drawn, with the pipeline kept full and a sequence failing now and then."""
        for _ in range(rounds):
            for _ in range(self.scheduler.config.max_in_flight):
                self.send()
            if self.sent:
                self.answer(data.draw(st.one_of(st.none(), st.none(), st.integers(0, 3))))

    @rule()
    def send(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            num_rows = len(plan.sequence_ids) + sum(plan.draft_counts.values())
            assert num_rows <= max(len(plan.sequence_ids), self.scheduler.config.max_running)
            assert plan.num_tokens + sum(plan.draft_counts.values()) <= self.scheduler.config.max_step_tokens
            if self.scheduler.config.num_stages > 1:
                in_flight = {sequence_id for sent in self.sent for sequence_id in sent.sequence_ids}
                assert in_flight.isdisjoint(plan.sequence_ids), "a sequence has two steps in flight"
            self.sent.append(plan)

    @precondition(lambda self: self.sent)
    @rule(fail=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 5)))
    def answer(self, fail: int | None) -> None:
        plan = self.sent.popleft()
        self.deliver(self.scheduler.apply(self.worker.execute(plan, fail)))
        self.now += 1

    @precondition(lambda self: self.sent)
    @rule(late=st.integers(-2, 3))
    def answer_out_of_order(self, late: int) -> None:
        """An answer that comes twice, or before its turn, is refused and changes nothing."""
        step_id = self.sent[0].step_id + late
        if late:
            with pytest.raises(ValueError, match=f"step {step_id}"):
                self.scheduler.apply(StepResult(step_id, [], []))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.live, key=lambda s: s.sequence_id)))
        self.deliver(self.scheduler.end_request(sequence.request.request_id, FinishReason.CANCELLED))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.live, key=lambda s: s.sequence_id)))
        self.scheduler.end_sequence(sequence.sequence_id, FinishReason.STOP)
        del self.live[sequence]

    @rule()
    def expire(self) -> None:
        due = self.scheduler.next_deadline()
        events = self.scheduler.expire()
        assert not events or (due is not None and due <= self.now)
        assert all(
            s.request.deadline is None or s.request.deadline > self.now for s in self.live if not_ended(s, events)
        )
        self.deliver(events)

    @rule(really=st.integers(0, 3), by_fault=st.booleans())
    def lose_worker(self, really: int, by_fault: bool) -> None:
        if really:
            return
        requests = {s.request.request_id for plan in self.sent for s in plan.sequences if s in self.live}
        convicted = self.scheduler.end_epoch(by_fault=by_fault)
        if convicted:
            # Nobody is ended for what others were in flight for, too.
            assert {event.sequence.request.request_id for event in convicted} == requests
        self.deliver(convicted)
        self.worker.restart()
        self.sent.clear()

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            sequence = event.sequence
            output = self.live[sequence]
            if isinstance(event, PromptEvent):
                assert sequence.index == 0 and not output, (
                    "a prompt is told of by its first sequence, before its output"
                )
                scores = self.scores.setdefault(sequence, [])
                assert event.logprobs.position == len(scores) + 1, "a position was skipped or came twice"
                scores += event.logprobs.values  # type: ignore[operator]
                continue
            if isinstance(event, EndEvent):
                del self.live[sequence]
                continue
            assert event.position == len(output), "a position was skipped or came twice"
            if sequence.request.scores_prompt and not output and sequence.index == 0:
                assert self.scores.pop(sequence, []) == prompt_scores(list(sequence.request.prompt_token_ids))
            output.append(event.token_id)
            if event.finish_reason is not None:
                request = sequence.request
                whole = undisturbed(
                    list(request.prompt_token_ids), sequence.index, request.max_tokens, stop_one_in=STOP_ONE_IN
                )
                assert output == whole
                self.transcripts = [*self.transcripts[-3:], [*request.prompt_token_ids, *output]]
                del self.live[sequence]

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.num_running <= self.scheduler.config.max_running
        assert self.scheduler.num_in_flight == len(self.sent)

    def teardown(self) -> None:
        """Everything that is left runs to its end within a bounded number of steps, and nothing leaks."""
        if not hasattr(self, "scheduler"):
            return
        limit = 50 + 40 * sum(len(s.request.prompt_token_ids) + s.request.max_tokens for s in self.live)
        while self.live or self.sent:
            limit -= 1
            assert limit > 0, "no progress"
            self.send()
            if self.sent:
                self.answer(None)
        self.send()
        if self.sent:
            self.answer(None)
        assert self.scheduler.is_idle
        assert self.scheduler.num_free_blocks == self.scheduler.config.num_blocks
        assert not self.worker.sequences


def not_ended(sequence: Sequence, events: list[EndEvent]) -> bool:
    return all(event.sequence is not sequence for event in events)


def play(seed: int) -> int:
    """One history from a plain random generator, far faster than hypothesis; returns its number of operations."""
    r = random.Random(seed)
    history = SchedulerHistory()
    history.start(
        num_blocks=r.randint(4, 24),
        block_size=r.choice([1, 2, 4]),
        max_running=r.randint(1, 6),
        extra_tokens=r.randint(0, 20),
        prefix_caching=r.random() < 0.8,
        max_in_flight=r.randint(1, 4),
        num_stages=r.choice([1, 1, 2, 3]),
    )
    num_operations = r.randint(5, 60)
    loss_rate = r.choice([0.01, 0.01, 0.2])
    for _ in range(num_operations):
        if r.random() < loss_rate:
            history.lose_worker(0, r.random() < 0.7)
        kind = r.random()
        if kind < 0.25:
            patience = r.choice([None, r.randint(1, 20)])
            history.add(
                r.randint(0, 2),
                r.randint(1, 30),
                r.randint(1, 20),
                r.choice([1, 1, 1, 2, 3]),
                r.choice([0, 1]),
                patience,
                r.choice([0, 0, 1, 3, 6]),
            )
        elif kind < 0.35 and history.transcripts:
            prompt = r.choice(history.transcripts) + [7] * r.randint(0, 4)
            history.submit(prompt, r.randint(1, 10), 1, 0, None, r.choice([0, 4]))
        elif kind < 0.6:
            history.send()
        elif kind < 0.95 and history.sent:
            history.answer(r.choice([None, None, None, r.randint(0, 5)]))
        elif kind < 0.98 and history.live:
            sequence = r.choice(sorted(history.live, key=lambda s: s.sequence_id))
            if kind < 0.97:
                request_id = sequence.request.request_id
                history.deliver(history.scheduler.end_request(request_id, FinishReason.CANCELLED))
            else:
                history.scheduler.end_sequence(sequence.sequence_id, FinishReason.STOP)
                del history.live[sequence]
        else:
            history.expire()
        history.is_sound()
    history.teardown()
    return num_operations


def test_random_histories() -> None:
    """As many operations again, over more and other histories."""
    done = seed = 0
    while done < 3 * NUM_OPERATIONS:
        done += play(seed)
        seed += 1


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(
    max_examples=NUM_OPERATIONS // STEPS_PER_EXAMPLE,
    stateful_step_count=STEPS_PER_EXAMPLE,
    deadline=None,
    # A failing history is short enough to read, and shrinking one takes minutes.
    phases=[Phase.generate],
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
