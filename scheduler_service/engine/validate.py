"""The one validator: every number and text that a client sends is bounded here before anything uses it.

Bounds are those written in inference.proto. NaN and infinities are outside every range.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler_service.engine.best_of import BestOfRule
from scheduler_service.engine.output import MAX_STREAM_INTERVAL
from scheduler_service.engine.stop import StopStrings
from scheduler_service.engine.structured import check_structured
from scheduler_service.engine.tenants import TenantRules
from scheduler_service.engine.values import ChatPrompt, GenerateInput, Prompt, Sampling, SamplingInput, TextPrompt
from stepwire.rpc.errors import StepwireError

MAX_REQUEST_ID = 128
MAX_ADAPTER_NAME = 128
MAX_PATH = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_N = 64
MAX_BIASES = 1024
MAX_LISTED_TOKENS = 16384
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 16
# With the token that is sampled anyway, as many as a CPU computes in about the time of one.
DEFAULT_DRAFT_TOKENS = 7
MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
# At lower temperatures the draw is that of the most likely token, and the division could overflow.
LEAST_TEMPERATURE = 1e-4
# Beyond these a logit that is divided, or multiplied, could overflow.
REPETITION_PENALTIES = (0.001, 100.0)
_BYTES_PER_TOKEN = 32
_LEAST_PROMPT_LIMIT = 1 << 20
# Drawn seeds survive a client that keeps numbers as doubles.
_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class Checked:
    """What does not depend on the prompt's tokens, in force. `max_tokens` None stands for what the context leaves.

    `num_sequences` are sampled; with `best_of` the n best of them are delivered.
    """

    sampling: Sampling
    stops: StopStrings | None
    max_tokens: int | None
    n: int
    num_sequences: int
    best_of: BestOfRule | None
    max_draft_tokens: int
    stream_interval: int = 1

    def with_grammar(self, key: bytes) -> "Checked":
        """The same, its output held to a grammar."""
        # Drafts are no guess at what a grammar allows: it would have to go on over each of them.
        return replace(self, sampling=replace(self.sampling, grammar_key=key), max_draft_tokens=0)


class Validator:
    """Checks requests against the API's bounds and one model's. Raises StepwireError; changes nothing."""

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        tenants: TenantRules,
        max_draft_tokens: int = 0,
    ) -> None:
        """`max_draft_tokens` is for requests that say nothing of speculation."""
        self._tenants = tenants
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_prompt_bytes = max(_LEAST_PROMPT_LIMIT, _BYTES_PER_TOKEN * max_model_len)

    def check(self, call: GenerateInput) -> Checked:
        """Checks everything but the prompt's tokens. Cheap."""
        _check_request_id(call.request_id)
        self._tenants.check(call.tenant, call.priority)
        self.check_prompt(call.prompt)
        given = call.sampling
        max_tokens = None if given.max_tokens is None else _check_range("max_tokens", given.max_tokens, 1, 2**31 - 1)
        n = _int("n", given.n, 1, (1, MAX_N))
        num_sequences = _int("best_of", given.best_of, n, (n, MAX_N))
        best_of, sampling = None, self._sampling(given)
        if given.structured_output is not None:
            check_structured(given.structured_output, ignore_eos=given.ignore_eos, eos_token_ids=self._eos_token_ids)
        if num_sequences > n:
            best_of = BestOfRule(n, has_logprobs=sampling.logprobs is not None)
            # What a sequence is judged by.
            sampling = sampling if best_of.has_logprobs else replace(sampling, logprobs=0)
        drafts = _int("max_draft_tokens", call.max_draft_tokens, self._max_draft_tokens, (0, MAX_DRAFT_TOKENS))
        interval = _int("stream_interval", call.stream_interval, 1, (1, MAX_STREAM_INTERVAL))
        return Checked(sampling, _check_stop(given.stop), max_tokens, n, num_sequences, best_of, drafts, interval)

    def check_detokenize(self, token_ids: Sequence[int]) -> None:
        """Checks that there are no more ids than a context holds."""
        check_count("token_ids", len(token_ids), self._max_model_len)

    def check_prompt(self, prompt: Prompt | None) -> None:
        """Checks that there is a prompt and that it is worth tokenizing."""
        if prompt is None:
            raise StepwireError(
                "FIELD_INVALID", "the prompt is missing: set text, token_ids or messages", {"field": "prompt"}
            )
        if isinstance(prompt, TextPrompt):
            self._check_bytes("text", len(prompt.text), prompt.text)
        elif isinstance(prompt, ChatPrompt):
            self._check_messages(prompt)
        elif not prompt.token_ids:
            raise _empty("token_ids")
        else:
            self._check_length(len(prompt.token_ids), None)

    def max_tokens(self, num_prompt_tokens: int, checked: Checked) -> int:
        """The most output tokens of a sequence, now that the prompt's length is known."""
        if num_prompt_tokens == 0:
            raise _empty("prompt")
        self._check_length(num_prompt_tokens, checked.max_tokens)
        left = self._max_model_len - num_prompt_tokens
        max_tokens = left if checked.max_tokens is None else checked.max_tokens
        if checked.sampling.min_tokens > max_tokens:
            raise StepwireError(
                "FIELD_INVALID",
                f"min_tokens is {checked.sampling.min_tokens}, more than the {max_tokens} tokens that max_tokens and "
                "the context allow",
                {"field": "min_tokens", "value": str(checked.sampling.min_tokens), "max_tokens": str(max_tokens)},
            )
        if checked.best_of is not None:
            checked.best_of.check_size(checked.num_sequences, max_tokens)
        return max_tokens

    def _sampling(self, given: SamplingInput) -> Sampling:
        stop_token_ids = self._check_token_ids("stop_token_ids", given.stop_token_ids, MAX_STOP_TOKENS)
        if not given.ignore_eos:
            stop_token_ids = tuple(dict.fromkeys((*self._eos_token_ids, *stop_token_ids)))
        temperature = _float("temperature", given.temperature, 1.0, (0.0, 100.0))
        top_k = _int("top_k", given.top_k, 0, (0, 2**31 - 1))
        min_tokens = _int("min_tokens", given.min_tokens, 0, (0, 2**31 - 1))
        allowed = self._check_token_ids("allowed_token_ids", given.allowed_token_ids, MAX_LISTED_TOKENS)
        banned = self._check_token_ids("banned_token_ids", given.banned_token_ids, MAX_LISTED_TOKENS)
        self._check_something_left(allowed, banned, stop_token_ids if min_tokens else ())
        return Sampling(
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=top_k if top_k < self._vocab_size else 0,
            top_p=_float("top_p", given.top_p, 1.0, (0.0, 1.0), above_low=True),
            min_p=_float("min_p", given.min_p, 0.0, (0.0, 1.0)),
            repetition_penalty=_float("repetition_penalty", given.repetition_penalty, 1.0, REPETITION_PENALTIES),
            presence_penalty=_float("presence_penalty", given.presence_penalty, 0.0, (-2.0, 2.0)),
            frequency_penalty=_float("frequency_penalty", given.frequency_penalty, 0.0, (-2.0, 2.0)),
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            seed=secrets.randbits(_SEED_BITS) if given.seed is None else _check_range("seed", given.seed, 0, 2**64 - 1),
            logprobs=self._num_logprobs("logprobs", given.logprobs),
            typical_p=_float("typical_p", given.typical_p, 1.0, (0.0, 1.0), above_low=True),
            logit_bias=self._check_biases(given.logit_bias),
            allowed_token_ids=allowed,
            banned_token_ids=banned,
            prompt_logprobs=self._num_logprobs("prompt_logprobs", given.prompt_logprobs),
        )

    def _num_logprobs(self, field: str, value: int | None) -> int | None:
        """Of the most likely tokens there are no more than the vocabulary has."""
        return None if value is None else min(_check_range(field, value, 0, MAX_LOGPROBS), self._vocab_size)

    def _check_token_ids(self, field: str, token_ids: Collection[int], limit: int) -> tuple[int, ...]:
        """The ids, each once."""
        check_count(field, len(token_ids), limit)
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise StepwireError(
                    "TOKEN_ID_OUT_OF_VOCABULARY",
                    f"{field} holds {token_id}; token ids go from 0 to {self._vocab_size - 1}",
                    {"field": field, "token_id": str(token_id), "vocab_size": str(self._vocab_size)},
                )
        return tuple(dict.fromkeys(token_ids))

    def _check_biases(self, biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        self._check_token_ids("logit_bias", biases.keys(), MAX_BIASES)
        return tuple((token_id, _float("logit_bias", bias, 0.0, (-100.0, 100.0))) for token_id, bias in biases.items())

    def _check_something_left(self, allowed: Sequence[int], banned: Sequence[int], masked: Sequence[int]) -> None:
        """Raises where no token could be sampled at all; `masked` are those that min_tokens holds back."""
        excluded = {*banned, *masked}
        if excluded.issuperset(allowed) if allowed else len(excluded) >= self._vocab_size:
            field = "allowed_token_ids" if allowed else "banned_token_ids"
            raise StepwireError(
                "FIELD_INVALID",
                f"{field} leaves no token that could be sampled, banned_token_ids and min_tokens considered",
                {"field": field},
            )

    def _check_messages(self, prompt: ChatPrompt) -> None:
        if not prompt.messages:
            raise _empty("messages")
        check_count("messages", len(prompt.messages), MAX_MESSAGES)
        for message in prompt.messages:
            if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
                raise _out_of_range("role", f"{len(message.role)} characters", f"1 to {MAX_ROLE_CHARACTERS} characters")
        contents = "".join(message.content for message in prompt.messages)
        self._check_bytes("messages", len(contents), contents, may_be_empty=True)

    def _check_bytes(self, field: str, num_characters: int, text: str, *, may_be_empty: bool = False) -> None:
        if not text and not may_be_empty:
            raise _empty(field)
        # A character has at least one byte, so most texts need no encoding to be known to fit.
        if num_characters * 4 <= self._max_prompt_bytes:
            return
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > self._max_prompt_bytes:
            raise StepwireError(
                "PROMPT_TOO_LONG",
                f"{field} has {num_bytes} bytes; at most {self._max_prompt_bytes} are taken, and the context holds "
                f"{self._max_model_len} tokens",
                {"field": field, "bytes": str(num_bytes), "limit": str(self._max_prompt_bytes)},
            )

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        metadata = {"prompt_tokens": str(num_prompt_tokens), "max_model_len": str(self._max_model_len)}
        if num_prompt_tokens >= self._max_model_len:
            raise StepwireError(
                "PROMPT_TOO_LONG",
                f"the prompt has {num_prompt_tokens} tokens and the context holds {self._max_model_len}, output "
                "included; shorten the prompt",
                metadata,
            )
        if max_tokens is not None and num_prompt_tokens + max_tokens > self._max_model_len:
            left = self._max_model_len - num_prompt_tokens
            raise StepwireError(
                "PROMPT_TOO_LONG",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, but the context holds "
                f"{self._max_model_len}; shorten the prompt, or lower max_tokens to at most {left} or leave it out",
                {**metadata, "max_tokens": str(max_tokens)},
            )


def check_adapter_name(field: str, name: str) -> None:
    """Raises FIELD_OUT_OF_RANGE or FIELD_INVALID for what cannot be an adapter's name."""
    if not 1 <= len(name) <= MAX_ADAPTER_NAME:
        raise _out_of_range(field, f"{len(name)} characters", f"1 to {MAX_ADAPTER_NAME} characters")
    if not all("!" <= character <= "~" and character not in ",=" for character in name):
        text = f"{field} may hold printable ASCII characters without spaces, commas and equals signs only"
        raise StepwireError("FIELD_INVALID", text, {"field": field})


def check_adapter_path(field: str, path: str) -> None:
    """Raises FIELD_OUT_OF_RANGE or FIELD_INVALID for what is no absolute path."""
    if not 1 <= len(path) <= MAX_PATH:
        raise _out_of_range(field, f"{len(path)} characters", f"1 to {MAX_PATH} characters")
    if not path.startswith("/") or "\0" in path:
        text = f"{field} {path[:256]!r} is no absolute path: name the directory as it is on the workers' hosts"
        raise StepwireError("FIELD_INVALID", text, {"field": field, "found": path[:256]})


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID:
        raise _out_of_range("request_id", f"{len(request_id)} characters", f"at most {MAX_REQUEST_ID} characters")
    if not all("!" <= character <= "~" for character in request_id):
        raise StepwireError(
            "FIELD_INVALID",
            "request_id may hold printable ASCII characters without spaces only",
            {"field": "request_id"},
        )


def _check_stop(strings: Sequence[str]) -> StopStrings | None:
    check_count("stop", len(strings), MAX_STOP_STRINGS)
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise _out_of_range(
                "stop", f"a string of {len(string)} characters", f"1 to {MAX_STOP_CHARACTERS} characters"
            )
    return StopStrings(strings) if strings else None


def check_count(field: str, count: int, limit: int) -> None:
    """Raises FIELD_OUT_OF_RANGE for a list with more than `limit` entries. Looks at none of them."""
    if count > limit:
        raise _out_of_range(field, f"{count} entries", f"at most {limit} entries")


def _int(field: str, value: int | None, default: int, bounds: tuple[int, int]) -> int:
    return default if value is None else _check_range(field, value, *bounds)


def _check_range(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _out_of_range(field, str(value), f"{low} to {high}")
    return value


def _float(
    field: str, value: float | None, default: float, bounds: tuple[float, float], *, above_low: bool = False
) -> float:
    if value is None:
        return default
    low, high = bounds
    # Written so that NaN fails.
    if not (low <= value <= high) or (above_low and value == low):
        raise _out_of_range(field, f"{value:g}", f"{'above ' if above_low else ''}{low:g} to {high:g}")
    return value


def _out_of_range(field: str, value: str, allowed: str) -> StepwireError:
    return StepwireError(
        "FIELD_OUT_OF_RANGE",
        f"{field} is {value}; allowed: {allowed}",
        {"field": field, "value": value, "allowed": allowed},
    )


def _empty(field: str) -> StepwireError:
    return StepwireError("PROMPT_EMPTY", f"{field} is empty: the prompt needs at least one token", {"field": field})
