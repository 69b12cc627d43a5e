"""`stepwire chat`."""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from stepwire.cli.answer import Answer
from stepwire.cli.connection import connect, connection_options
from stepwire.cli.sampling_options import sampling_from, sampling_options
from stepwire.client import Client, StepwireError
from stepwire.client.types import Message, Output, SamplingParams

_HELP = "/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C cancels an answer"


@click.command()
@click.option("--system", help="System message, sent before all others.")
@sampling_options
@connection_options
def chat(*, system: str | None, **options: Any) -> None:
    """Talk with a model.

    /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C cancels an answer and keeps what
    came of it. Lines are read from standard input, so that a conversation can be piped in.
    """
    with connect(options) as client:
        # Before the first prompt, so that a wrong address is told at once.
        model = client.get_model(options["model"])
        if sys.stdin.isatty():
            click.echo(f"{model.name} on {options['target']}; {_HELP}", err=True)
        keywords = {"model": model.name, "adapter": options["adapter"], "timeout": options["timeout"]}
        conversation = Conversation(client, sampling_from(options), system, keywords)
        while (line := _read_line()) is not None and line != "/exit":
            if line.startswith("/"):
                _command(line, conversation)
            elif line.strip():
                _answer(conversation, line)


class Conversation:
    """What was said so far, and who answers."""

    def __init__(
        self, client: Client, sampling: SamplingParams, system: str | None, keywords: Mapping[str, Any]
    ) -> None:
        """`keywords` are those of `Client.generate` beside the sampling."""
        self._client = client
        self._sampling = sampling
        self._keywords = keywords
        self._first = () if system is None else (Message("system", system),)
        self.turns: list[Message] = []

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.turns.clear()

    def say(self, text: str) -> None:
        """Sends a turn and prints the answer as it comes.

        A turn that fails before any answer is forgotten; one that is cancelled later keeps what
        came. Raises StepwireError and KeyboardInterrupt.
        """
        self.turns.append(Message("user", text))
        parts: list[str] = []
        answer = Answer(self._client, [*self._first, *self.turns], self._sampling, self._keywords)
        try:
            with answer.events() as events:
                for event in events:
                    if isinstance(event, Output):
                        parts.append(event.text)
                        click.echo(event.text, nl=False)
        finally:
            click.echo()
            if parts:
                self.turns.append(Message("assistant", "".join(parts)))
            else:
                self.turns.pop()
        if answer.note:
            click.echo(f"[{answer.note}]", err=True)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        conversation.say(line)
    except KeyboardInterrupt:
        click.echo("[cancelled]", err=True)
    except StepwireError as error:
        click.echo(f"Error: {error.message}", err=True)


def _command(line: str, conversation: Conversation) -> None:
    if line.strip() == "/reset":
        conversation.reset()
    else:
        click.echo(_HELP, err=True)


def _read_line() -> str | None:
    """The next line without its end; None at the end of input. On a terminal with editing and history."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            return input("> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo("\n" + _HELP, err=True)
