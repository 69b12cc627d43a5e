"""The restart budget; what recovery does with real streams is in tests/contract/test_recovery.py."""

import pytest

from scheduler_service.engine.recovery import RestartBudget


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_so_many_epochs_in_a_row_may_end_without_a_step(limit: int) -> None:
    budget = RestartBudget(limit)
    assert all(budget.count(0, 0.0) for _ in range(limit))
    assert not budget.count(0, 0.0)


@pytest.mark.parametrize(("num_results", "ready_s"), [(1, 0.0), (0, 60.0)])
def test_an_epoch_with_a_step_or_one_that_stood_long_makes_it_whole(num_results: int, ready_s: float) -> None:
    budget = RestartBudget(1)
    for _ in range(5):
        assert budget.count(0, 1.0)
        assert budget.count(num_results, ready_s)
