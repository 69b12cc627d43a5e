"""Where every live sequence stands, and its ways from one place to another.

A sequence waits in the queue, is held back for a sibling, runs and holds blocks, or drains: it was preempted, and
answers to it are in flight. Nothing here decides who goes where.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_blocks import BlockManager
from scheduler_service.core.live import LiveSequences
from scheduler_service.core.plan import StepPlan
from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.request import FinishReason, Request, Sequence, SequenceState
from scheduler_service.core.speculation import check_possible
from scheduler_service.core.stats import SchedulerStats
from scheduler_service.core.tenants import TenantLedger


def _running_order(sequence: Sequence) -> tuple[int, float, int]:
    return (-sequence.request.priority, sequence.arrival, sequence.sequence_id)


class Roster:
    """The places of sequences, what they hold there, and the steps in flight that name them.

    `running` is in order of importance. `queued_tokens` are those of sequences that wait or are held back.
    `finished_ids` and `preempted_ids` are what workers have yet to be told. `on_departure` is called with each
    request that has lost its last sequence.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float], on_departure: Callable[[str], None]
    ) -> None:
        self.stats = SchedulerStats()
        self.blocks = BlockManager(config)
        self.tenants = TenantLedger(config.tenant_weights)
        self.live = LiveSequences()
        self.waiting = WaitingQueue(self.tenants, config.ageing_s)
        self.running: list[Sequence] = []
        self.draining: list[Sequence] = []
        self.in_flight: deque[StepPlan] = deque()
        self.next_step_id = 1
        self.queued_tokens = 0
        self.finished_ids: list[int] = []
        self.preempted_ids: list[int] = []
        self._clock = clock
        self._on_departure = on_departure

    @property
    def oldest_step_id(self) -> int:
        """The oldest step in flight, or the next one where there is none."""
        return self.in_flight[0].step_id if self.in_flight else self.next_step_id

    @property
    def is_quiet(self) -> bool:
        """Whether no sequence runs, no step is in flight, and the workers have been told so."""
        return not (self.running or self.in_flight or self.finished_ids or self.preempted_ids)

    def enter(self, request: Request) -> list[Sequence]:
        """Makes the sequences of a request: the first waits, its siblings are held back for it where they share."""
        arrival = self._clock()
        sequences = self.live.add(request, arrival, self.blocks.key_chain)
        self.queued_tokens += sum(len(sequence.token_ids) for sequence in sequences)
        self.tenants.enter(request.tenant, len(sequences))
        self.waiting.push(sequences[0], arrival)
        if self.blocks.num_leading_tokens(request) == 0:
            self.release_siblings(sequences[0])
        return sequences

    def adopt(self, sequences: list[Sequence]) -> None:
        """Lets the live sequences of a request wait that another roster has given up."""
        self.live.adopt(sequences)
        self.tenants.enter(sequences[0].request.tenant, len(sequences))
        for sequence in sequences:
            self.enqueue(sequence)

    def give_up(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out for another roster to adopt; answers in flight to them are ignored."""
        for sequence in sequences:
            sequence.num_preemptions += sequence.state is not SequenceState.WAITING
            self.take_out(sequence, publish_tokens=len(sequence.token_ids) - 1)
            sequence.pending = sequence.possible = 0
        # What it remembers of them must not be taken for theirs where they will wait.
        self.waiting.forget_departed()

    def enqueue(self, sequence: Sequence) -> None:
        """Lets a sequence wait again that has run before."""
        self.waiting.push(sequence, self._clock())
        self.queued_tokens += len(sequence.token_ids)

    def start(self, sequence: Sequence, hits: list[int]) -> None:
        """Makes the next waiting sequence run, from the prefix that is cached."""
        self.waiting.pop()
        self.queued_tokens -= len(sequence.token_ids)
        sequence.token_ids = list(sequence.token_ids)
        sequence.state = SequenceState.RUNNING
        self.blocks.start(sequence, hits)
        if sequence.num_preemptions == 0:
            sequence.cached = min(sequence.computed, sequence.prompt_token_count)
        self.stats.count_prefix(len(sequence.token_ids), sequence.computed)
        self.tenants.charge(sequence.request.tenant, len(sequence.token_ids) - sequence.computed)
        insort(self.running, sequence, key=_running_order)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it waits again once its answers in flight have come."""
        self.stats.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.protected_until = 2 * sequence.computed
        sequence.state = SequenceState.PREEMPTED
        self.running.remove(sequence)
        self.blocks.release(sequence)
        self.preempted_ids.append(sequence.sequence_id)
        self.draining.append(sequence)
        self.requeue_drained()

    def requeue_drained(self) -> None:
        """Lets the preempted sequences wait again that are in no step in flight."""
        if not self.draining:
            return
        oldest = self.oldest_step_id
        drained = [sequence for sequence in self.draining if sequence.last_step < oldest]
        self.draining = [sequence for sequence in self.draining if sequence.last_step >= oldest]
        for sequence in drained:
            self.enqueue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a live sequence; its blocks are free from now on."""
        # The last token's own KV may never be written: of a stop token it is not.
        self.take_out(sequence, publish_tokens=0 if reason is FinishReason.ERROR else len(sequence.token_ids) - 1)
        sequence.finish_reason = reason

    def take_out(self, sequence: Sequence, *, publish_tokens: int) -> None:
        """Takes a live sequence out of wherever it stands, its blocks from it, and lets its siblings go on."""
        state, sequence.state = sequence.state, SequenceState.FINISHED
        if state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.blocks.release(sequence, publish_tokens=publish_tokens)
            self.finished_ids.append(sequence.sequence_id)
        elif state is SequenceState.PREEMPTED:
            self.draining.remove(sequence)
        else:
            self.queued_tokens -= len(sequence.token_ids)
            if not self.live.drop_held_back(sequence):
                self.waiting.note_departure()
        self.live.remove(sequence)
        if sequence.request.request_id not in self.live:
            self._on_departure(sequence.request.request_id)
        self.tenants.leave(sequence.request.tenant)
        self.release_siblings(sequence)

    def release_siblings(self, leader: Sequence) -> None:
        """Lets the siblings of a leader wait in the queue: what they share is computed, or never will be."""
        for sibling in self.live.take_held_back(leader):
            self.waiting.push(sibling, self._clock())

    def restart(self, sequence: Sequence, num_good_tokens: int) -> None:
        """Preempts a sequence that computed over spoiled blocks; its answers in flight are void.

        A new id makes them void: answers to unknown ids are ignored. What the sequence published
        itself rests on the spoiled blocks and goes too.
        """
        self.blocks.unpublish(sequence, num_good_tokens)
        if sequence.state is SequenceState.RUNNING:
            self.preempt(sequence)
        if sequence.state is not SequenceState.PREEMPTED:
            return
        self.live.renew_id(sequence)
        sequence.pending = sequence.possible = 0
        self.draining.remove(sequence)
        self.enqueue(sequence)

    def forget_epoch(self) -> None:
        """Forgets every step in flight and all KV: the running and draining sequences wait again."""
        self.in_flight.clear()
        self.finished_ids.clear()
        self.preempted_ids.clear()
        self.next_step_id = 1
        for sequence in self.running:
            self.blocks.release(sequence)
            sequence.num_preemptions += 1
        again, self.running, self.draining = self.running + self.draining, [], []
        for sequence in again:
            sequence.pending = sequence.possible = 0
            self.enqueue(sequence)
        self.blocks.forget_content()

    def check_integrity(self) -> None:
        """Raises RuntimeError when blocks leak, are held twice, or a sequence stands in two places."""
        self.blocks.check_integrity(self.running)
        places = [*self.running, *self.draining, *self.waiting]
        self.live.check_integrity(places)
        check_possible(self.in_flight, places)
        held_back = [sequence for siblings in self.live.held_back.values() for sequence in siblings]
        if self.queued_tokens != sum(len(s.token_ids) for s in [*self.waiting, *held_back]):
            raise RuntimeError("queued tokens are counted wrong")
        if len(self.waiting) != sum(1 for _ in self.waiting):
            raise RuntimeError("waiting sequences are counted wrong")
        if any(s.block_ids for s in places if s.state is not SequenceState.RUNNING):
            raise RuntimeError("a sequence that does not run holds blocks")
