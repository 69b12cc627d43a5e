"""`stepwire generate`."""

import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from stepwire.cli.answer import Answer
from stepwire.cli.connection import connect, connection_options
from stepwire.cli.sampling_options import sampling_from, sampling_options
from stepwire.client.types import (
    Event,
    Finished,
    Message,
    Output,
    PositionLogprobs,
    Prompt,
    PromptLogprobs,
    Started,
)


@click.command()
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="System message to send before it; implies --chat.")
@click.option("--n", type=int, help="Number of answers.")
@click.option("--best-of", type=int, help="Sample so many answers and print the likeliest when all have ended.")
@click.option("--logprobs", type=int, help="Log-probabilities of so many most likely tokens, on standard error.")
@click.option("--prompt-logprobs", type=int, help="The same for each token of the prompt.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each event, a line each.")
@click.option("--stats", is_flag=True, help="Tokens and times at the end, on standard error.")
@click.option("--request-id", default="", help="Id of the request; by default the service makes one.")
@click.option("--priority", type=int, default=0, help="Higher goes first; 0 by default.")
@click.option(
    "--max-draft-tokens", type=int, help="Tokens that a step may look up and try: faster where an answer quotes."
)
@sampling_options
@connection_options
def generate(prompt: str, *, chat: bool, system: str | None, **options: Any) -> None:
    """Continue PROMPT ("-" reads it from standard input), streaming the answer.

    Standard output carries the answer and nothing else. Ctrl-C cancels the request. What ended for its length alone,
    with no --max-tokens given, is told on standard error.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    content = _messages(text, system) if chat or system is not None else text
    printer: _JsonPrinter | _TextPrinter = (
        _JsonPrinter() if options["as_json"] else _TextPrinter(num_sequences=options["n"] or 1)
    )
    stats = _Stats()
    sampling = sampling_from(
        options, **{name: options[name] for name in ("n", "best_of", "logprobs", "prompt_logprobs")}
    )
    with connect(options) as client:
        names = ("model", "adapter", "request_id", "priority", "max_draft_tokens", "timeout")
        answer = Answer(client, content, sampling, {name: options[name] for name in names})
        try:
            with answer.events() as events:
                for event in events:
                    printer.show(event)
                    stats.add(event)
        finally:
            printer.end()
    if answer.note:
        click.echo(f"[{answer.note}]", err=True)
    if options["stats"]:
        click.echo(stats.text(), err=True)


def _messages(text: str, system: str | None) -> Prompt:
    first = [] if system is None else [Message("system", system)]
    return [*first, Message("user", text)]


class _TextPrinter:
    """Prints text as it comes; of several sequences each one when it is whole, since they come interleaved."""

    def __init__(self, num_sequences: int) -> None:
        self._is_single = num_sequences == 1
        self._texts: dict[int, str] = defaultdict(str)
        self._is_line_open = False

    def show(self, event: Event) -> None:
        if isinstance(event, PromptLogprobs):
            _show_logprobs("prompt", event.position, event.logprobs)
        if not isinstance(event, Output):
            return
        if self._is_single:
            click.echo(event.text, nl=False)
            self._is_line_open = True
        else:
            self._texts[event.sequence_index] += event.text
        _show_logprobs(str(event.sequence_index), event.position, event.logprobs)

    def end(self) -> None:
        if self._is_line_open:
            click.echo()
        for index, text in sorted(self._texts.items()):
            click.echo(f"[{index}] {text}")


def _show_logprobs(name: str, position: int, entries: Sequence[PositionLogprobs]) -> None:
    for offset, entry in enumerate(entries):
        top = "  ".join(f"{other.token_id}:{other.logprob:.4f}" for other in entry.top)
        head = f"[{name}] {position + offset:5}  {entry.sampled.token_id:7} {entry.sampled.logprob:9.4f}"
        click.echo(f"{head}  {top}".rstrip(), err=True)


class _JsonPrinter:
    """Prints each event as it comes."""

    def show(self, event: Event) -> None:
        click.echo(json.dumps({"event": type(event).__name__.lower(), **dataclasses.asdict(event)}, ensure_ascii=False))

    def end(self) -> None:
        """Nothing is left to print."""


class _Stats:
    """What a request used and how long it took, as this side saw it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._started: Started | None = None
        self._finished: Finished | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self._finished = event
        elif isinstance(event, Output) and self._first is None:
            self._first = time.monotonic()

    def text(self) -> str:
        """Two lines at most."""
        if self._started is None or self._finished is None or self._first is None:
            return "no output"
        now, usage = time.monotonic(), self._finished.usage
        rate = (usage.num_output_tokens - 1) / (now - self._first) if usage.num_output_tokens > 1 else 0.0
        return (
            f"request {self._started.request_id}, model {self._started.model}, seed {self._started.seed}\n"
            f"{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_tokens} cached), "
            f"{usage.num_output_tokens} output tokens; queued {self._finished.queue_s:.3f} s, "
            f"first token after {self._first - self._began:.3f} s, {rate:.1f} tokens/s"
        )
