"""The scheduler's core over a model runner, through the messages of the wire, with steps in flight."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import EndEvent, StepPlan
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.rpc.worker_messages import step_message, step_result
from stepwire.v1 import common_pb2, worker_pb2
from worker_service.rpc import convert
from worker_service.rpc.limits import StepLimits, check_step
from worker_service.runtime.runner import ModelRunner

Name = tuple[str, int]


@dataclass
class Served:
    """What came of each sequence, by (request id, sequence index); `ends` without those ended from outside."""

    outputs: dict[Name, list[int]] = field(default_factory=dict)
    logprobs: dict[Name, list[object]] = field(default_factory=dict)
    ends: dict[Name, FinishReason] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0


class ServedRunner:
    """Plans as early as the core allows, and checks each step as a worker does before it runs."""

    def __init__(self, runner: ModelRunner, vocab_size: int, *, max_in_flight: int = 2, **sizes: int) -> None:
        self.config = SchedulerConfig(
            max_in_flight=max_in_flight,
            **{"max_running": 8, "max_step_tokens": 64, **sizes},  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(self.config, lambda: 0.0)
        self._runner = runner
        self._limits = StepLimits(
            self.config.max_step_tokens,
            self.config.max_running,
            runner.max_model_len,
            self.config.num_blocks,
            self.config.block_size,
            vocab_size,
        )
        self._answers: deque[bytes] = deque()
        self.served = Served()

    def add(self, requests: Sequence[Request]) -> None:
        """Lets requests wait."""
        for request in requests:
            for sequence in self.scheduler.add_request(request):
                self.served.outputs[request.request_id, sequence.index] = []
                self.served.logprobs[request.request_id, sequence.index] = []

    def turn(self) -> None:
        """Sends what can be sent, then applies the oldest answer."""
        while (plan := self.scheduler.schedule()) is not None:
            self._answers.append(self._execute(plan))
        if self._answers:
            self._apply(self._answers.popleft())
        self.scheduler.check_integrity()

    def lose_worker(self) -> None:
        """Ends the epoch: what is in flight is never answered."""
        self.scheduler.end_epoch()
        self._runner.drop_sequences()
        self._answers.clear()

    def finish(self) -> Served:
        """Goes on until nothing is left."""
        while not self.scheduler.is_idle:
            self.turn()
        assert self.scheduler.num_free_blocks == self.config.num_blocks
        self.served.num_preemptions = self.scheduler.stats.num_preemptions
        self.served.num_accepted = self.scheduler.stats.num_accepted_tokens
        return self.served

    def _execute(self, plan: StepPlan) -> bytes:
        step = convert.step_input(step_message(plan, 1))
        check_step(step, self._limits)
        output = self._runner.execute(step)
        assert not output.errors, output.errors
        self.served.num_steps += 1
        return convert.step_result(output, epoch=1, queue_ns=0).SerializeToString()

    def _apply(self, answer: bytes) -> None:
        for event in self.scheduler.apply(step_result(worker_pb2.StepResult.FromString(answer))):
            assert not isinstance(event, EndEvent)
            name = event.sequence.request.request_id, event.sequence.index
            assert event.position == len(self.served.outputs[name])
            self.served.outputs[name].append(event.token_id)
            if isinstance(event.logprobs, common_pb2.PositionLogprobs):
                assert event.logprobs.sampled.token_id == event.token_id
                self.served.logprobs[name].append(event.logprobs)
            if event.finish_reason is not None:
                self.served.ends[name] = event.finish_reason


class Oracle:
    """Drafts from transcripts, prompt and output, in place of `look_up`: some tokens right and some wrong."""

    def __init__(self, transcripts: Sequence[Sequence[int]], vocab_size: int, *, wrong: float = 0.2) -> None:
        self._transcripts = [list(transcript) for transcript in transcripts]
        self._vocab_size = vocab_size
        self._wrong = wrong
        self._rng = random.Random(0)

    def __call__(self, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        known = tokens.tolist()
        for transcript in self._transcripts:
            if transcript[: len(known)] == known:
                drafts = transcript[len(known) : len(known) + most]
                wrong = self._rng.randrange(self._vocab_size)
                return np.array([wrong if self._rng.random() < self._wrong else token for token in drafts], np.int32)
        return tokens[:0]
