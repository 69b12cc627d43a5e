"""The grammars that this worker has compiled, by key. Imports no torch."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from loader.checkpoint import Checkpoint
from loader.tokenizer import load_tokenizer
from stepwire.grammars import (
    MAX_LIVE_BYTES,
    MAX_LIVE_GRAMMARS,
    GrammarRefused,
    compile_grammar,
    make_tokenizer,
)
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.mask_threads import MaskThreads

MAX_IDLE = 256
"""Most grammars that are kept though no live request uses them."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What preparing a grammar came to."""

    already_held: bool
    duration_ns: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A grammar. Nothing is ever consumed by its matcher: sequences take copies."""

    matcher: LLMatcher
    num_bytes: int


class GrammarStore:
    """Compiled grammars for one model's tokenizer, and the threads that compute masks of them.

    Which grammars live requests use the scheduler says; those stay. Of the others the least recently prepared go
    first. May be used from any thread.
    """

    def __init__(self, make: Callable[[], LLTokenizer], eos_token_ids: Sequence[int], *, num_threads: int) -> None:
        """`make` makes the tokenizer when it is needed first; it may raise GrammarRefused and CheckpointError."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.threads = MaskThreads(num_threads)
        self._make = make
        self._tokenizer: LLTokenizer | None = None
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._live: frozenset[bytes] = frozenset()
        self._revision = 0
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, *, num_threads: int) -> "GrammarStore":
        """For a model's tokenizer, whatever the format of its checkpoint."""
        config = checkpoint.config

        def make() -> LLTokenizer:
            return make_tokenizer(
                load_tokenizer(checkpoint).tokenizer.to_str(), config.vocab_size, config.eos_token_ids
            )

        return cls(make, config.eos_token_ids, num_threads=num_threads)

    def __len__(self) -> int:
        return len(self._held)

    def prepare(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        """Compiles a grammar unless it is held.

        Of two calls' `live_keys` those with the greater `revision` count. Raises RuntimeFailure "grammar_invalid" or
        "grammars_full", CheckpointError for a checkpoint whose tokenizer cannot be read.
        """
        began = time.perf_counter_ns()
        with self._lock:
            if revision > self._revision:
                self._live, self._revision = frozenset(live_keys), revision
            if key in self._held:
                self._held.move_to_end(key)
                return Preparation(True, time.perf_counter_ns() - began)
        num_bytes = len(grammar.encode())
        with self._compiling:
            held = _Held(self._compile(grammar), num_bytes)
        with self._lock:
            self._make_room(num_bytes)
            self._held[key] = held
        return Preparation(False, time.perf_counter_ns() - began)

    def begin_epoch(self) -> None:
        """Revisions count anew, and nothing is live until the scheduler says so again."""
        with self._lock:
            self._live, self._revision = frozenset(), 0

    def matcher(self, key: bytes) -> LLMatcher | None:
        """A matcher at the start of a grammar, to be copied; None for a key that is not held."""
        with self._lock:
            held = self._held.get(key)
        return None if held is None else held.matcher

    def close(self) -> None:
        """Lets the threads end."""
        self.threads.close()

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            if self._tokenizer is None:
                self._tokenizer = self._make()
            return compile_grammar(self._tokenizer, grammar)
        except GrammarRefused as error:
            raise RuntimeFailure("grammar_invalid", f"the grammar does not compile: {error}") from error

    def _make_room(self, num_bytes: int) -> None:
        idle = [key for key in self._held if key not in self._live]
        total = num_bytes + sum(held.num_bytes for held in self._held.values())
        num_idle = len(idle)
        for key in idle:
            if num_idle <= MAX_IDLE and len(self._held) < MAX_LIVE_GRAMMARS and total <= MAX_LIVE_BYTES:
                break
            total -= self._held.pop(key).num_bytes
            num_idle -= 1
        if len(self._held) >= MAX_LIVE_GRAMMARS or total > MAX_LIVE_BYTES:
            raise RuntimeFailure(
                "grammars_full",
                f"the worker holds {len(self._held)} grammars of live requests, and has no room for another one",
                {"limit": str(MAX_LIVE_GRAMMARS), "limit_bytes": str(MAX_LIVE_BYTES)},
            )
