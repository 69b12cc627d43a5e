"""The rules of epochs and phases."""

import pytest

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.state import Cached, Loaded, Place, Warm, WorkerState
from worker_service.runtime.report import LoadSummary, Phase

SUMMARY = LoadSummary("f", "a", 1, "float32", 1, 1, 1, False, 1)


def ready() -> WorkerState:
    return WorkerState(
        phase=Phase.READY,
        epoch=4,
        scheduler_id="s",
        loaded=Loaded("auto", "none", "auto", SUMMARY),
        cached=Cached(1, 16, 64, 1),
        warm=Warm(8, 2),
    )


def test_a_greater_epoch_is_new_and_an_equal_one_of_its_owner_a_repeat() -> None:
    state = ready()
    assert state.is_new_epoch(5, "anyone")
    assert not state.is_new_epoch(4, "s")
    assert state.epoch == 4


@pytest.mark.parametrize(("epoch", "scheduler_id"), [(3, "s"), (4, "other")])
def test_an_older_epoch_or_another_owner_is_stale(epoch: int, scheduler_id: str) -> None:
    with pytest.raises(StepwireError) as caught:
        ready().is_new_epoch(epoch, scheduler_id)
    assert caught.value.reason == "STALE_EPOCH"
    assert caught.value.metadata == {"held": "4", "got": str(epoch), "held_by": "s"}


@pytest.mark.parametrize(("epoch", "scheduler_id"), [(0, "s"), (-4, "s"), (9, ""), (9, "x" * 300)])
def test_epochs_that_cannot_be(epoch: int, scheduler_id: str) -> None:
    with pytest.raises(StepwireError, match=r"epoch|scheduler_id"):
        ready().is_new_epoch(epoch, scheduler_id)


@pytest.mark.parametrize(
    ("phase", "kept"),
    [
        (Phase.READY, {"loaded", "cached", "warm"}),
        (Phase.CACHED, {"loaded", "cached", "warm"}),
        (Phase.LOADED, {"loaded"}),
        (Phase.INITIALISED, set()),
    ],
)
def test_dropping_forgets_what_is_no_longer_true(phase: Phase, kept: set[str]) -> None:
    state = ready()
    state.drop_to(phase)
    assert state.phase is phase
    assert {name for name in ("loaded", "cached", "warm") if getattr(state, name) is not None} == kept


def test_wrong_phase_says_how_to_get_there() -> None:
    state = ready()
    state.require_phase("ExecuteModel", Phase.READY)
    with pytest.raises(StepwireError) as caught:
        state.require_phase("LoadModel", Phase.INITIALISED)
    assert caught.value.metadata["remedy"] == "take the worker there with Reset to PHASE_INITIALISED"
    with pytest.raises(StepwireError, match="call LoadModel first"):
        WorkerState(phase=Phase.INITIALISED).require_phase("WarmUp", Phase.CACHED)


def test_rank_counts_tensor_ranks_first() -> None:
    assert [Place(t, 2, p, 2).rank for p in (0, 1) for t in (0, 1)] == [0, 1, 2, 3]
