"""Requests that go on from what an earlier call has brought: their checks, and the text that goes on with them.

A client that lost its service sends its request again with the tokens that it holds. Which of its sequences
have ended is found by the rules that would have ended them; what text they had is made again and dropped, so
that bytes of a character and starts of stop strings are held back just as they were.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_service.engine.detokenize import Detokenizer, SequenceDecoder
from scheduler_service.engine.stop import StopFinder
from scheduler_service.engine.tokens import Tokens
from scheduler_service.engine.validate import Checked
from scheduler_service.engine.values import GenerateInput
from stepwire.rpc.errors import StepwireError

FIELD = "prior_output_token_ids"


@dataclass(frozen=True, slots=True)
class Continued:
    """A request's earlier output, of `num_tokens` over all sequences.

    `priors` has the tokens of the sequences that go on, by index; None for a request that begins. `texts` are their
    decoders and finders, which have seen these tokens.
    """

    priors: Mapping[int, list[int]] | None = None
    texts: Mapping[int, tuple[SequenceDecoder, StopFinder | None]] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def is_over(self) -> bool:
        """Whether every sequence had ended."""
        return self.priors is not None and not self.priors


async def continue_request(
    call: GenerateInput, checked: Checked, prompt_token_ids: Sequence[int], tokens: Tokens, max_tokens: int
) -> Continued:
    """What a call goes on from, if it does. Raises StepwireError as `check_priors` and `continue_sequences` do."""
    if not call.priors:
        return Continued()
    check_priors(call, checked, tokens, max_tokens)
    return await asyncio.to_thread(continue_sequences, call, checked, prompt_token_ids, tokens.detokenizer, max_tokens)


def check_priors(call: GenerateInput, checked: Checked, tokens: Tokens, max_tokens: int) -> None:
    """Checks what a call says of its earlier output. Raises StepwireError FIELD_*, TOKEN_ID_OUT_OF_VOCABULARY."""
    priors = call.priors
    if len(priors) > checked.n:
        raise _invalid(f"has {len(priors)} lists and n is {checked.n}; give one list for each sequence, in their order")
    if checked.best_of is not None:
        raise _invalid("cannot be given with best_of: which sequences are best is not known yet")
    if checked.sampling.prompt_logprobs is not None:
        raise _invalid("cannot be given with prompt_logprobs: leave these out, they have come already")
    if call.sampling.seed is None and checked.sampling.temperature > 0:
        raise _invalid("needs the seed of the call that it goes on from, which the first message of that call tells")
    for index, token_ids in enumerate(priors):
        if len(token_ids) > max_tokens:
            raise StepwireError(
                "FIELD_OUT_OF_RANGE",
                f"{FIELD} has {len(token_ids)} tokens for sequence {index}; max_tokens and the context allow "
                f"{max_tokens}",
                {"field": FIELD, "value": str(len(token_ids)), "allowed": f"at most {max_tokens}"},
            )
        tokens.check_ids(token_ids, FIELD)


def continue_sequences(
    call: GenerateInput, checked: Checked, prompt_token_ids: Sequence[int], detokenizer: Detokenizer, max_tokens: int
) -> Continued:
    """Makes the text of the earlier output again. Takes a microsecond a token, or some tens: not for the event loop.

    Raises StepwireError FIELD_INVALID for output that goes on after its end.
    """
    going: dict[int, list[int]] = {}
    texts: dict[int, tuple[SequenceDecoder, StopFinder | None]] = {}
    padded = [*call.priors, *([] for _ in range(checked.n - len(call.priors)))]
    for index, token_ids in enumerate(padded):
        decoder = detokenizer.sequence(prompt_token_ids)
        finder = None if checked.stops is None else StopFinder(checked.stops, checked.sampling.min_tokens)
        end = next(_ends(token_ids, checked, decoder, finder), None)
        if end is not None and end < len(token_ids):
            raise _invalid(f"goes on after token {end} of sequence {index}, which ended it; cut it there")
        if end is None and len(token_ids) < max_tokens:
            going[index], texts[index] = list(token_ids), (decoder, finder)
    return Continued(going, texts, sum(map(len, padded)))


def _ends(
    token_ids: Sequence[int], checked: Checked, decoder: SequenceDecoder, finder: StopFinder | None
) -> Iterator[int]:
    """The number of tokens after which a stop token or string ended the sequence, if one did."""
    stops = frozenset(checked.sampling.stop_token_ids)
    for count, token_id in enumerate(token_ids, 1):
        if token_id in stops and count > checked.sampling.min_tokens:
            yield count
            return
        text = decoder.feed(token_id)
        if finder is not None and finder.feed(text, count)[1] is not None:
            yield count
            return


def _invalid(problem: str) -> StepwireError:
    return StepwireError("FIELD_INVALID", f"{FIELD} {problem}", {"field": FIELD})
