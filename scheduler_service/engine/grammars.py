"""The grammars of live requests: checked where they can be killed, and brought to every worker before they are used."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Coroutine, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from scheduler_service.engine.changes import all_of
from scheduler_service.engine.helpers import HelperDied, Helpers, HelperTimeout
from scheduler_service.engine.validate import Checked
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
# What a call gets when workers are lost: others take their place, or the service ends.
_EPOCH_ENDS = frozenset({"STALE_EPOCH", "WRONG_PHASE", "WORKER_FAILED", "MODEL_NOT_READY"})
_NEXT_EPOCH_S = 60.0


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


class Grammars:
    """The owner of the grammars that live requests use: none is planned with before all workers have its grammar."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._ports: list[GrammarPort] = []
        self._epoch = 0
        self._revision = 0
        self._live: dict[bytes, _Live] = {}
        self._next_epoch = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Grammars in use."""
        return len(self._live)

    async def acquire(self, wanted: StructuredOutput) -> bytes:
        """The key of a grammar that all workers have from now on, until it is released as often.

        Raises GRAMMAR_INVALID, GRAMMAR_TOO_COMPLEX, GRAMMARS_FULL, or what a worker raises.
        """
        grammar = await self._checker.check(wanted)
        key = grammar_key(grammar)
        live = self._live.get(key)
        if live is None:
            self._check_room(len(grammar))
            live = self._live[key] = _Live(grammar)
        live.num_users += 1
        try:
            await self._bring(key, live)
        except BaseException:
            self.release(key)
            raise
        return key

    async def hold(self, wanted: StructuredOutput, checked: Checked, holds: ExitStack) -> Checked:
        """A checked call with the key of its grammar, acquired until `holds` is closed. Raises as `acquire` does."""
        key = await self.acquire(wanted)
        holds.callback(self.release, key)
        # Drafts are no guess at what a grammar allows: it would have to go on over each of them.
        return replace(checked, sampling=replace(checked.sampling, grammar_key=key), max_draft_tokens=0)

    def release(self, key: bytes) -> None:
        """One request less uses a grammar. Workers may forget it once none does."""
        live = self._live[key]
        live.num_users -= 1
        if live.num_users == 0:
            del self._live[key]

    def texts(self, keys: Set[bytes]) -> dict[bytes, str]:
        """The grammars of these keys, as far as they are live or have lately been checked."""
        live = {key: live.grammar for key, live in self._live.items() if key in keys}
        return {**self._checker.texts(keys), **live}

    async def begin_epoch(self, ports: Sequence[GrammarPort], epoch: int) -> None:
        """Brings what is live to the workers of a new epoch, before any sequence comes back.

        Raises StepwireError when a worker is lost. A grammar that one does not take concerns who uses it alone.
        """
        self._ports, self._epoch = list(ports), epoch
        for key, live in self._live.items():
            live.preparation = _begin(self._prepare(key, live))
        self._next_epoch.set()
        self._next_epoch = asyncio.Event()
        preparations = [live.preparation for live in self._live.values() if live.preparation is not None]
        for outcome in await asyncio.gather(*preparations, return_exceptions=True):
            if isinstance(outcome, StepwireError) and outcome.reason in _EPOCH_ENDS:
                raise outcome

    async def close(self) -> None:
        """Ends the processes of the checks."""
        await self._checker.close()

    async def _bring(self, key: bytes, live: "_Live") -> None:
        """Returns when all workers have a grammar: when an epoch ends meanwhile, those of the next one."""
        while True:
            next_epoch = self._next_epoch
            if live.preparation is None or _has_failed(live.preparation):
                live.preparation = _begin(self._prepare(key, live))
            preparation = live.preparation
            try:
                await asyncio.shield(preparation)
                return
            except StepwireError as error:
                if error.reason not in _EPOCH_ENDS:
                    raise
                try:
                    async with asyncio.timeout(_NEXT_EPOCH_S):
                        await next_epoch.wait()
                except TimeoutError:
                    raise error from None

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
