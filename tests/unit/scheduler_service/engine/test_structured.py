"""Forms of output at the door."""

import pytest

from scheduler_service.engine.structured import MAX_BYTES, MAX_CHOICES, check_structured
from scheduler_service.engine.values import StructuredOutput
from stepwire.rpc.errors import StepwireError


def check(wanted: StructuredOutput, *, ignore_eos: bool = False, ends: tuple[int, ...] = (2,)) -> None:
    check_structured(wanted, ignore_eos=ignore_eos, eos_token_ids=ends)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput("json_schema", "x" * MAX_BYTES),
        StructuredOutput("json_object"),
        StructuredOutput("choices", choices=["x"] * MAX_CHOICES),
        StructuredOutput("regex", "a"),
        StructuredOutput("grammar", "é" * (MAX_BYTES // 2)),
    ],
)
def test_forms_within_their_bounds_pass(wanted: StructuredOutput) -> None:
    check(wanted)


@pytest.mark.parametrize(
    ("wanted", "reason", "field"),
    [
        (StructuredOutput("json_schema"), "FIELD_INVALID", "json_schema"),
        (StructuredOutput("regex"), "FIELD_INVALID", "regex"),
        (StructuredOutput("grammar", "x" * (MAX_BYTES + 1)), "FIELD_OUT_OF_RANGE", "grammar"),
        (StructuredOutput("grammar", "é" * (MAX_BYTES // 2 + 1)), "FIELD_OUT_OF_RANGE", "grammar"),
        (StructuredOutput("choices"), "FIELD_OUT_OF_RANGE", "choices"),
        (StructuredOutput("choices", choices=["x"] * (MAX_CHOICES + 1)), "FIELD_OUT_OF_RANGE", "choices"),
        (StructuredOutput("choices", choices=["a", ""]), "FIELD_INVALID", "choices"),
        (StructuredOutput("choices", choices=["é" * MAX_BYTES]), "FIELD_OUT_OF_RANGE", "choices"),
        (StructuredOutput("choices", choices=["x" * MAX_BYTES] * 9), "FIELD_OUT_OF_RANGE", "choices"),
    ],
)
def test_others_are_refused(wanted: StructuredOutput, reason: str, field: str) -> None:
    with pytest.raises(StepwireError) as caught:
        check(wanted)
    assert (caught.value.reason, caught.value.metadata["field"]) == (reason, field)


def test_output_must_be_able_to_end() -> None:
    with pytest.raises(StepwireError, match="end token"):
        check(StructuredOutput("json_object"), ends=())
    with pytest.raises(StepwireError, match="ignore_eos contradicts json_object"):
        check(StructuredOutput("json_object"), ignore_eos=True)
