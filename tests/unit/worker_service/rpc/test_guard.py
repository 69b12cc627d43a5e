"""The guard against a model of it: any mixture of calls keeps each step executed once and in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.guard import StepGuard, Verdict

NUM_KEPT = 4
EPOCH = 5


class GuardMachine(RuleBasedStateMachine):
    """A scheduler and a worker that do anything; the model is the list of executed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.guard: StepGuard[str] = StepGuard(EPOCH, num_kept=NUM_KEPT)
        self.executed: list[int] = []
        self.in_flight: list[int] = []
        self.failed = False

    @rule(step_id=st.integers(-3, 25), epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1, EPOCH + 1]))
    def send(self, step_id: int, epoch: int) -> None:
        last = len(self.executed) + len(self.in_flight)
        kept = self.executed[-NUM_KEPT:]
        try:
            verdict = self.guard.check(epoch, step_id)
        except StepwireError as error:
            if epoch != EPOCH:
                assert error.reason == "STALE_EPOCH"
                assert error.metadata == {"held": str(EPOCH), "got": str(epoch)}
            elif self.failed:
                assert error.reason == "WORKER_FAILED"
            else:
                assert error.reason == "STEP_OUT_OF_ORDER"
                assert step_id != last + 1 and step_id not in kept and step_id not in self.in_flight
                assert error.metadata["got"] == str(step_id)
                assert error.metadata["last_executed"] == str(len(self.executed))
                assert error.metadata["expected"] == str(last + 1)
            return
        assert epoch == EPOCH and not self.failed
        if verdict is Verdict.EXECUTE:
            assert step_id == last + 1
            self.guard.accept(step_id)
            self.in_flight.append(step_id)
        else:
            assert step_id in kept or step_id in self.in_flight
            assert self.guard.stored(step_id) == (f"result {step_id}" if step_id in kept else None)

    @rule()
    def complete(self) -> None:
        if self.in_flight:
            step_id = self.in_flight.pop(0)
            self.guard.complete(step_id, f"result {step_id}")
            self.executed.append(step_id)

    @rule()
    def refuse(self) -> None:
        self.in_flight.clear()
        self.guard.roll_back()

    @rule(really=st.integers(0, 9))
    def fail(self, really: int) -> None:
        if really == 0:
            self.in_flight.clear()
            self.guard.fail(StepwireError("WORKER_FAILED", "it broke"))
            self.failed = True

    @rule(last_step_id=st.integers(-2, 25))
    def open(self, last_step_id: int) -> None:
        gone = len(self.executed) - NUM_KEPT
        is_possible = not self.failed and max(0, gone) <= last_step_id <= len(self.executed)
        try:
            self.guard.check_open(EPOCH, last_step_id)
        except StepwireError:
            assert not is_possible
        else:
            assert is_possible

    @invariant()
    def executed_each_once_and_in_order(self) -> None:
        assert self.executed == list(range(1, len(self.executed) + 1))
        assert self.guard.last_executed == len(self.executed)
        assert self.guard.last_accepted == len(self.executed) + len(self.in_flight)


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_keeps_at_least_four_results() -> None:
    with pytest.raises(ValueError, match="4 steps"):
        StepGuard(1, num_kept=3)


def test_misuse_is_an_error_and_not_a_hole() -> None:
    guard: StepGuard[str] = StepGuard(1)
    with pytest.raises(ValueError, match="accepted after 0"):
        guard.accept(2)
    with pytest.raises(ValueError, match="completed after 0"):
        guard.complete(1, "early")
    guard.accept(1)
    with pytest.raises(ValueError, match="completed after 0"):
        guard.complete(2, "late")


def test_the_first_failure_stays() -> None:
    guard: StepGuard[str] = StepGuard(1)
    guard.fail(StepwireError("OUT_OF_MEMORY", "first"))
    guard.fail(StepwireError("WORKER_FAILED", "second"))
    for _ in range(2):
        with pytest.raises(StepwireError, match="first"):
            guard.check(1, 1)
    with pytest.raises(StepwireError, match="first"):
        guard.check_open(1, 0)
