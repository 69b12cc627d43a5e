"""Makes grammars of what clients send, and tries them, in a process of its own that its parent may kill at any time.

What comes out is text in llguidance's own form, which workers compile again. It was compiled here for the same
tokenizer, and a walk over it found tokens at every step, at a cost that a worker bears.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from scheduler_service.engine.helper_process import Answer, confine, serve
from scheduler_service.engine.schema_places import deepest_failure, find_unsound, parse_schema, pointer
from stepwire.grammars import (
    MAX_GRAMMAR_BYTES,
    GrammarRefused,
    MaskBudget,
    compile_grammar,
    error_text,
    make_tokenizer,
)

MEMORY_BYTES = 512 << 20
"""Most that a grammar may take up, beside the tokenizer."""
# Less than what threads of a worker have: what overflows a stack does so here.
_STACK_BYTES = 1 << 20
_WALK_TOKENS = 24
_MAX_ERROR = 600

# Each place that may have whitespace may have one space, or a new line with an indentation: a model that is left to
# itself with endless whitespace may never leave it. Of escapes only those with one spelling: a name that could be
# written in two ways would pass for another one.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


class TooComplex(Exception):
    """A grammar costs more than what is allowed."""


def main() -> None:
    """Answers {"kind", "text" or "choices"} by {"grammar"}, or by {"error", "place", "is_complex"}."""
    serve(get_ready)


def get_ready(greeting: dict[str, Any]) -> Answer:
    """Takes {"tokenizer", "vocab_size", "eos_token_ids"}."""
    tokenizer = make_tokenizer(greeting["tokenizer"], greeting["vocab_size"], greeting["eos_token_ids"])
    confine(MEMORY_BYTES)
    threading.stack_size(_STACK_BYTES)
    thread = ThreadPoolExecutor(1)
    return lambda request: thread.submit(answer, request, tokenizer).result()


def answer(request: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """What to send back."""
    try:
        made = _MAKERS[request["kind"]](request, tokenizer)
        _try(made.matcher, tokenizer, seed=len(made.grammar))
        return {"grammar": made.grammar}
    except TooComplex as error:
        return {"error": str(error), "place": "", "is_complex": True}
    except _Misplaced as error:
        return {"error": str(error)[:_MAX_ERROR], "place": error.place, "is_complex": False}
    except MemoryError:
        return {"error": "it used too much memory", "place": "", "is_complex": True}
    except RecursionError:
        return {"error": "it is nested too deeply", "place": "", "is_complex": True}
    except Exception as error:  # whatever a library says of foreign input is for the caller
        return {"error": f"{error or type(error).__name__}"[:_MAX_ERROR], "place": "", "is_complex": False}


class _Made(NamedTuple):
    """A grammar, compiled."""

    grammar: str
    matcher: LLMatcher


class _Misplaced(Exception):
    """A grammar is wrong at a place that is known."""

    def __init__(self, problem: str, place: str) -> None:
        super().__init__(problem)
        self.place = place


def _from_json_schema(request: dict[str, Any], tokenizer: LLTokenizer) -> _Made:
    schema = parse_schema(request["text"])
    if schema is False:
        raise _Misplaced("nothing satisfies it", "#")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _Misplaced("a schema is an object, true or false", "#")
    if "x-guidance" in schema:
        raise _Misplaced("x-guidance is not taken: the service has options of its own", "#/x-guidance")
    if (unsound := find_unsound(schema)) is not None:
        raise _Misplaced(unsound[1], pointer(unsound[0]))
    try:
        return _compiled(_schema_grammar(schema), tokenizer)
    except (GrammarRefused, ValueError) as error:
        place = deepest_failure(schema, lambda part: _schema_problem(part, tokenizer))
        raise _Misplaced(str(error), pointer(place)) from error


def _schema_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)  # type: ignore[arg-type]  # its type knows not all options


def _schema_problem(schema: Any, tokenizer: LLTokenizer) -> str | None:
    """Why a schema does not compile, or what of it would not hold."""
    try:
        _compiled(_schema_grammar(schema), tokenizer)
    except (GrammarRefused, ValueError) as error:
        return str(error)
    return None


def _from_json_object(_request: dict[str, Any], tokenizer: LLTokenizer) -> _Made:
    return _compiled(_schema_grammar({"type": "object"}), tokenizer)


def _from_regex(request: dict[str, Any], tokenizer: LLTokenizer) -> _Made:
    return _compiled(LLMatcher.grammar_from_regex(request["text"]), tokenizer)


def _from_choices(request: dict[str, Any], tokenizer: LLTokenizer) -> _Made:
    # Lark's texts are those of JSON, but for one character that it does not take as it stands.
    choices = (json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f") for choice in request["choices"])
    return _from_lark("start: " + " | ".join(choices), tokenizer)


def _from_grammar(request: dict[str, Any], tokenizer: LLTokenizer) -> _Made:
    return _from_lark(any_to_lark(request["text"]), tokenizer)


def _from_lark(lark: str, tokenizer: LLTokenizer) -> _Made:
    return _compiled(json.dumps({"grammars": [{"lark_grammar": lark}]}), tokenizer)


def _compiled(grammar: str, tokenizer: LLTokenizer) -> _Made:
    """Raises TooComplex for one that is too long, GrammarRefused for one that does not compile or would not hold."""
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise TooComplex(f"it becomes more than {MAX_GRAMMAR_BYTES} bytes")
    matcher = compile_grammar(tokenizer, grammar)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarRefused("; ".join(warnings))
    return _Made(grammar, matcher)


_MAKERS: dict[str, Callable[[dict[str, Any], LLTokenizer], _Made]] = {
    "json_schema": _from_json_schema,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "choices": _from_choices,
    "grammar": _from_grammar,
}


def _try(matcher: LLMatcher, tokenizer: LLTokenizer, seed: int) -> None:
    """Walks at random from the start of a grammar. Raises GrammarRefused where nothing satisfies it, TooComplex where
    masks take too long or cannot be told."""
    draws, budget, ends = random.Random(seed), MaskBudget(), set(tokenizer.eos_tokens)
    for step in range(_WALK_TOKENS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        budget.spend(time.thread_time() - began)
        if matcher.is_error():
            if step == 0 and "NoExtension" in error_text(matcher):
                raise GrammarRefused("nothing satisfies it")
            raise TooComplex(f"its masks cannot be told: {error_text(matcher)}")
        if budget.left_s < 0:
            raise TooComplex(f"its first {step + 1} masks took {budget.spent_s:.2f} s")
        token_id = _draw(mask, draws)
        if token_id is None:
            raise GrammarRefused("nothing satisfies it" if step == 0 else "some of its beginnings have no end")
        if token_id in ends or not matcher.consume_token(token_id):
            return


def _draw(mask: int, draws: random.Random) -> int | None:
    """One of the bits that are set, roughly at random; None for none."""
    if not mask:
        return None
    above = mask >> draws.randrange(mask.bit_length())
    below = mask.bit_length() - above.bit_length()
    return below + (above & -above).bit_length() - 1
