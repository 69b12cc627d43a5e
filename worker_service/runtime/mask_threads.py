"""Threads that compute token masks beside the forward pass. Imports no torch.

Computing a mask cannot be interrupted, so whoever waits for it stops waiting once it has cost too much: the sequence
fails, and the thread is replaced, and ends when it is done.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from stepwire.grammars import MaskBudget, error_text
from worker_service.runtime.step import Failure

Words = NDArray[np.uint32]
IntArray = NDArray[np.int64]

FEW = 256
"""Within JSON most places allow fewer tokens than this: then nobody need look at the others."""

_LOOK_EVERY_S = 0.01


@dataclass(slots=True, eq=False)
class GrammarState:
    """One sequence's place in its grammar: what of its output was consumed, and what its masks may still cost.

    `prototype` is the grammar at its start, which others share; `matcher` is this sequence's own, made when needed.
    """

    prototype: LLMatcher
    num_consumed: int = 0
    matcher: LLMatcher | None = None
    budget: MaskBudget = field(default_factory=MaskBudget)


@dataclass(slots=True, eq=False)
class MaskJob:
    """Consumes `token_ids`, then fills `words` with one bit for each token that may come next. `error` says why not.

    Where one of the model's end tokens may come any of them may: the bits `ends`. `few` are the ids of the tokens that
    may come, when there are at most FEW.
    """

    state: GrammarState
    token_ids: list[int]
    words: Words
    ends: Words
    few: IntArray | None = None
    error: Failure | None = None
    is_abandoned: bool = False
    _clock: int | None = None
    _began_s: float = 0.0

    def run(self) -> None:
        """Runs on a thread of its own."""
        state = self.state
        clock = _thread_clock()
        self._began_s, self._clock = time.clock_gettime(clock), clock
        try:
            self.error = self._fill(state)
        except BaseException as defect:  # a panic of the library is no Exception
            self.error = Failure(f"the grammar library failed: {defect}")
        state.budget.spend(time.clock_gettime(clock) - self._began_s)
        if self.error is None and state.budget.left_s < 0:
            self.error = _too_slow(state.budget.num_masks)

    def is_overdue(self) -> bool:
        """Whether it has begun, and takes longer than it may."""
        if self._clock is None:
            return False
        with contextlib.suppress(OSError):  # its thread has just ended
            return time.clock_gettime(self._clock) - self._began_s > self.state.budget.left_s
        return False

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.is_abandoned = True
        self.error = _too_slow(self.state.budget.num_masks + 1)

    def _fill(self, state: GrammarState) -> Failure | None:
        matcher = state.matcher
        if matcher is None:
            matcher = state.matcher = state.prototype.deep_copy()
        if self.token_ids and not matcher.consume_tokens(self.token_ids):
            return Failure(f"the grammar does not go on after its last token: {error_text(matcher)}", "GRAMMAR_INVALID")
        matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        if matcher.is_error():
            return Failure(f"the grammar's mask cannot be told: {error_text(matcher)}", "GRAMMAR_TOO_COMPLEX")
        if (self.words & self.ends).any():
            self.words |= self.ends
        if int(np.bitwise_count(self.words).sum()) <= FEW:
            self.few = set_bits(self.words)
        return None


def set_bits(words: Words) -> IntArray:
    """Which bits are set, rising; the lowest of each word comes first."""
    octets = words.astype("<u4", copy=False).view(np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


class MaskThreads:
    """Up to `num_threads` threads, started when they are needed first."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._num_started = 0
        self._jobs: queue.SimpleQueue[tuple[MaskJob, queue.SimpleQueue[MaskJob]] | None] = queue.SimpleQueue()

    def begin(self, jobs: Sequence[MaskJob]) -> "MaskBatch":
        """Begins to compute masks. Used by one thread."""
        done: queue.SimpleQueue[MaskJob] = queue.SimpleQueue()
        while self._num_started < min(self._num_threads, len(jobs)):
            self._start()
        for job in jobs:
            self._jobs.put((job, done))
        return MaskBatch(self, jobs, done)

    def replace_one(self) -> None:
        """Starts a thread in place of one that will end."""
        self._start()
        self._num_started -= 1

    def close(self) -> None:
        """Lets the threads end when they have done what there is."""
        for _ in range(self._num_started):
            self._jobs.put(None)
        self._num_started = 0

    def _start(self) -> None:
        # One that never returns must not keep a process alive that is to exit.
        threading.Thread(target=self._run, name="grammar masks", daemon=True).start()
        self._num_started += 1

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            job.run()
            done.put(job)
            if job.is_abandoned:
                return


@dataclass(frozen=True, slots=True)
class MaskBatch:
    """The masks of one step, on their way."""

    threads: MaskThreads
    jobs: Sequence[MaskJob]
    done: "queue.SimpleQueue[MaskJob]"

    def wait(self) -> None:
        """Returns when each job is done, or has taken longer than it may."""
        waiting = set(self.jobs)
        while waiting:
            try:
                waiting.discard(self.done.get(timeout=_LOOK_EVERY_S))
            except queue.Empty:
                for job in [job for job in waiting if job.is_overdue()]:
                    job.abandon()
                    waiting.discard(job)
                    self.threads.replace_one()


def _thread_clock() -> int:
    """The clock of this thread's CPU time, which other threads can read; the plain clock where there is none."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(threading.get_ident())
    return time.CLOCK_MONOTONIC


def _too_slow(num_masks: int) -> Failure:
    text = f"the grammar's masks took too long: {num_masks} of them more than what so many may take; make it simpler"
    return Failure(text, "GRAMMAR_TOO_COMPLEX")
