"""When a call's deadline counts as the reason of its end."""

# gRPC rounds a deadline up by as much as 1 % on its way, so the client's passes this much before ours.
_SLACK = 0.011
_SLACK_S = 0.02


def has_passed(timeout_s: float, remaining_s: float) -> bool:
    """Whether a call that had `timeout_s` seconds and has `remaining_s` left is over for its client."""
    return remaining_s <= timeout_s * _SLACK + _SLACK_S
