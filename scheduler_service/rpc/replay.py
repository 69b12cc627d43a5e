"""Runs a flight recording's steps on workers again, and compares.

What the workers knew before the first step is computed anew from token ids: sequences that had begun are
prefilled as far as they were, and a prefix that came from the cache is computed before its sequence comes.
Blocks are numbered anew, so that a worker with less memory will do.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_service.engine.grammars import PreparedGrammar
from scheduler_service.rpc.flight_file import new_sequences
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.grammars import MAX_LIVE_BYTES, MAX_LIVE_GRAMMARS, grammar_key
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import flight_pb2, worker_pb2

IN_FLIGHT = 2
_MAX_DIFFERENCES = 100


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A step to run; `recorded` is None for one that only restores what the workers knew."""

    step: worker_pb2.Step
    recorded: flight_pb2.FlightStep | None


@dataclass(frozen=True, slots=True)
class Difference:
    """What a step brought a sequence, where it came out otherwise."""

    step_id: int
    sequence_id: int
    recorded: tuple[int, ...]
    replayed: tuple[int, ...]


@dataclass(slots=True)
class ReplayReport:
    """What came of a replay. Times in seconds, of the recorded steps that were answered both times; `forward_s` is
    the model alone, `total_s` from sending a step, or the answer before it, to its answer."""

    num_steps: int = 0
    num_restoring_steps: int = 0
    num_tokens: int = 0
    num_left_out: int = 0
    differences: list[Difference] = field(default_factory=list)
    recorded_forward_s: float = 0.0
    replayed_forward_s: float = 0.0
    replayed_total_s: float = 0.0


class ReplayPlan:
    """The steps to run for a recording.

    `num_blocks` is how many KV blocks they use, `adapters` what its sequences are computed with, `grammars` the texts
    of those that their output keeps to, by key. `num_left_out` counts sequences whose start, or whose grammar, is not
    known.
    """

    def __init__(self, recording: flight_pb2.FlightRecording) -> None:
        """Raises StepwireError FIELD_INVALID for a recording that contradicts itself."""
        self._header = recording.header
        if self._header.block_size < 1 or self._header.max_step_token_count < 1:
            raise _contradiction("its header has no block_size or max_step_token_count")
        self._blocks: dict[tuple[int, int], int] = {}
        # Of each sequence that the worker knows, its blocks; of blocks, those whose content was computed.
        self._tables: dict[int, list[int]] = {}
        self._filled: set[int] = set()
        self._new_ids: dict[int, int] = {}
        self._ended: list[int] = []
        self._left_out: set[int] = set()
        used = {new.adapter for new in new_sequences(recording)} - {""}
        recorded = {adapter.fingerprint: adapter for adapter in recording.adapters}
        self.adapters = [
            recorded.get(fingerprint, flight_pb2.FlightAdapter(fingerprint=fingerprint)) for fingerprint in sorted(used)
        ]
        self.grammars = _grammars(recording)
        ids = [i for step in recording.steps for i in step.step.sequence_ids]
        self._next_helper = max(ids, default=0) + 1
        self.steps: list[ReplayStep] = []
        for number, known in enumerate(recording.sequences, 1):
            self._restore(known, number)
        for step in recording.steps:
            self._replay(step)

    @property
    def num_blocks(self) -> int:
        """How many KV blocks the steps use."""
        return len(self._blocks)

    @property
    def num_left_out(self) -> int:
        """Sequences that the steps are without."""
        return len(self._left_out)

    def _restore(self, known: flight_pb2.FlightSequence, number: int) -> None:
        sequence, num_computed, num_blocks = known.sequence, known.computed_token_count, known.block_count
        num_tokens = len(sequence.token_ids)
        if not 1 <= num_computed < num_tokens or not 0 <= num_blocks <= num_tokens // self._header.block_size + 2:
            raise _contradiction(
                f"sequence {sequence.sequence_id} has counts that its {num_tokens} tokens do not allow"
            )
        if not self._has_grammar(sequence):
            return
        copy = worker_pb2.NewSequence()
        copy.CopyFrom(sequence)
        # Blocks of its own, whoever it shared them with.
        copy.block_ids[:] = [self._block(-number, index) for index in range(num_blocks)]
        self._tables[sequence.sequence_id] = list(copy.block_ids)
        self._prefill(copy, 0, num_computed)

    def _replay(self, recorded: flight_pb2.FlightStep) -> None:
        step = recorded.step
        out = worker_pb2.Step()
        for name in ("finished_sequence_ids", "preempted_sequence_ids"):
            gone = [sequence_id for sequence_id in getattr(step, name) if sequence_id in self._tables]
            getattr(out, name).extend(gone)
            for sequence_id in gone:
                del self._tables[sequence_id]
        for new in step.new_sequences:
            if not self._has_grammar(new):
                self._left_out.add(new.sequence_id)
                continue
            copy = worker_pb2.NewSequence()
            copy.CopyFrom(new)
            copy.block_ids[:] = [self._block(0, block_id) for block_id in new.block_ids]
            self._tables[new.sequence_id] = list(copy.block_ids)
            out.new_sequences.append(copy)
        self._copy_columns(step, out)
        filled_now = self._filled_by(out)
        computed = dict(zip(out.sequence_ids, out.computed_token_counts, strict=True))
        for new in out.new_sequences:
            self._restore_prefix(new, computed.get(new.sequence_id, 0), filled_now)
        self._filled |= filled_now
        self._emit(out, recorded)

    def _copy_columns(self, step: worker_pb2.Step, out: worker_pb2.Step) -> None:
        columns = (step.scheduled_token_counts, step.computed_token_counts, step.new_block_counts)
        if any(len(column) != len(step.sequence_ids) for column in columns) or any(
            n < 0 for n in step.new_block_counts
        ):
            raise _contradiction(f"step {step.step_id} has columns of different lengths")
        drafts = dict(zip(step.sequence_ids, step.draft_token_counts, strict=False))
        if step.draft_token_counts and len(step.draft_token_counts) != len(step.sequence_ids):
            raise _contradiction(f"step {step.step_id} has columns of different lengths")
        start = 0
        for sequence_id, scheduled, num_computed, num_blocks in zip(step.sequence_ids, *columns, strict=True):
            added = step.new_block_ids[start : start + num_blocks]
            start += num_blocks
            if sequence_id not in self._tables:
                self._left_out.add(sequence_id)
                continue
            blocks = [self._block(0, block_id) for block_id in added]
            self._tables[sequence_id] += blocks
            self._filled.difference_update(blocks)
            out.sequence_ids.append(sequence_id)
            out.scheduled_token_counts.append(scheduled)
            out.computed_token_counts.append(num_computed)
            out.new_block_counts.append(num_blocks)
            out.new_block_ids.extend(blocks)
            if step.draft_token_counts:
                out.draft_token_counts.append(drafts[sequence_id])

    def _filled_by(self, step: worker_pb2.Step) -> set[int]:
        """The blocks that are full after a step and were not before."""
        size = self._header.block_size
        filled: set[int] = set()
        columns = zip(step.sequence_ids, step.computed_token_counts, step.scheduled_token_counts, strict=True)
        for sequence_id, computed, scheduled in columns:
            filled.update(self._tables[sequence_id][computed // size : (computed + scheduled) // size])
        return filled

    def _restore_prefix(self, new: worker_pb2.NewSequence, num_computed: int, filled_now: set[int]) -> None:
        """Fills the blocks that a sequence took from the prefix cache, as a sequence of the same tokens; not those
        that a replayed step has filled, or fills now."""
        size = self._header.block_size
        held = list(new.block_ids[: num_computed // size])
        lacking = [i for i, block_id in enumerate(held) if block_id not in self._filled | filled_now]
        if not lacking or num_computed >= len(new.token_ids):
            return
        helper = worker_pb2.NewSequence()
        helper.CopyFrom(new)
        helper.sequence_id = self._next_helper
        self._next_helper += 1
        helper.block_ids[:] = held[: lacking[-1] + 1]
        self._prefill(helper, lacking[0] * size, len(helper.block_ids) * size)
        self._ended.append(helper.sequence_id)
        self._filled.update(held)

    def _prefill(self, new: worker_pb2.NewSequence, first: int, end: int) -> None:
        """Steps that compute a new sequence's tokens from `first` to before `end`, where there are more."""
        size = self._header.max_step_token_count
        for start in range(first, end, size):
            step = worker_pb2.Step(
                new_sequences=[new] if start == first else [],
                sequence_ids=[new.sequence_id],
                scheduled_token_counts=[min(size, end - start)],
                computed_token_counts=[start],
                new_block_counts=[0],
            )
            self._emit(step, None)

    def _emit(self, step: worker_pb2.Step, recorded: flight_pb2.FlightStep | None) -> None:
        step.step_id = len(self.steps) + 1
        if recorded is not None:
            # An answer before the first recorded step is one before the replay.
            step.applied_step_id = self._new_ids.get(recorded.step.applied_step_id, 0)
            self._new_ids[recorded.step.step_id] = step.step_id
        step.finished_sequence_ids.extend(self._ended)
        self._ended = []
        self.steps.append(ReplayStep(step, recorded))

    def _has_grammar(self, sequence: worker_pb2.NewSequence) -> bool:
        return not sequence.grammar_key or sequence.grammar_key in self.grammars

    def _block(self, owner: int, index: int) -> int:
        return self._blocks.setdefault((owner, index), len(self._blocks))


async def prepare(worker: WorkerClient, epoch: int, plan: ReplayPlan, adapter_paths: Sequence[str]) -> None:
    """Brings adapters and grammars to a worker. Of the adapters, those at `adapter_paths` are taken first, then those
    that lie where they were recorded. Raises StepwireError ADAPTER_NOT_FOUND for one that is nowhere, and others."""
    if plan.adapters:
        held = {(await worker.adapters.add(epoch, path, "")).fingerprint for path in adapter_paths}
        for adapter in plan.adapters:
            if adapter.fingerprint not in held:
                await _add(worker, epoch, adapter)
    keys = tuple(plan.grammars)
    for revision, (key, text) in enumerate(plan.grammars.items(), 1):
        await worker.prepare_grammar(epoch, PreparedGrammar(key, text, keys, revision))


async def _add(worker: WorkerClient, epoch: int, adapter: flight_pb2.FlightAdapter) -> None:
    name = f"{adapter.name!r} " if adapter.name else ""
    what = f"the recording needs the adapter {name}with the fingerprint {adapter.fingerprint}"
    give = "give the folder that holds it with --adapter"
    metadata = {"adapter": adapter.name, "fingerprint": adapter.fingerprint, "file": adapter.path}
    if not adapter.path:
        raise StepwireError("ADAPTER_NOT_FOUND", f"{what}, and does not say where it lay: {give}", metadata)
    try:
        await worker.adapters.add(epoch, adapter.path, adapter.fingerprint)
    except StepwireError as error:
        if not error.reason.startswith("CHECKPOINT_"):
            raise
        text = f"{what}, which is not at {adapter.path} any more ({error.message}): {give}"
        raise StepwireError("ADAPTER_NOT_FOUND", text, metadata) from error


async def replay(worker: WorkerClient, epoch: int, plan: ReplayPlan) -> ReplayReport:
    """Runs the steps on a worker that is ready and has what they need, as many in flight as a scheduler has. Raises
    StepwireError."""
    report = ReplayReport(num_left_out=plan.num_left_out)
    stream = await worker.open_stream(epoch)
    waiting: deque[tuple[ReplayStep, float]] = deque()
    last_answer = 0.0

    async def take_answer() -> None:
        nonlocal last_answer
        step, sent_at = waiting.popleft()
        result = await stream.receive_message()
        now = time.perf_counter()
        _compare(step, result, report, now - max(sent_at, last_answer))
        last_answer = now

    try:
        for step in plan.steps:
            step.step.epoch = epoch
            waiting.append((step, time.perf_counter()))
            await stream.send_message(step.step)
            if len(waiting) >= IN_FLIGHT:
                await take_answer()
        while waiting:
            await take_answer()
    except StepwireError as error:
        if report.differences and error.reason == "STATE_MISMATCH":
            # What was recorded no longer follows from what came out.
            return report
        raise
    finally:
        stream.cancel()
    return report


def _compare(step: ReplayStep, result: worker_pb2.StepResult, report: ReplayReport, seconds: float) -> None:
    if step.recorded is None:
        report.num_restoring_steps += 1
        return
    report.num_steps += 1
    if not step.recorded.HasField("result"):
        return
    recorded = step.recorded.result
    report.recorded_forward_s += recorded.timings.forward_ns / 1e9
    report.replayed_forward_s += result.timings.forward_ns / 1e9
    report.replayed_total_s += seconds
    replayed = set(step.step.sequence_ids)
    before = {i: tokens for i, tokens in _tokens(recorded).items() if i in replayed}
    after = _tokens(result)
    report.num_tokens += sum(map(len, after.values()))
    for sequence_id in sorted(before.keys() | after.keys()):
        was, came = before.get(sequence_id, ()), after.get(sequence_id, ())
        if was != came and len(report.differences) < _MAX_DIFFERENCES:
            report.differences.append(Difference(step.recorded.step.step_id, sequence_id, was, came))


def _tokens(result: worker_pb2.StepResult) -> dict[int, tuple[int, ...]]:
    """What a step brought each sequence, accepted drafts first."""
    accepted = {entry.sequence_id: tuple(entry.token_ids) for entry in result.accepted}
    sampled = zip(result.sequence_ids, result.token_ids, strict=False)
    return {sequence_id: (*accepted.get(sequence_id, ()), token_id) for sequence_id, token_id in sampled}


def _grammars(recording: flight_pb2.FlightRecording) -> dict[bytes, str]:
    """The texts by key, as many as a worker holds at once. Raises FIELD_INVALID for a key that is another text's."""
    found: dict[bytes, str] = {}
    num_bytes = 0
    for entry in recording.grammars:
        if grammar_key(entry.grammar) != entry.grammar_key:
            raise _contradiction(f"grammar {entry.grammar_key.hex()} has another text")
        num_bytes += len(entry.grammar.encode())
        if len(found) == MAX_LIVE_GRAMMARS or num_bytes > MAX_LIVE_BYTES:
            break
        found[entry.grammar_key] = entry.grammar
    return found


def _contradiction(what: str) -> StepwireError:
    return StepwireError("FIELD_INVALID", f"the recording contradicts itself: {what}; record anew", {})
