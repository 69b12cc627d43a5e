"""What scheduler and workers must agree on about grammars: the library, its limits, and the name of a grammar.

A grammar is text in llguidance's own form. The scheduler makes it of what a client sent and tries it where it can be
killed; a worker then compiles the same text, for the same tokenizer, within the same limits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KEY_BYTES = 32
MAX_GRAMMAR_BYTES = 1 << 20
"""Most bytes of a grammar's text; what clients may send is less, and grows when it is put into llguidance's form."""
MAX_LIVE_GRAMMARS = 1024
"""Most grammars that live requests may use at once."""
MAX_LIVE_BYTES = 32 << 20
"""Most bytes of their texts together."""

# A mask may take a while once, because the automaton of a grammar is built as it is used, but not on average.
MASK_BURST_S = 0.25
MASK_MEAN_S = 0.005


class GrammarRefused(Exception):
    """A grammar does not compile; the text is llguidance's."""


def grammar_key(grammar: str) -> bytes:
    """The name of a grammar: a hash of its text."""
    return hashlib.sha256(grammar.encode()).digest()


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer that masks are for, of one that `tokenizers` wrote; `vocab_size` counts the model's token ids.

    Takes a few hundred milliseconds, all the while holding the interpreter. Raises GrammarRefused for a tokenizer of a
    kind that llguidance does not know.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise GrammarRefused(f"llguidance cannot use this model's tokenizer: {error}") from error


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar; other threads go on meanwhile. Raises GrammarRefused."""
    limits = LLParserLimits(
        # Of compiling: the size of what regular expressions become.
        initial_lexer_fuel=1_000_000,
        max_grammar_size=500_000,
        # Of masks: work, states and items, and with them memory.
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarRefused(error_text(matcher))
    return matcher


def error_text(matcher: LLMatcher) -> str:
    """Why a matcher goes on no more."""
    return matcher.get_error().replace("<non-verbose/>", "").strip()


@dataclass(slots=True)
class MaskBudget:
    """What the masks of one sequence may cost, in CPU seconds: a mean for each, and a burst on top."""

    num_masks: int = 0
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        """What the next mask may take; negative when too much is spent."""
        return MASK_BURST_S + (self.num_masks + 1) * MASK_MEAN_S - self.spent_s

    def spend(self, seconds: float) -> None:
        """Counts a mask."""
        self.num_masks += 1
        self.spent_s += seconds
