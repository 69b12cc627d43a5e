"""What keeps a worker from executing a step twice, late, or out of order."""

from collections import OrderedDict
from dataclasses import replace
from enum import Enum
from typing import Generic, TypeVar

from stepwire.rpc.errors import StepwireError

R = TypeVar("R")

NUM_KEPT_RESULTS = 16


class Verdict(Enum):
    """What to do with a step."""

    EXECUTE = "execute"
    REPEAT = "repeat"


class StepGuard(Generic[R]):
    """The order of the steps of one epoch.

    Steps are accepted in the order of their ids, without gaps, and completed in the same order;
    several may be accepted and not yet completed. The last results are kept, so a step that
    is sent again is answered and not executed. Knows nothing of streams, messages or devices.
    """

    def __init__(self, epoch: int, *, num_kept: int = NUM_KEPT_RESULTS) -> None:
        if num_kept < 4:
            raise ValueError(f"num_kept is {num_kept}; a scheduler may ask again for 4 steps")
        self.epoch = epoch
        self.last_accepted = 0
        self.last_executed = 0
        self._num_kept = num_kept
        self._results: OrderedDict[int, R] = OrderedDict()
        self._failure: StepwireError | None = None

    @property
    def oldest_kept(self) -> int:
        """The lowest step id whose result is kept; `last_executed + 1` for none."""
        return next(iter(self._results), self.last_executed + 1)

    def check_open(self, epoch: int, peer_last_step_id: int) -> None:
        """Whether a scheduler that holds results up to `peer_last_step_id` can go on from here. Changes nothing.

        Raises StepwireError STALE_EPOCH, or STEP_OUT_OF_ORDER when it holds a result that was
        never given or lacks one that is no longer kept, or the failure that ended the epoch.
        """
        self._check_epoch(epoch)
        self._check_failure()
        if peer_last_step_id < 0 or peer_last_step_id > self.last_executed:
            raise self._out_of_order(
                peer_last_step_id, f"the stream opens after step {peer_last_step_id}, which was not executed here"
            )
        if peer_last_step_id + 1 < self.oldest_kept:
            raise self._out_of_order(
                peer_last_step_id,
                f"the stream opens after step {peer_last_step_id}, but results before {self.oldest_kept} are gone",
            )

    def check(self, epoch: int, step_id: int) -> Verdict:
        """What to do with this step. Changes nothing.

        Raises StepwireError STALE_EPOCH, STEP_OUT_OF_ORDER for a gap or an id older than the
        kept results, or the failure that ended the epoch.
        """
        self._check_epoch(epoch)
        self._check_failure()
        if step_id == self.last_accepted + 1:
            return Verdict.EXECUTE
        if step_id > self.last_accepted:
            raise self._out_of_order(step_id, f"step {step_id} leaves a gap")
        if step_id < self.oldest_kept:
            raise self._out_of_order(step_id, f"step {step_id} is older than the results kept")
        return Verdict.REPEAT

    def accept(self, step_id: int) -> None:
        """Notes that this step, the next one, will be executed."""
        if step_id != self.last_accepted + 1:
            raise ValueError(f"step {step_id} accepted after {self.last_accepted}")
        self.last_accepted = step_id

    def complete(self, step_id: int, result: R) -> None:
        """Notes that this step, the next one accepted, was executed, and keeps its result."""
        if step_id != self.last_executed + 1 or step_id > self.last_accepted:
            raise ValueError(f"step {step_id} completed after {self.last_executed} of {self.last_accepted}")
        self.last_executed = step_id
        self._results[step_id] = result
        while len(self._results) > self._num_kept:
            self._results.popitem(last=False)

    def stored(self, step_id: int) -> R | None:
        """The result of an executed step, when it is kept."""
        return self._results.get(step_id)

    def roll_back(self) -> None:
        """Notes that no accepted step beyond the last executed one ran or will run."""
        self.last_accepted = self.last_executed

    def fail(self, failure: StepwireError) -> None:
        """Ends the epoch: a step broke off, so what the worker holds is not known. The first failure stays."""
        self.roll_back()
        if self._failure is None:
            self._failure = failure

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise stale_epoch(held=self.epoch, got=epoch)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise replace(self._failure)

    def _out_of_order(self, got: int, problem: str) -> StepwireError:
        held = f"last executed {self.last_executed}, next expected {self.last_accepted + 1}"
        return StepwireError(
            "STEP_OUT_OF_ORDER",
            f"{problem}; this worker holds: {held}",
            {
                "got": str(got),
                "last_executed": str(self.last_executed),
                "expected": str(self.last_accepted + 1),
                "oldest_kept": str(self.oldest_kept),
                "epoch": str(self.epoch),
            },
        )


def stale_epoch(*, held: int, got: int, scheduler_id: str | None = None) -> StepwireError:
    """The error of a call with another epoch than the worker's."""
    metadata = {"held": str(held), "got": str(got)}
    message = f"the worker is in epoch {held} and the call carries {got}"
    if scheduler_id is not None:
        metadata["held_by"] = scheduler_id
        message = f"{message}; a new epoch must be greater than {held}, which belongs to scheduler {scheduler_id!r}"
    return StepwireError("STALE_EPOCH", message, metadata)
