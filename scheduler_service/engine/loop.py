"""The step loop: the one owner of the scheduler.

Everything here runs on the event loop, and the scheduler is only ever called between two awaits, so
its state needs no lock. A step is planned as soon as the scheduler allows another one in flight; what
an answer holds for clients is made into text elsewhere.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.plan import EndEvent, PromptEvent, PromptLogprobs, StepPlan, StepResult, TokenEvent
from scheduler_service.core.request import FinishReason
from scheduler_service.core.request import Sequence as SchedulerSequence
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.best_of import BestOf
from scheduler_service.engine.contexts import without_span
from scheduler_service.engine.detokenize import Detokenizer
from scheduler_service.engine.ends import already_exists, end_error, ends_workers, queue_full, too_slow
from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.live_requests import LiveRequests
from scheduler_service.engine.output import Delivery, SequenceText, TextPipeline, Work
from scheduler_service.engine.stop import StopFinder
from scheduler_service.engine.values import Output
from stepwire.rpc.errors import StepwireError

TICK_S = 0.5
_STALLED_AFTER_S = 5.0

_log = structlog.stdlib.get_logger(__name__)


class StepSink(Protocol):
    """Where steps go."""

    async def send(self, plan: StepPlan) -> None:
        """Sends a step. Does not raise: a lost worker is reported elsewhere."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What lives of a request between two loops; `texts` are those of its sequences, in order."""

    sequences: list[SchedulerSequence]
    texts: list[SequenceText]


class StepLoop:
    """Plans, sends and applies steps, and tells the requests' streams what came of them.

    `on_defect` is called when the loop itself fails: every request must then be ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sink: StepSink,
        detokenizer: Detokenizer,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._sink = sink
        self._detokenizer = detokenizer
        self._on_defect = on_defect
        self.live = LiveRequests()
        """The requests that live here; nobody else adds or removes any."""
        self._texts: dict[SchedulerSequence, SequenceText] = {}
        self._results: deque[StepResult] = deque()
        self._is_paused = False
        self._quiet: asyncio.Future[None] | None = None
        self._work: list[Work] = []
        self._wake = asyncio.Event()
        self._pipeline = TextPipeline(self._deliver, inline=detokenizer.is_quick)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._beat_at = time.monotonic()

    # How it stands.

    @property
    def scheduler(self) -> Scheduler:
        """For its counts; nobody else changes it."""
        return self._scheduler

    @property
    def is_alive(self) -> bool:
        """Whether the loop has lately gone round."""
        is_running = self._task is not None and not self._task.done()
        return is_running and time.monotonic() - self._beat_at < _STALLED_AFTER_S

    # Its life.

    def start(self) -> None:
        """Begins to run."""
        self._beat_at = time.monotonic()
        # In a context of its own: whatever span the caller is in is over long before the loop is.
        self._task = asyncio.create_task(self._run_guarded(), name="step loop", context=without_span())

    async def close(self) -> None:
        """Stops. Requests that live get no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pipeline.close()

    # What others ask of it.

    def check_queue(self, num_sequences: int, num_arriving: int) -> None:
        """Raises StepwireError when so many sequences may not wait, beside those that are being tokenized."""
        try:
            self._scheduler.check_queue(num_sequences, num_arriving)
        except QueueFull as error:
            raise queue_full(error) from None

    def submit(self, live: LiveRequest) -> None:
        """Lets a request wait. Raises StepwireError when it is refused; then nothing has changed."""
        if live.continued.is_over:
            live.is_closed = True
            live.stream.end()
            return
        # The core may have forgotten one of this id already: its last tokens are still on their way.
        self.live.check_id(live.request.request_id)
        try:
            sequences = self._scheduler.add_request(live.request)
        except NeverFits as error:
            metadata = {"needed_blocks": str(error.needed_blocks), "num_blocks": str(error.num_blocks)}
            raise StepwireError("PROMPT_TOO_LONG", str(error), metadata) from None
        except QueueFull as error:
            raise queue_full(error) from None
        except DuplicateRequest as error:
            raise already_exists(error) from None
        live.num_live = len(sequences)
        live.loop = self
        self.live.add(live)
        for sequence in sequences:
            text = live.continued.texts.get(sequence.index)
            if text is None:
                finder = None if live.stops is None else StopFinder(live.stops, live.min_tokens)
                text = self._detokenizer.sequence(live.request.prompt_token_ids), finder
            self._texts[sequence] = SequenceText(sequence, *text)
        self._wake.set()

    def end(self, live: LiveRequest, error: StepwireError | None = None) -> None:
        """Ends a request from outside; its blocks are free with the next step. Harmless when it has ended."""
        if live.is_closed:
            return
        reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        for event in self._scheduler.end_request(live.request.request_id, reason):
            self._texts.pop(event.sequence, None)
        self._close_request(live, error)

    def end_all(self, error: StepwireError) -> None:
        """Ends every request with an error."""
        for live in self.live:
            self.end(live, error)

    def take_result(self, result: StepResult) -> None:
        """Takes what a worker answered to the oldest step in flight."""
        self._results.append(result)
        self._wake.set()

    # Requests that go to another loop.

    async def settle(self) -> None:
        """Delivers everything that was answered so far."""
        self._apply_results()
        self._submit_work()
        await self._pipeline.flush()

    def withdraw(self, leaving: Sequence[LiveRequest]) -> list["Withdrawn"]:
        """Gives up requests that `can_move`; nothing of them is planned here any more."""
        for live in leaving:
            self.live.remove(live)
        withdrawn = self._scheduler.withdraw(live.request.request_id for live in leaving)
        self._wake.set()
        return [Withdrawn(sequences, [self._texts.pop(each) for each in sequences]) for sequences in withdrawn]

    def can_move(self, live: LiveRequest) -> bool:
        """Whether a request may leave, and none of its sequences waits for its last text to be made."""
        sequences = self._scheduler.sequences_of(live.request.request_id)
        return len(sequences) == live.num_live and all(sequence in self._texts for sequence in sequences)

    def can_adopt(self, live: LiveRequest) -> bool:
        """Whether it may come here: no other one has its id, and it fits the KV cache."""
        return self.live.get(live.request.request_id) is None and self._scheduler.fits(live.request)

    def adopt(self, live: LiveRequest, withdrawn: "Withdrawn") -> None:
        """Goes on with a request that another loop gave up, where it was."""
        self._scheduler.adopt(withdrawn.sequences)
        self.live.add(live)
        self._texts.update(zip(withdrawn.sequences, withdrawn.texts, strict=True))
        self._wake.set()

    # Epochs.

    def pause(self) -> None:
        """Plans no more steps: an epoch has ended. Ends, deadlines and new requests are seen to meanwhile."""
        self._is_paused = True

    def resume(self, *, follows_fault: bool) -> None:
        """Goes on in a new epoch: what ran comes back, with what was delivered, and steps count from 1 again."""
        self._apply_results()
        for event in self._scheduler.end_epoch(by_fault=follows_fault):
            if (text := self._texts.pop(event.sequence, None)) is not None:
                self._work.append((text, ends_workers(event.sequence.request.request_id)))
        self._is_paused = False
        self._wake.set()

    # Sleep.

    async def quiesce(self, *, preempt: bool) -> None:
        """Returns when no sequence runs and no step is in flight: those that run end, or are preempted. What waits,
        and comes, waits until `release`. One at a time; when it is cancelled everything goes on."""
        self._scheduler.hold(preempt=preempt)
        self._wake.set()
        self._quiet = quiet = asyncio.get_running_loop().create_future()
        try:
            await quiet
        except BaseException:
            self.release()
            raise
        finally:
            self._quiet = None

    def release(self) -> None:
        """Goes on after `quiesce`."""
        self._scheduler.release()
        self._wake.set()

    def forget_content(self) -> None:
        """What the prefix cache finds is gone. Only between `quiesce` and `release`."""
        self._scheduler.forget_content()

    # The loop.

    async def _run_guarded(self) -> None:
        try:
            while True:
                await self._turn()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("step_loop_failed")
            self._on_defect(error)

    async def _turn(self) -> None:
        """Once round: take what has come, send what can be sent, then sleep until something happens."""
        self._wake.clear()
        self._beat_at = time.monotonic()
        self._apply_results()
        self._note_events(self._scheduler.expire())
        while not self._is_paused and (plan := self._scheduler.schedule()) is not None:
            self._note_plan(plan)
            await self._sink.send(plan)
        self._submit_work()
        if self._quiet is not None and self._scheduler.is_quiet and not self._quiet.done():
            self._quiet.set_result(None)
        self._set_timer()
        await self._wake.wait()

    def _apply_results(self) -> None:
        while self._results:
            self._note_events(self._scheduler.apply(self._results.popleft()))

    def _submit_work(self) -> None:
        if self._work:
            self._pipeline.submit(self._work)
            self._work = []

    def _set_timer(self) -> None:
        """Wakes the loop at the next deadline, or in half a second as a sign of life."""
        deadline = self._scheduler.next_deadline()
        now = time.monotonic()
        delay_s = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - now) + 0.001)
        if self._timer_at is not None and now < self._timer_at <= now + delay_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = now + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        # Not told by the time: the clock of an event loop may be a millisecond behind, and its timers as early.
        self._timer_at = None
        self._wake.set()

    def _note_plan(self, plan: StepPlan) -> None:
        """Writes down who starts, resumes and is preempted with a step."""
        for new in plan.new_sequences:
            live = self.live.get(new.sequence.request.request_id)
            if live is None:
                continue
            sequence = new.sequence
            is_first = live.first_step_at is None
            if is_first:
                live.first_step_at = time.monotonic()
                live.num_cached_tokens = sequence.cached
            is_resumed = live.trace.placed(sequence.index, plan.step_id, sequence.cached if is_first else 0)
            live.awaits_token = live.awaits_token or is_resumed
        if plan.preempted_sequence_ids:
            self._note_preempted(frozenset(plan.preempted_sequence_ids))

    def _note_preempted(self, sequence_ids: frozenset[int]) -> None:
        for sequence in self._texts:
            if sequence.sequence_id in sequence_ids:
                live = self.live.get(sequence.request.request_id)
                assert live is not None  # it has a sequence whose text is wanted
                live.trace.preempted(sequence.index)

    def _note_events(self, events: Iterable[TokenEvent | PromptEvent | EndEvent]) -> None:
        """Puts what an answer holds for clients behind what is to be made into text."""
        texts = self._texts
        for event in events:
            if isinstance(event, TokenEvent):
                text = texts.get(event.sequence)
                if text is None:
                    continue
                if event.finish_reason is not None:
                    del texts[event.sequence]
                self._work.append((text, event))
            elif isinstance(event, PromptEvent):
                if event.sequence in texts:
                    self._work.append((texts[event.sequence], event.logprobs))
            elif (text := texts.pop(event.sequence, None)) is not None:
                self._work.append((text, end_error(event)))

    # What comes back as text.

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        now = time.monotonic()
        for text, item in deliveries:
            live = self.live.get(text.sequence.request.request_id)
            if live is None or live.request is not text.sequence.request:
                continue
            if isinstance(item, Output):
                if live.awaits_token:
                    live.awaits_token = False
                    live.trace.token_came(is_first=live.first_token_at is None)
                    live.first_token_at = live.first_token_at or now
                live.num_output_tokens += 1
                if live.best_of is not None:
                    self._hold_back(live, live.best_of, text.sequence, item)
                    continue
                live.stream.put(item)
                if live.stream.is_overfull:
                    self.end(live, too_slow(live))
                elif item.finish_reason is not None:
                    self._end_sequence(live, text.sequence, item)
            elif isinstance(item, PromptLogprobs):
                live.stream.put_prompt_logprobs(item)
                if live.stream.is_overfull:
                    self.end(live, too_slow(live))
            else:
                self.end(live, item)

    def _end_sequence(self, live: LiveRequest, sequence: SchedulerSequence, last: Output) -> None:
        if last.stop is not None:
            self._drop_sequence(sequence)
        live.finish_reasons[sequence.index] = last.finish_reason or FinishReason.STOP
        self._count_end(live, sequence)

    def _hold_back(self, live: LiveRequest, best_of: BestOf, sequence: SchedulerSequence, output: Output) -> None:
        """Keeps what a sequence brought until it is known which are the best; ends the sequence when it cannot win."""
        is_beaten = best_of.take(output)
        if is_beaten:
            self._drop_sequence(sequence)
            self._count_end(live, sequence)
        elif output.finish_reason is not None:
            self._end_sequence(live, sequence, output)

    def _drop_sequence(self, sequence: SchedulerSequence) -> None:
        """Ends one sequence that needs no more tokens."""
        self._texts.pop(sequence, None)
        self._scheduler.end_sequence(sequence.sequence_id, FinishReason.STOP)
        self._wake.set()

    def _count_end(self, live: LiveRequest, sequence: SchedulerSequence) -> None:
        live.trace.sequence_ended(sequence.index)
        live.num_live -= 1
        if live.num_live:
            return
        if live.best_of is not None:
            for output in live.best_of.best():
                live.stream.put(output)
        live.trace.delivered()
        self._close_request(live, None)

    def _close_request(self, live: LiveRequest, error: StepwireError | None) -> None:
        live.is_closed = True
        live.stream.end(error)
        self.live.remove(live)
        self._wake.set()
