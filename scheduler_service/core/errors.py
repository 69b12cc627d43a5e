"""Why a request is refused at the door. The text is fit to be shown to the client."""

from dataclasses import dataclass


class Refused(Exception):
    """A request was not accepted; nothing has changed."""


@dataclass(eq=False)
class NeverFits(Refused):
    """The request needs more KV blocks than there are, whatever else runs."""

    needed_blocks: int
    num_blocks: int
    largest_token_count: int

    def __str__(self) -> str:
        return (
            f"prompt and max_tokens need {self.needed_blocks} KV blocks and the cache has {self.num_blocks}; "
            f"at most {self.largest_token_count} tokens of prompt and output together fit"
        )


@dataclass(eq=False)
class QueueFull(Refused):
    """As many requests or prompt tokens wait as may wait."""

    what: str
    limit: int
    retry_after_s: float

    def __str__(self) -> str:
        return f"the queue is full: {self.limit} {self.what} wait; try again in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class DuplicateRequest(Refused):
    """A live request has this id."""

    request_id: str

    def __str__(self) -> str:
        return f"request_id {self.request_id!r} belongs to a live request; choose another or leave it empty"
