"""What each tenant has had: virtual token counters, for a fair share of the device.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024):
the tenant that has been served least, by weight, goes next; one that comes back from idleness is
lifted to the least of those that were busy, so that idleness saves nothing up.
"""

from collections import OrderedDict
from collections.abc import Mapping

_MAX_IDLE_TENANTS = 10_000


class TenantLedger:
    """Tokens served to each tenant, divided by its weight (1 unless configured).

    A tenant is busy while it has live sequences. Counts of idle tenants are kept for their return,
    the last 10,000 of them.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()

    @property
    def is_contested(self) -> bool:
        """Whether more than one tenant is busy, so that counting matters."""
        return len(self._served) > 1

    def served(self, tenant: str) -> float:
        """What a busy tenant has had."""
        return self._served[tenant]

    def enter(self, tenant: str, num_sequences: int) -> None:
        """Sequences of a tenant were accepted."""
        if tenant not in self._served:
            least = min(self._served.values(), default=0.0)
            self._served[tenant] = max(self._idle.pop(tenant, 0.0), least)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + num_sequences

    def leave(self, tenant: str) -> None:
        """A sequence of a tenant has ended."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant] == 0:
            del self._num_live[tenant]
            self._idle[tenant] = self._served.pop(tenant)
            if len(self._idle) > _MAX_IDLE_TENANTS:
                self._idle.popitem(last=False)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens computed for a busy tenant."""
        self._served[tenant] += num_tokens / self._weights.get(tenant, 1.0)
