"""A scheduler, a worker in miniature and a clock that stands still, for tests of one behaviour at a time."""

from collections import deque
from collections.abc import Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import EndEvent, PromptEvent, StepPlan, TokenEvent
from scheduler_service.core.request import Request, Sequence
from scheduler_service.core.scheduler import Event, Scheduler
from tests.support.model_worker import NEVER, ModelWorker, undisturbed


class SchedulerRig:
    """Sends plans and answers them one by one; every answer is computed from the slots the plan names.

    No token is a stop token unless `answer` says so. `outputs` holds what was delivered, `ends`
    what ended without a token, `scores` what was told of prompts.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 8,
        max_step_tokens: int = 64,
        max_in_flight: int = 2,
        prefix_caching: bool = True,
        **options: object,
    ) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_in_flight=max_in_flight,
            prefix_caching=prefix_caching,
            **options,  # type: ignore[arg-type]
        )
        self.now = 100.0
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.worker = ModelWorker(num_blocks, block_size, stop_one_in=NEVER)
        self.sent: deque[StepPlan] = deque()
        self.outputs: dict[Sequence, list[int]] = {}
        self.ends: list[EndEvent] = []
        self.scores: dict[Sequence, list[bytes]] = {}
        self._num_prompts = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Token ids that share no prefix with another prompt's."""
        self._num_prompts += 1
        return [self._num_prompts * 10_000 + i for i in range(num_tokens)]

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 8, **fields: object) -> list[Sequence]:
        """Adds a request; a number stands for a new prompt of so many tokens."""
        ids = self.prompt(prompt) if isinstance(prompt, int) else prompt
        request = Request(request_id, ids, max_tokens, **fields)  # type: ignore[arg-type]
        return self.scheduler.add_request(request)

    def add_one(self, request_id: str, prompt: int | list[int], max_tokens: int = 8, **fields: object) -> Sequence:
        """Adds a request of one sequence."""
        (sequence,) = self.add(request_id, prompt, max_tokens, **fields)
        return sequence

    def send(self) -> StepPlan:
        """Plans a step, which there must be."""
        plan = self.scheduler.schedule()
        assert plan is not None, "nothing to send"
        self.scheduler.check_integrity()
        self.sent.append(plan)
        return plan

    def answer(self, *, stop: Iterable[Sequence] = (), fail: Sequence | None = None) -> list[Event]:
        """Executes and applies the oldest step; `stop` just sampled a stop token, `fail` hits an error in it."""
        plan = self.sent.popleft()
        result = self.worker.execute(plan, None if fail is None else plan.sequences.index(fail))
        stopped = {sequence.sequence_id for sequence in stop}
        assert stopped <= set(result.sequence_ids), "it sampled nothing in this step"
        for sequence_id in stopped:
            result.stopped_sequence_ids.add(sequence_id)  # type: ignore[attr-defined]
            self.worker.sequences[sequence_id].is_skipped = True
        events = self.scheduler.apply(result)
        self.scheduler.check_integrity()
        for event in events:
            if isinstance(event, TokenEvent):
                self.outputs.setdefault(event.sequence, []).append(event.token_id)
            elif isinstance(event, PromptEvent):
                self.scores.setdefault(event.sequence, []).extend(event.logprobs.values)  # type: ignore[call-overload]
            else:
                self.ends.append(event)
        return events

    def step(self, seconds: float = 0.0) -> StepPlan:
        """Sends a step and answers it so many seconds later."""
        plan = self.send()
        self.now += seconds
        while self.sent:
            self.answer()
        return plan

    def lose_worker(self, *, by_fault: bool = False) -> list[EndEvent]:
        """Ends the epoch: nothing in flight is ever answered. Returns the ends of a request that is convicted."""
        convicted = self.scheduler.end_epoch(by_fault=by_fault)
        self.scheduler.check_integrity()
        self.worker.restart()
        self.sent.clear()
        return convicted

    def finish(self, max_steps: int = 1000) -> int:
        """Runs with a full pipeline until nothing is left; returns the number of steps answered."""
        for num_steps in range(max_steps):
            while (plan := self.scheduler.schedule()) is not None:
                self.sent.append(plan)
            if not self.sent:
                assert self.scheduler.is_idle
                assert self.scheduler.num_free_blocks == self.scheduler.config.num_blocks
                assert not self.worker.sequences
                return num_steps
            self.answer()
        raise AssertionError("no progress")

    def is_whole(self, sequence: Sequence) -> bool:
        """Whether all tokens of an undisturbed run were delivered, each once."""
        request = sequence.request
        prompt = list(request.prompt_token_ids)
        return self.outputs[sequence] == undisturbed(prompt, sequence.index, request.max_tokens, stop_one_in=NEVER)


def planned(plan: StepPlan) -> dict[Sequence, int]:
    """How many tokens a plan gives each sequence."""
    return dict(zip(plan.sequences, plan.scheduled_token_counts, strict=True))


def started(plan: StepPlan) -> list[Sequence]:
    """The sequences that a plan starts, in order."""
    return [new.sequence for new in plan.new_sequences]
