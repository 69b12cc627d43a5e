"""Which sequences may run at once, as far as their adapters decide: workers have few places for these."""

from collections.abc import Iterable

from scheduler_service.core.request import Sequence


def has_adapter_place(sequence: Sequence, running: Iterable[Sequence], limit: int | None) -> bool:
    """Whether the adapter of a sequence, if any, is in use by the `running` ones or has a place beside theirs."""
    adapter = sequence.request.adapter
    if not adapter or limit is None:
        return True
    in_use = {other.request.adapter for other in running if other.request.adapter}
    return adapter in in_use or len(in_use) < limit
