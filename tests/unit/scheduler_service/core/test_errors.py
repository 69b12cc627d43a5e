"""Refusals name the limit that was hit and what the client can do."""

import pytest

from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull, Refused


def test_never_fits_says_what_would_fit() -> None:
    text = str(NeverFits(needed_blocks=12, num_blocks=10, largest_token_count=161))
    assert text == (
        "prompt and max_tokens need 12 KV blocks and the cache has 10; "
        "at most 161 tokens of prompt and output together fit"
    )


def test_queue_full_says_what_is_full_and_when_to_come_back() -> None:
    text = str(QueueFull(what="prompt tokens", limit=1000, retry_after_s=2.345))
    assert text == "the queue is full: 1000 prompt tokens wait; try again in 2.3 s"


def test_duplicate_request_names_the_id() -> None:
    assert str(DuplicateRequest("job\n1")) == (
        "request_id 'job\\n1' belongs to a live request; choose another or leave it empty"
    )


@pytest.mark.parametrize("error", [NeverFits(2, 1, 5), QueueFull("sequences", 1, 1.0), DuplicateRequest("a")])
def test_every_refusal_can_be_caught_as_one(error: Refused) -> None:
    with pytest.raises(Refused) as caught:
        raise error
    assert caught.value is error
    assert error in {error}
