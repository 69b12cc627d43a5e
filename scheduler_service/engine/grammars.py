"""The grammars of live requests: checked where they can be killed, and brought to every worker before they are used."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from scheduler_service.engine.changes import all_of
from scheduler_service.engine.helpers import HelperDied, Helpers, HelperTimeout
from scheduler_service.engine.values import StructuredOutput
from stepwire.grammars import MAX_LIVE_BYTES, MAX_LIVE_GRAMMARS, grammar_key
from stepwire.rpc.errors import StepwireError

T = TypeVar("T")

_MODULE = "scheduler_service.engine.grammar_process"
_NUM_PROCESSES = 2
_MAX_CHECKED_BYTES = 64 << 20
_MAX_CHECKED = 4096
# A process may also be too slow, or die, because the machine is short of something.
_DOUBT_S = 30.0
_RETRY_AFTER_S = 1.0
EPOCH_ENDS = frozenset({"STALE_EPOCH", "WRONG_PHASE", "WORKER_FAILED", "MODEL_NOT_READY"})
"""What a call gets when workers are lost: others take their place, or the service ends."""


@dataclass(frozen=True, slots=True)
class PreparedGrammar:
    """A grammar on its way to a worker. Of two with different `live_keys` the one of the greater `revision` counts."""

    key: bytes
    grammar: str
    live_keys: tuple[bytes, ...]
    revision: int


class GrammarPort(Protocol):
    """A worker, as far as grammars go."""

    async def prepare_grammar(self, epoch: int, prepared: PreparedGrammar) -> None:
        """Makes a grammar known. Raises StepwireError."""


class GrammarChecker:
    """Makes grammars of what clients ask for, in processes that can be killed. Remembers what came of it."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], *, time_limit_s: float = 5.0
    ) -> None:
        greeting = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
        self._helpers = Helpers(_MODULE, time_limit_s=time_limit_s, num_processes=_NUM_PROCESSES, greeting=greeting)
        self._checked: OrderedDict[bytes, _Checked] = OrderedDict()
        self._num_bytes = 0

    async def check(self, wanted: StructuredOutput) -> str:
        """The grammar, in llguidance's form. Raises GRAMMAR_INVALID or GRAMMAR_TOO_COMPLEX."""
        question = wanted.question()
        digest = hashlib.sha256(json.dumps(question).encode()).digest()
        checked = self._checked.get(digest)
        if checked is None or checked.is_stale:
            self._forget(digest)
            checked = self._checked[digest] = _Checked(_begin(self._ask(wanted, question)))
            checked.task.add_done_callback(lambda _: self._take(digest, checked))
        else:
            self._checked.move_to_end(digest)
        outcome = await asyncio.shield(checked.task)
        if isinstance(outcome, StepwireError):
            raise replace(outcome)
        return outcome

    def texts(self, keys: Set[bytes]) -> dict[bytes, str]:
        """The grammars of these keys that are remembered."""
        done = [each for each in self._checked.values() if each.key in keys]
        return {each.key: str(each.task.result()) for each in done}

    async def close(self) -> None:
        """Ends the processes."""
        await self._helpers.close()

    async def _ask(self, wanted: StructuredOutput, question: dict[str, object]) -> str | StepwireError:
        field, limit_s = wanted.kind, self._helpers.time_limit_s
        try:
            answer = await self._helpers.ask(question)
        except HelperTimeout:
            return _too_complex(field, f"it was not compiled within {limit_s:g} s (grammar_timeout)")
        except HelperDied:
            return _too_complex(field, "compiling it killed the process that did so; it may need too much memory")
        if "error" not in answer:
            grammar: str = answer["grammar"]
            return grammar
        if answer["is_complex"]:
            return _too_complex(field, answer["error"])
        place = answer["place"]
        where = f" at {place}" if place else ""
        return StepwireError(
            "GRAMMAR_INVALID",
            f"{field} cannot be held to{where}: {answer['error']}",
            {"field": field, "place": place[:200], "cause": answer["error"][:200]},
        )

    def _take(self, digest: bytes, checked: "_Checked") -> None:
        """Counts what is kept of an outcome, and forgets what was not asked for in a long time."""
        if self._checked.get(digest) is not checked:
            return
        if checked.task.cancelled() or checked.task.exception() is not None:
            del self._checked[digest]
            return
        outcome = checked.task.result()
        if isinstance(outcome, str):
            checked.key, checked.num_bytes = grammar_key(outcome), len(outcome.encode())
        elif outcome.reason == "GRAMMAR_TOO_COMPLEX":
            checked.stale_at = asyncio.get_running_loop().time() + _DOUBT_S
        self._num_bytes += checked.num_bytes
        for other in list(self._checked):
            if self._num_bytes <= _MAX_CHECKED_BYTES and len(self._checked) <= _MAX_CHECKED:
                break
            if self._checked[other].task.done():
                self._forget(other)

    def _forget(self, digest: bytes) -> None:
        checked = self._checked.pop(digest, None)
        if checked is not None:
            self._num_bytes -= checked.num_bytes


@dataclass(slots=True, eq=False)
class _Checked:
    """A check that goes on or has ended. `key` is that of the grammar that came of it; `stale_at` is when it is to be
    made again, by the loop's clock."""

    task: "asyncio.Task[str | StepwireError]"
    key: bytes = b""
    num_bytes: int = 0
    stale_at: float | None = None

    @property
    def is_stale(self) -> bool:
        return self.stale_at is not None and asyncio.get_running_loop().time() >= self.stale_at


@dataclass(frozen=True, slots=True, eq=False)
class GrammarHold:
    """One request's use of a grammar, on the workers of one replica. They may forget it once `release` was called for
    each."""

    grammar: str
    release: Callable[[], None]


class Grammars:
    """The owner of the grammars that live requests of a replica use: none is planned with before all workers have its
    grammar."""

    def __init__(self) -> None:
        self._ports: list[GrammarPort] = []
        self._epoch = 0
        self._revision = 0
        self._live: dict[bytes, _Live] = {}

    @property
    def num_live(self) -> int:
        """Grammars in use."""
        return len(self._live)

    async def acquire(self, grammar: str) -> "GrammarHold":
        """Holds a grammar, which all workers have from now on.

        Raises GRAMMARS_FULL, or what a worker raises; one of EPOCH_ENDS when workers are lost.
        """
        key = grammar_key(grammar)
        live = self._live.get(key)
        if live is None:
            self._check_room(len(grammar))
            live = self._live[key] = _Live(grammar)
        live.num_users += 1
        try:
            if live.preparation is None or _has_failed(live.preparation):
                live.preparation = _begin(self._prepare(key, live))
            await asyncio.shield(live.preparation)
        except BaseException:
            self._release(key)
            raise
        return GrammarHold(grammar, lambda: self._release(key))

    def texts(self, keys: Set[bytes]) -> dict[bytes, str]:
        """The grammars of these keys that are in use."""
        return {key: live.grammar for key, live in self._live.items() if key in keys}

    async def begin_epoch(self, ports: Sequence[GrammarPort], epoch: int) -> None:
        """Brings what is live to the workers of a new epoch, before any sequence comes back.

        Raises StepwireError when a worker is lost. A grammar that one does not take concerns who uses it alone.
        """
        self._ports, self._epoch = list(ports), epoch
        for key, live in self._live.items():
            live.preparation = _begin(self._prepare(key, live))
        preparations = [live.preparation for live in self._live.values() if live.preparation is not None]
        for outcome in await asyncio.gather(*preparations, return_exceptions=True):
            if isinstance(outcome, StepwireError) and outcome.reason in EPOCH_ENDS:
                raise outcome

    def _release(self, key: bytes) -> None:
        live = self._live[key]
        live.num_users -= 1
        if live.num_users == 0:
            del self._live[key]

    async def _prepare(self, key: bytes, live: "_Live") -> None:
        self._revision += 1
        prepared = PreparedGrammar(key, live.grammar, tuple(self._live), self._revision)
        await all_of(port.prepare_grammar(self._epoch, prepared) for port in self._ports)

    def _check_room(self, num_characters: int) -> None:
        num_bytes = num_characters + sum(len(live.grammar) for live in self._live.values())
        if len(self._live) >= MAX_LIVE_GRAMMARS or num_bytes > MAX_LIVE_BYTES:
            raise StepwireError(
                "GRAMMARS_FULL",
                f"live requests use {len(self._live)} different forms of output, and no more may be used at once: "
                f"{MAX_LIVE_GRAMMARS} grammars of {MAX_LIVE_BYTES} bytes together; try again later",
                {"limit": str(MAX_LIVE_GRAMMARS), "limit_bytes": str(MAX_LIVE_BYTES)},
                retry_after_s=_RETRY_AFTER_S,
            )


@dataclass(slots=True, eq=False)
class _Live:
    """A grammar in use."""

    grammar: str
    num_users: int = 0
    preparation: "asyncio.Task[None] | None" = None


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _begin(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task whose error nobody need take."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


def _too_complex(field: str, cause: str) -> StepwireError:
    return StepwireError(
        "GRAMMAR_TOO_COMPLEX", f"{field} is too complex: {cause}; make it simpler", {"field": field, "cause": cause}
    )
