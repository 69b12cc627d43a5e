from collections.abc import Callable

import pytest

from scheduler_service.engine.tenants import TenantRules, parse_priorities, parse_weights
from stepwire.rpc.errors import StepwireError


def test_a_tenant_may_ask_up_to_its_own_highest_priority() -> None:
    rules = TenantRules(max_priorities={"gold": 10}, max_priority=0)
    rules.check("gold", 10)
    rules.check("other", 0)
    rules.check("", -100)


@pytest.mark.parametrize(("tenant", "priority"), [("gold", 11), ("other", 1), ("", 1), ("gold", -101)])
def test_more_is_refused_by_name(tenant: str, priority: int) -> None:
    rules = TenantRules(max_priorities={"gold": 10}, max_priority=0)
    with pytest.raises(StepwireError) as caught:
        rules.check(tenant, priority)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    assert caught.value.metadata["tenant"] == tenant
    assert caught.value.metadata["value"] == str(priority)


def test_who_names_no_tenant_is_told_of_none() -> None:
    with pytest.raises(StepwireError, match="priority is 101; allowed: -100 to 100"):
        TenantRules().check("", 101)


@pytest.mark.parametrize("tenant", ["a b", "x" * 65, "é", "\x00"])
def test_a_name_is_short_printable_ascii(tenant: str) -> None:
    with pytest.raises(StepwireError) as caught:
        TenantRules().check(tenant, 0)
    assert caught.value.reason == "FIELD_INVALID"


def test_settings_are_read_as_name_and_value() -> None:
    assert parse_weights(["gold=4", "a=b=0.5"]) == {"gold": 4.0, "a=b": 0.5}
    assert parse_priorities(["gold=100", "free=-1"]) == {"gold": 100, "free": -1}


@pytest.mark.parametrize("entry", ["gold", "=1", "gold=0", "gold=-1", "gold=nan", "gold=inf", "gold=x"])
def test_weights_that_mean_nothing_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_weights([entry])


@pytest.mark.parametrize("parse", [parse_weights, parse_priorities])
def test_a_tenant_that_is_named_twice_is_refused(parse: Callable[[list[str]], object]) -> None:
    with pytest.raises(ValueError, match="gold is named twice"):
        parse(["gold=1", "free=1", "gold=2"])


@pytest.mark.parametrize("entry", ["gold", "gold=101", "gold=-101", "gold=1.5"])
def test_priorities_out_of_bounds_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_priorities([entry])
