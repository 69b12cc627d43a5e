"""Who asks: each tenant's share of the device and the highest priority it may ask for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepwire.rpc.errors import StepwireError

MAX_TENANT = 64
LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100


@dataclass(frozen=True, slots=True)
class TenantRules:
    """What is configured of tenants; those that are not named have weight 1 and `max_priority`."""

    weights: Mapping[str, float] = field(default_factory=dict)
    max_priorities: Mapping[str, int] = field(default_factory=dict)
    max_priority: int = HIGHEST_PRIORITY

    def check(self, tenant: str, priority: int) -> None:
        """Raises StepwireError for a name that is none, or a priority that the tenant may not ask for."""
        if len(tenant) > MAX_TENANT or not all("!" <= character <= "~" for character in tenant):
            raise StepwireError(
                "FIELD_INVALID",
                f"the metadata stepwire-tenant may hold at most {MAX_TENANT} printable ASCII characters without spaces",
                {"field": "stepwire-tenant"},
            )
        highest = self.max_priorities.get(tenant, self.max_priority)
        if not LOWEST_PRIORITY <= priority <= highest:
            allowed, whose = f"{LOWEST_PRIORITY} to {highest}", f" for tenant {tenant!r}" if tenant else ""
            raise StepwireError(
                "FIELD_OUT_OF_RANGE",
                f"priority is {priority}; allowed{whose}: {allowed}",
                {"field": "priority", "value": str(priority), "allowed": allowed, "tenant": tenant},
            )


def parse_weights(entries: Sequence[str]) -> dict[str, float]:
    """Reads `NAME=WEIGHT` entries. Raises ValueError."""
    weights: dict[str, float] = {}
    for name, text in _pairs(entries):
        weights[name] = float(text)
        if not 0 < weights[name] < math.inf:
            raise ValueError(f"the weight of tenant {name!r} must be above 0, not {text}")
    return weights


def parse_priorities(entries: Sequence[str]) -> dict[str, int]:
    """Reads `NAME=PRIORITY` entries. Raises ValueError."""
    priorities: dict[str, int] = {}
    for name, text in _pairs(entries):
        priorities[name] = int(text)
        if not LOWEST_PRIORITY <= priorities[name] <= HIGHEST_PRIORITY:
            raise ValueError(
                f"the priority of tenant {name!r} must be {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}, not {text}"
            )
    return priorities


def _pairs(entries: Sequence[str]) -> Iterator[tuple[str, str]]:
    named: set[str] = set()
    for entry in entries:
        name, separator, value = entry.rpartition("=")
        if not separator or not name:
            raise ValueError(f"{entry!r} is not NAME=VALUE")
        if name in named:
            raise ValueError(f"{name} is named twice")
        named.add(name)
        yield name, value
