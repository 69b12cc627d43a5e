"""What is in force for a request; the refusals are tested through the API."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.engine.tenants import TenantRules
from scheduler_service.engine.validate import Validator
from scheduler_service.engine.values import ChatMessage, ChatPrompt, GenerateInput, SamplingInput, TextPrompt
from stepwire.rpc.errors import StepwireError

VALIDATOR = Validator(vocab_size=100, max_model_len=50, eos_token_ids=(2, 3), tenants=TenantRules())


def check(**fields: object) -> object:
    return VALIDATOR.check(GenerateInput(TextPrompt("x"), SamplingInput(**fields)))  # type: ignore[arg-type]


def test_the_defaults_are_those_of_the_protocol() -> None:
    checked = VALIDATOR.check(GenerateInput(TextPrompt("x")))
    sampling = checked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.logprobs) == ((2, 3), 0, None)
    assert (checked.n, checked.max_tokens, checked.stops) == (1, None, None)
    assert VALIDATOR.max_tokens(10, checked) == 40


def test_drafts_are_what_the_request_says_or_what_is_set() -> None:
    eager = Validator(100, 50, (2, 3), TenantRules(), max_draft_tokens=5)
    found = [
        validator.check(GenerateInput(TextPrompt("x"), max_draft_tokens=given)).max_draft_tokens
        for validator in (VALIDATOR, eager)
        for given in (None, 0, 16)
    ]
    assert found == [0, 0, 16, 5, 0, 16]


def test_stop_tokens_are_added_to_the_models_own() -> None:
    both = VALIDATOR.check(GenerateInput(TextPrompt("x"), SamplingInput(stop_token_ids=(7, 2))))
    assert both.sampling.stop_token_ids == (2, 3, 7)
    own = VALIDATOR.check(GenerateInput(TextPrompt("x"), SamplingInput(stop_token_ids=(7,), ignore_eos=True)))
    assert own.sampling.stop_token_ids == (7,)


def test_seeds_differ_when_none_is_given_and_fit_a_double() -> None:
    seeds = {VALIDATOR.check(GenerateInput(TextPrompt("x"))).sampling.seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**53 for seed in seeds)


def test_values_without_effect_are_made_plain() -> None:
    given = SamplingInput(temperature=1e-30, top_k=100)
    sampling = VALIDATOR.check(GenerateInput(TextPrompt("x"), given)).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


@given(
    st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_no_float_leaves_its_range(name: str, value: float) -> None:
    try:
        checked = check(**{name: value})
    except StepwireError as error:
        assert error.reason == "FIELD_OUT_OF_RANGE" and error.metadata["field"] == name
    else:
        in_force = getattr(checked.sampling, name)  # type: ignore[attr-defined]
        assert math.isfinite(in_force) and abs(in_force) <= 100


@given(
    st.sampled_from(["max_tokens", "min_tokens", "top_k", "n", "logprobs", "seed"]),
    st.integers(-(2**64), 2**65),
)
def test_no_integer_leaves_its_range(name: str, value: int) -> None:
    try:
        check(**{name: value})
    except StepwireError as error:
        assert error.reason == "FIELD_OUT_OF_RANGE" and error.metadata["field"] == name
    else:
        assert 0 <= value < 2**64


@pytest.mark.parametrize("num", [0, 50, 51])
def test_prompts_that_leave_no_token_are_refused(num: int) -> None:
    checked = VALIDATOR.check(GenerateInput(TextPrompt("x")))
    with pytest.raises(StepwireError) as caught:
        VALIDATOR.max_tokens(num, checked)
    assert caught.value.reason == ("PROMPT_TOO_LONG" if num else "PROMPT_EMPTY")


def test_too_many_messages_and_too_much_text_are_refused() -> None:
    many = ChatPrompt(tuple(ChatMessage("user", "") for _ in range(4097)))
    with pytest.raises(StepwireError, match="4097 entries"):
        VALIDATOR.check_prompt(many)
    long = ChatPrompt((ChatMessage("user", "é" * (1 << 19)), ChatMessage("user", "x")))
    with pytest.raises(StepwireError, match="1048577 bytes"):
        VALIDATOR.check_prompt(long)
