"""What a form of output may be, before anything compiles it: the part of the validator that is about these."""

from collections.abc import Sequence

from scheduler_service.engine.values import StructuredOutput
from stepwire.rpc.errors import StepwireError

MAX_BYTES = 1 << 18
MAX_CHOICES = 4096


def check_structured(wanted: StructuredOutput, *, ignore_eos: bool, eos_token_ids: Sequence[int]) -> None:
    """Raises StepwireError for a form that is empty, too large, or could not end. Cheap, whatever its size."""
    if not eos_token_ids:
        raise _invalid(wanted.kind, "output of a form needs an end token, and this model has none")
    if ignore_eos:
        raise _invalid("ignore_eos", f"ignore_eos contradicts {wanted.kind}: output ends where its form is whole")
    if wanted.kind == "choices":
        _check_choices(wanted.choices)
    elif wanted.kind != "json_object":
        if not wanted.text:
            raise _invalid(wanted.kind, f"{wanted.kind} is empty")
        _check_bytes(wanted.kind, wanted.text)


def _check_choices(choices: Sequence[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _out_of_range("choices", f"{len(choices)} entries", f"1 to {MAX_CHOICES} entries")
    for place, choice in enumerate(choices):
        if not choice:
            raise _invalid("choices", f"choice {place} is empty")
    if sum(map(len, choices)) > MAX_BYTES:
        raise _out_of_range("choices", f"{sum(map(len, choices))} characters", f"at most {MAX_BYTES} bytes")
    _check_bytes("choices", "".join(choices))


def _check_bytes(field: str, text: str) -> None:
    # A character has at least one byte, so a text that is far too long need not be encoded.
    num_bytes = len(text) if len(text) > MAX_BYTES else len(text.encode(errors="surrogatepass"))
    if num_bytes > MAX_BYTES:
        raise _out_of_range(field, f"{num_bytes} bytes or more", f"at most {MAX_BYTES} bytes")


def _invalid(field: str, problem: str) -> StepwireError:
    return StepwireError("FIELD_INVALID", problem, {"field": field})


def _out_of_range(field: str, value: str, allowed: str) -> StepwireError:
    metadata = {"field": field, "value": value, "allowed": allowed}
    return StepwireError("FIELD_OUT_OF_RANGE", f"{field} has {value}; allowed: {allowed}", metadata)
