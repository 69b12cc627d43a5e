"""Sampling by flags."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from stepwire.client.types import SamplingParams

# The API has no such bound: a model that finds no end would fill its context, and keep a terminal and a place in the
# batch for as long.
DEFAULT_MAX_TOKENS = 512
"""Most tokens of an answer to a command, where neither --max-tokens nor --min-tokens asks for more."""

WHOLE_CONTEXT = 0
"""What stands in --max-tokens for what the context leaves."""

_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    (
        "max_tokens",
        int,
        f"Most tokens of output; {DEFAULT_MAX_TOKENS} by default, {WHOLE_CONTEXT} for what the context leaves.",
    ),
    ("min_tokens", int, "Nothing but the length ends the output before this many tokens."),
    ("temperature", float, "0 always takes the most likely token; 1 by default."),
    ("top_k", int, "Draw from the k most likely tokens; 0 from all."),
    ("top_p", float, "Draw from the most likely tokens whose probability reaches this."),
    ("min_p", float, "Draw from tokens at least this fraction as likely as the most likely one."),
    ("typical_p", float, "Draw from the tokens of most typical information whose probability reaches this."),
    ("seed", int, "Makes the draw repeatable."),
    ("repetition_penalty", float, "Above 1 makes tokens of prompt and output less likely."),
    ("presence_penalty", float, "Above 0 makes tokens of the output less likely."),
    ("frequency_penalty", float, "The same, for each time that a token was used."),
)

_FORMS = (
    click.option(
        "--json-schema", type=click.File(encoding="utf-8"), help="Answer with JSON of the schema in this file."
    ),
    click.option("--json-object", is_flag=True, help="Answer with a JSON object."),
    click.option("--regex", help="Answer with text that matches this expression as a whole."),
    click.option("--choice", "choices", multiple=True, help="Answer with this text or another choice; to be repeated."),
    click.option(
        "--grammar", type=click.File(encoding="utf-8"), help="Answer by the grammar (Lark, GBNF) in this file."
    ),
)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the sampling flags; `sampling_from` reads them."""
    function = click.option("--ignore-eos", is_flag=True, help="Do not end at the model's own end tokens.")(function)
    function = click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End with this token; may be repeated."
    )(function)
    function = click.option(
        "--ban-token-id", "banned_token_ids", type=int, multiple=True, help="Never sample this token; may be repeated."
    )(function)
    function = click.option(
        "--logit-bias", type=(int, float), multiple=True, metavar="ID BIAS", help="Bias this token; may be repeated."
    )(function)
    function = click.option("--stop", multiple=True, help="End before this text; may be repeated.")(function)
    for decorate in reversed(_FORMS):
        function = decorate(function)
    for name, kind, text in reversed(_OPTIONS):
        function = click.option("--" + name.replace("_", "-"), type=kind, help=text)(function)
    return function


def sampling_from(options: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The sampling that the flags ask for. Takes its own flags out of all that a command was given."""
    names = [*(name for name, _, _ in _OPTIONS), "stop", "stop_token_ids", "banned_token_ids", "ignore_eos"]
    given = {name: options[name] for name in (*names, "json_object", "regex", "choices")}
    for name in ("json_schema", "grammar"):
        given[name] = None if options[name] is None else options[name].read()
    return SamplingParams(**given, logit_bias=dict(options["logit_bias"]), **more)
