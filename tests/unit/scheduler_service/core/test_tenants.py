"""Tenants' counts: served tokens by weight, and no credit for idleness."""

import pytest

from scheduler_service.core.tenants import TenantLedger


def test_a_tenants_count_is_what_it_was_charged() -> None:
    ledger = TenantLedger({})
    ledger.enter("a", 2)
    ledger.charge("a", 10)
    ledger.charge("a", 5)
    assert ledger.served("a") == 15


def test_a_weight_divides_the_charge() -> None:
    ledger = TenantLedger({"heavy": 4.0})
    ledger.enter("heavy", 1)
    ledger.enter("plain", 1)
    ledger.charge("heavy", 20)
    ledger.charge("plain", 20)
    assert (ledger.served("heavy"), ledger.served("plain")) == (5.0, 20.0)


def test_counting_matters_only_when_two_are_busy() -> None:
    ledger = TenantLedger({})
    ledger.enter("a", 1)
    assert not ledger.is_contested
    ledger.enter("b", 1)
    assert ledger.is_contested
    ledger.leave("a")
    assert not ledger.is_contested


def test_a_tenant_is_busy_until_its_last_sequence_ends() -> None:
    ledger = TenantLedger({})
    ledger.enter("a", 2)
    ledger.enter("a", 1)
    ledger.charge("a", 7)
    ledger.leave("a")
    ledger.leave("a")
    assert ledger.served("a") == 7
    ledger.leave("a")
    with pytest.raises(KeyError):
        ledger.served("a")


def test_one_that_comes_back_is_lifted_to_the_least_of_the_busy() -> None:
    ledger = TenantLedger({})
    charges = {"a": 100, "b": 60, "idle": 5}
    for tenant in charges:
        ledger.enter(tenant, 1)
    for tenant, num in charges.items():
        ledger.charge(tenant, num)
    ledger.leave("idle")
    ledger.enter("idle", 1)
    assert ledger.served("idle") == 60
    ledger.enter("new", 1)
    assert ledger.served("new") == 60


def test_one_that_comes_back_keeps_what_it_has_had() -> None:
    ledger = TenantLedger({})
    ledger.enter("a", 1)
    ledger.enter("b", 1)
    ledger.charge("b", 30)
    ledger.leave("b")
    ledger.enter("b", 1)
    assert ledger.served("a") == 0
    assert ledger.served("b") == 30


def test_of_an_idle_tenant_only_its_count_is_kept() -> None:
    ledger = TenantLedger({})
    ledger.enter("a", 1)
    ledger.leave("a")
    assert (ledger._num_live, ledger._served, dict(ledger._idle)) == ({}, {}, {"a": 0.0})


def test_idle_tenants_are_not_kept_for_ever() -> None:
    ledger = TenantLedger({})
    for number in range(10_001):
        ledger.enter(str(number), 1)
        ledger.charge(str(number), 100)
        ledger.leave(str(number))
    assert len(ledger._idle) == 10_000
    ledger.enter("1", 1)
    assert ledger.served("1") == 100
    ledger.leave("1")
    ledger.enter("0", 1)
    assert ledger.served("0") == 0
