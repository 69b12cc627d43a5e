"""Limits that make no scheduler are refused."""

from dataclasses import FrozenInstanceError

import pytest

from scheduler_service.core.config import SchedulerConfig

LIMITS = {"num_blocks": 10, "block_size": 4, "max_running": 2, "max_step_tokens": 8}
OPTIONAL = ["max_in_flight", "max_queued_requests", "max_queued_tokens"]


def test_the_defaults_pipeline_and_bound_the_queue() -> None:
    config = SchedulerConfig(**LIMITS)
    assert config.prefix_caching
    assert (config.max_in_flight, config.max_queued_requests, config.max_queued_tokens) == (2, 1024, 1_000_000)


@pytest.mark.parametrize("name", [*LIMITS, *OPTIONAL])
@pytest.mark.parametrize("value", [0, -1])
def test_every_limit_is_at_least_one(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not {value}"):
        SchedulerConfig(**{**LIMITS, name: value})


def test_ones_are_enough() -> None:
    ones = dict.fromkeys([*LIMITS, *OPTIONAL], 1)
    assert SchedulerConfig(**ones, prefix_caching=False).max_running == 1


def test_a_step_must_hold_a_token_of_every_running_sequence() -> None:
    assert SchedulerConfig(10, 4, max_running=8, max_step_tokens=8).max_step_tokens == 8
    with pytest.raises(ValueError, match=r"max_step_tokens \(7\) must be at least max_running \(8\)"):
        SchedulerConfig(10, 4, max_running=8, max_step_tokens=7)


@pytest.mark.parametrize("ageing_s", [0.0, -1.0])
def test_ageing_takes_time(ageing_s: float) -> None:
    with pytest.raises(ValueError, match="ageing_s must be above 0"):
        SchedulerConfig(**LIMITS, ageing_s=ageing_s)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of tenant 'b' must be above 0"):
        SchedulerConfig(**LIMITS, tenant_weights={"a": 1.0, "b": weight})


def test_limits_do_not_change_under_way() -> None:
    with pytest.raises(FrozenInstanceError):
        SchedulerConfig(**LIMITS).num_blocks = 5  # type: ignore[misc]
