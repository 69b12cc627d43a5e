"""What several models may use of the devices that they share: more than there is of one is refused."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stepwire.rpc.errors import StepwireError

# Fractions such as 0.1 are no binary numbers.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Share:
    """What the worker at `address` may use of a device for a model: `part` of its memory, above 0, at most 1.

    `device` says in words which device it is, alike for all who share it; `setting` says where the part comes from.
    """

    model: str
    address: str
    device: str
    part: float
    setting: str


def check_shares(shares: Iterable[Share]) -> None:
    """Raises OUT_OF_MEMORY for a device of which two or more models may together use more than there is."""
    by_device: defaultdict[str, dict[str, list[Share]]] = defaultdict(dict)
    for share in shares:
        by_device[share.device].setdefault(share.model, []).append(share)
    for device, by_model in by_device.items():
        total = sum(share.part for of_model in by_model.values() for share in of_model)
        if len(by_model) < 2 or total <= 1 + _TOLERANCE:
            continue
        held = ", ".join(_held(model, of_model) for model, of_model in sorted(by_model.items()))
        remedy = "lower memory_fraction, or memory_limit_bytes, of one or more, so that they come to at most 1"
        raise StepwireError(
            "OUT_OF_MEMORY",
            f"the models on {device} may use {total:.2f} of its memory: {held}; {remedy}",
            {"device": device, "found": held, "expected": "at most 1.00 together", "remedy": remedy},
        )


def _held(model: str, shares: list[Share]) -> str:
    part = sum(share.part for share in shares)
    workers = f" on {len(shares)} workers" if len(shares) > 1 else ""
    return f"{model} {part:.2f} ({', '.join(dict.fromkeys(share.setting for share in shares))}{workers})"


class Shares:
    """The shares of all workers that serve now. On the event loop."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}

    def take(self, share: Share) -> None:
        """Notes what a worker may use, in place of what it was before. Raises OUT_OF_MEMORY, and then notes nothing."""
        shares = {**self._shares, share.address: share}
        check_shares(each for each in shares.values() if each.device == share.device)
        self._shares = shares

    def forget(self, addresses: Iterable[str]) -> None:
        """These workers serve no more."""
        for address in addresses:
            self._shares.pop(address, None)
