"""Which replica a request goes to: where it has to wait least, counting what the prefix cache would spare it.

Requests that come at once with a common beginning find nothing in any cache yet, so the beginnings that were given
out last are remembered: the second goes where the first went, unless it would wait for half a prompt of its length.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from scheduler_service.core.request import Request

# So many tokens of a beginning are remembered; shorter prompts are not worth a detour.
_BEGINNING = 64
_NUM_REMEMBERED = 4096


class Place(Protocol):
    """A replica, as far as placing goes."""

    @property
    def is_healthy(self) -> bool:
        """Whether it serves now; one that recovers will serve later."""

    def cost(self, request: Request) -> int:
        """Tokens to compute before the request's first one."""


P = TypeVar("P", bound=Place)


class Placing:
    """Chooses replicas, and remembers where beginnings went."""

    def __init__(self) -> None:
        self._went: OrderedDict[int, Place] = OrderedDict()
        self._turn = 0
        self._chosen_at: dict[Place, int] = {}

    def choose(self, request: Request, places: Sequence[P]) -> P:
        """The best of these places, at least one. Of equals the one that was chosen longest ago."""
        if len(places) == 1:
            return places[0]
        healthy = [place for place in places if place.is_healthy] or list(places)
        key = self._key(request)
        before = None if key is None else self._went.get(key)

        def rank(place: P) -> tuple[int, int]:
            spared = len(request.prompt_token_ids) // 2 if place is before else 0
            return place.cost(request) - spared, self._chosen_at.get(place, 0)

        chosen = min(healthy, key=rank)
        self._turn += 1
        self._chosen_at[chosen] = self._turn
        if key is not None:
            # One that went elsewhere for once leaves the beginning where it is at home.
            self._went.setdefault(key, chosen)
            self._went.move_to_end(key)
            if len(self._went) > _NUM_REMEMBERED:
                self._went.popitem(last=False)
        return chosen

    def forget(self, place: Place) -> None:
        """A replica is gone."""
        self._chosen_at.pop(place, None)
        for key in [key for key, went in self._went.items() if went is place]:
            del self._went[key]

    @staticmethod
    def _key(request: Request) -> int | None:
        prompt = request.prompt_token_ids
        if len(prompt) < _BEGINNING:
            return None
        return hash((request.cache_salt, request.adapter, tuple(prompt[:_BEGINNING])))
