"""Which requests live in a step loop."""

import asyncio
from collections.abc import Iterator

from scheduler_service.core.errors import DuplicateRequest
from scheduler_service.engine.ends import already_exists
from scheduler_service.engine.live import LiveRequest


class LiveRequests:
    """The requests of one loop, in the order in which they came. On the event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveRequest] = {}
        self._is_empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Those that there are now, whatever comes and goes meanwhile."""
        return iter(tuple(self._by_id.values()))

    def __contains__(self, live: LiveRequest) -> bool:
        """Whether this very request lives here."""
        return self._by_id.get(live.request.request_id) is live

    def add(self, live: LiveRequest) -> None:
        """It lives from now on."""
        self._by_id[live.request.request_id] = live

    def remove(self, live: LiveRequest) -> None:
        """It lives here no more."""
        del self._by_id[live.request.request_id]
        if not self._by_id:
            self._is_empty.set()

    def get(self, request_id: str) -> LiveRequest | None:
        """The request of an id."""
        return self._by_id.get(request_id)

    def check_id(self, request_id: str) -> None:
        """Raises REQUEST_ALREADY_EXISTS when a request of this id lives here."""
        if request_id in self._by_id:
            raise already_exists(DuplicateRequest(request_id))

    async def wait_empty(self) -> None:
        """Waits until no request lives here."""
        if self._by_id:
            self._is_empty.clear()
            await self._is_empty.wait()
