"""What several models may use of the devices that they share."""

import re

import pytest

from scheduler_service.engine.shares import Share, Shares, check_shares
from stepwire.rpc.errors import StepwireError


def share(model: str, part: float, *, device: str = "cuda:0 of here", address: str = "", setting: str = "s") -> Share:
    return Share(model, address or f"{model}:1", device, part, setting)


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [share("a", 0.3), share("b", 0.7)],
        [share("a", 0.1), share("b", 0.2), share("c", 0.7)],
        [share("a", 0.9), share("b", 0.9, device="cuda:1 of here")],
        # One model alone is its workers' own business.
        [share("a", 0.9, address="x:1"), share("a", 0.9, address="x:2")],
    ],
)
def test_what_fits_is_taken(shares: list[Share]) -> None:
    check_shares(shares)


def test_too_much_is_one_error_that_names_who_holds_what_and_what_to_change() -> None:
    shares = [
        share("b", 0.5, setting="memory_fraction 0.5"),
        share("a", 0.3, address="x:1", setting="memory_fraction 0.6"),
        share("a", 0.3, address="x:2", setting="memory_fraction 0.6"),
    ]
    with pytest.raises(StepwireError) as caught:
        check_shares([*shares, share("c", 0.9, device="cuda:1 of here")])
    assert caught.value.reason == "OUT_OF_MEMORY"
    expected = (
        "the models on cuda:0 of here may use 1.10 of its memory: a 0.60 (memory_fraction 0.6 on 2 workers), "
        "b 0.50 (memory_fraction 0.5); lower memory_fraction"
    )
    assert re.match(re.escape(expected), caught.value.message), caught.value.message
    assert caught.value.metadata["device"] == "cuda:0 of here"


def test_a_worker_that_is_refused_is_not_counted_and_one_that_went_is_free() -> None:
    shares = Shares()
    shares.take(share("a", 0.6))
    shares.take(share("a", 0.7))  # the same worker, anew
    for _ in range(2):
        with pytest.raises(StepwireError):
            shares.take(share("b", 0.4))
    shares.forget(["a:1", "unknown:1"])
    shares.take(share("b", 0.4))
