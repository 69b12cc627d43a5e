"""The answer to a command: how long it may become, and what to say where that ended it."""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from stepwire.cli.interrupts import ctrl_c_closes
from stepwire.cli.sampling_options import DEFAULT_MAX_TOKENS, WHOLE_CONTEXT
from stepwire.client import Client, StepwireError
from stepwire.client.types import Event, FinishReason, Output, Prompt, SamplingParams

# What a message can carry.
_MOST = 2**31 - 1


class Answer:
    """What a client is asked, with a bound on the tokens of each sequence where `sampling` has none."""

    def __init__(self, client: Client, prompt: Prompt, sampling: SamplingParams, keywords: Mapping[str, Any]) -> None:
        """`keywords` are those of `Client.generate` beside the sampling; of the latter, max_tokens is the flag's."""
        self._client = client
        self._prompt = prompt
        self._sampling = sampling
        self._keywords = keywords
        self._bound: int | None = None
        self._is_cut = False

    def events(self) -> "contextlib.closing[Generator[Event, None, None]]":
        """The events, for a `with` block, which cancels the request when it is left early.

        Iterating raises StepwireError, and KeyboardInterrupt after Ctrl-C.
        """
        return contextlib.closing(self._events())

    @property
    def note(self) -> str:
        """That the length ended a sequence for which nobody had set it; empty when none was."""
        if not self._is_cut or self._sampling.max_tokens not in (None, WHOLE_CONTEXT):
            return ""
        if self._bound is None:
            return "the answer ended where the context is full"
        return f"the answer ended after {self._bound} tokens: --max-tokens allows more, {WHOLE_CONTEXT} all that fit"

    def _events(self) -> Generator[Event, None, None]:
        given = self._sampling.max_tokens
        try:
            yield from self._bounded(self._default() if given is None else given)
        except StepwireError as error:
            # Refused before it began: the context leaves less than the bound that nobody asked for.
            if given is not None or error.reason != "PROMPT_TOO_LONG" or "max_tokens" not in error.metadata:
                raise
            yield from self._bounded(WHOLE_CONTEXT)

    def _default(self) -> int:
        return max(DEFAULT_MAX_TOKENS, min(self._sampling.min_tokens or 0, _MOST))

    def _bounded(self, max_tokens: int) -> Generator[Event, None, None]:
        self._bound = None if max_tokens == WHOLE_CONTEXT else max_tokens
        sampling = replace(self._sampling, max_tokens=self._bound)
        stream = self._client.generate(self._prompt, sampling=sampling, **self._keywords)
        with stream, ctrl_c_closes(stream):
            for event in stream:
                self._is_cut |= isinstance(event, Output) and event.finish_reason is FinishReason.LENGTH
                yield event
