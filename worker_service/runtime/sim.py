"""A runtime without a device: everything but the arithmetic. Imports no torch.

It reads a checkpoint's headers and tokenizer, checks every step as the real one does, and answers
with tokens that are a function of (seed, sequence index, output position) alone. A step takes the
time that stepwire.simulation.cost says, as wall time. It is for what lies around a model: the
protocol, recovery, the door under load, sizes that no machine at hand has.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import LoadCancelled
from loader.shares import RankPlace
from loader.tokenizer import load_tokenizer
from stepwire.simulation.cost import CostModel, Hardware, ModelShape, StepLoad
from stepwire.simulation.shapes import shape_of_checkpoint
from worker_service.runtime.adapters import NoAdapters
from worker_service.runtime.checks import CheckedStep, check_step
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.grammars import Preparation
from worker_service.runtime.report import (
    AllocatorReport,
    CollectiveCost,
    DeviceInfo,
    LoadSummary,
    Meeting,
    MemoryReport,
    Phase,
    Profile,
    SleepLevel,
)
from worker_service.runtime.rng import uniforms
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import (
    MAX_PROMPT_POSITIONS,
    Logprobs,
    PromptLogprobs,
    StepInput,
    StepOutput,
    nobody_waits,
)

T = TypeVar("T")
_NO_GRAMMARS = "a simulated device answers nonsense, and keeps to no form of output"
IntArray = NDArray[np.int64]

_ALONE = Meeting()
_NOWHERE = "nowhere:1"
_LOWER_KV = "raise sim_memory_bytes, memory_fraction or memory_limit_bytes, or use a smaller model"


class SimSettings(Protocol):
    """What this runtime needs of the worker's settings. A rate of 0 is without limit."""

    @property
    def memory_fraction(self) -> float: ...
    @property
    def memory_limit_bytes(self) -> int | None: ...
    @property
    def kv_cache_bytes(self) -> int | None: ...
    @property
    def sim_compute_flops(self) -> float: ...
    @property
    def sim_bandwidth_bytes(self) -> float: ...
    @property
    def sim_latency_s(self) -> float: ...
    @property
    def sim_memory_bytes(self) -> int: ...
    @property
    def sim_fatal_token(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model as far as it is simulated. `choices` [n] are the token ids that may be sampled."""

    checkpoint: Checkpoint
    dtype: str
    shape: ModelShape
    choices: IntArray


class SimRuntime:
    """Implements worker_service.rpc.ports.Runtime. All calls block and belong on one thread.

    `sleep(seconds)` spends the time of a step; tests give their own.
    """

    def __init__(self, settings: SimSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._hardware = Hardware(
            "sim",
            settings.sim_compute_flops,
            settings.sim_bandwidth_bytes,
            settings.sim_latency_s,
            settings.sim_memory_bytes,
        )
        self._loaded: _Loaded | None = None
        self._runner: SimRunner | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences it knows. May be read from any thread."""
        runner = self._runner
        return 0 if runner is None else runner.num_sequences

    def init_device(self, place: RankPlace, meeting: Meeting = _ALONE) -> DeviceInfo:  # noqa: ARG002
        """Takes a place. The ranks of a group need not meet: each draws the same tokens, and takes the time of all."""
        memory = self._hardware.memory_bytes
        return DeviceInfo("sim", "simulated device", memory, memory, _NOWHERE if place.num_ranks > 1 else "")

    @property
    def collective_cost(self) -> CollectiveCost:
        """None."""
        return CollectiveCost()

    @property
    def allocator(self) -> AllocatorReport:
        """Nothing: it allocates none."""
        return AllocatorReport()

    def leave_group(self) -> None:
        """Nothing connects the ranks."""

    def on_all_ranks(self, is_so: bool) -> bool:
        """What it is here: what it is asked for, each rank can do or leave by itself."""
        return is_so

    def load_model(
        self,
        path: Path,
        dtype: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        quantize: str = "none",
    ) -> LoadSummary:
        """Reads headers and tokenizer. Raises CheckpointError, LoadCancelled, and RuntimeFailure "out_of_memory", or
        "unsupported" for weights that are to be quantised: the cost model knows only those of the checkpoint."""
        begin = time.perf_counter_ns()
        progress("inspect", 0, 0)
        if quantize != "none":
            raise RuntimeFailure("unsupported", f"a simulated device does not quantize to {quantize}; leave it out")
        checkpoint = open_checkpoint(path)
        chosen = checkpoint.config.dtype if dtype == "auto" else dtype
        held = self._loaded
        if held is not None and held.checkpoint.fingerprint == checkpoint.fingerprint and held.dtype == chosen:
            return self._summary(held, already_loaded=True, begin=begin)
        self.reset(Phase.INITIALISED)
        shape = shape_of_checkpoint(checkpoint, chosen)
        self._check_fits(shape.weight_bytes, f"the weights of {path}")
        choices = _visible_token_ids(checkpoint)
        if cancelled():
            raise LoadCancelled
        progress("attach", shape.weight_bytes, shape.weight_bytes)
        self._loaded = loaded = _Loaded(checkpoint, chosen, shape, choices)
        return self._summary(loaded, already_loaded=False, begin=begin)

    def determine_available_memory(self, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """What is left of sim_memory_bytes, or kv_cache_bytes if set. Raises RuntimeFailure "out_of_memory"."""
        shape = self._need_model().shape
        self.reset(Phase.LOADED)
        # Hidden states and the MLP's, four bytes each, of all tokens, and logits of all sequences.
        activation = 4 * (6 * max_step_tokens * shape.hidden_size + max_sequences * shape.vocab_size)
        share, hard = (
            int(self._hardware.memory_bytes * self._settings.memory_fraction),
            self._settings.memory_limit_bytes,
        )
        limit = share if hard is None else min(share, hard)
        room = limit - shape.weight_bytes - activation
        wanted = self._settings.kv_cache_bytes
        if room < (wanted or 1):
            raise RuntimeFailure(
                "out_of_memory",
                f"the simulated device may use {limit} bytes, of which weights take {shape.weight_bytes} and the "
                f"largest step {activation}: too few are left for the KV cache; {_LOWER_KV}",
                {"limit_bytes": str(limit), "weight_bytes": str(shape.weight_bytes), "needed_bytes": str(wanted or 1)},
            )
        return MemoryReport(room if wanted is None else wanted, shape.weight_bytes, activation, limit)

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Counts the KV tensors' bytes, and allocates nothing. Raises RuntimeFailure "out_of_memory"."""
        loaded = self._need_model()
        self.reset(Phase.LOADED)
        num_bytes = num_blocks * block_size * loaded.shape.kv_bytes_per_token
        self._check_fits(loaded.shape.weight_bytes + num_bytes, "weights and KV cache")
        table = SequenceTable(
            vocab_size=loaded.shape.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self._runner = SimRunner(table, loaded.choices, CostModel(loaded.shape, self._hardware), self._sleep)
        return num_bytes

    def warm_up(self, max_step_tokens: int, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Nothing is cold. Drops all sequences."""
        del max_step_tokens, max_sequences
        self._need_runner().drop_sequences()
        progress(1, 1)

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Executes a step. Raises StateMismatch, with nothing changed, when it disagrees with what is held."""
        fatal = self._settings.sim_fatal_token
        if fatal is not None and any(fatal in new.token_ids for new in step.new_sequences):
            os.abort()
        return self._need_runner().execute(step, on_launch)

    def start_profile(self, max_steps: int) -> None:  # noqa: ARG002
        """Raises RuntimeFailure "unsupported": nothing is computed that could be profiled."""
        raise RuntimeFailure("unsupported", "a simulated device computes nothing: profile a worker of a real one")

    def stop_profile(self) -> Profile:
        """As `start_profile`."""
        raise RuntimeFailure("invalid", "no profile was begun; call StartProfile first")

    def adapters(self) -> NoAdapters:
        """None are taken."""
        return NoAdapters("a simulated device takes no adapters: its answers would be the same")

    def prepare_grammar(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        """Raises RuntimeFailure "unsupported"."""
        del key, grammar, live_keys, revision
        raise RuntimeFailure("unsupported", _NO_GRAMMARS)

    def sleep(self, level: SleepLevel) -> None:
        """Drops the sequences: there is no memory to give back. Forgets no weights, since it reads none."""
        del level
        self._need_runner().drop_sequences()

    def wake_up(self, cancelled: Callable[[], bool]) -> None:
        """Everything is there."""

    def reset(self, phase: Phase) -> None:
        """Goes back to an earlier phase, and drops what later ones took."""
        if phase <= Phase.CACHED and self._runner is not None:
            self._runner.drop_sequences()
        if phase <= Phase.LOADED:
            self._runner = None
        if phase <= Phase.INITIALISED:
            self._loaded = None

    def close(self) -> None:
        """Drops everything."""
        self.reset(Phase.STARTING)

    def _summary(self, loaded: _Loaded, *, already_loaded: bool, begin: int) -> LoadSummary:
        config = loaded.checkpoint.config
        return LoadSummary(
            fingerprint=loaded.checkpoint.fingerprint,
            architecture=config.architecture,
            weight_bytes=loaded.shape.weight_bytes,
            dtype=loaded.dtype,
            kv_bytes_per_token=loaded.shape.kv_bytes_per_token,
            vocab_size=config.vocab_size,
            max_position_count=config.max_position_count,
            already_loaded=already_loaded,
            duration_ns=time.perf_counter_ns() - begin,
        )

    def _check_fits(self, needed: int, what: str) -> None:
        there = self._hardware.memory_bytes
        if needed > there:
            raise RuntimeFailure(
                "out_of_memory",
                f"{what} need {needed} bytes and the simulated device has {there}; {_LOWER_KV}",
                {"needed_bytes": str(needed), "free_bytes": str(there)},
            )

    def _need_model(self) -> _Loaded:
        return _present(self._loaded, "a model", "LoadModel")

    def _need_runner(self) -> "SimRunner":
        return _present(self._runner, "a KV cache", "InitializeCache")


class SimRunner:
    """The sequences of a simulated rank, and steps on them. Keeps `table`'s limits when its sequences are dropped."""

    def __init__(
        self, table: SequenceTable, choices: IntArray, cost: CostModel, sleep: Callable[[float], None]
    ) -> None:
        self._table = table
        self._choices = choices
        self._cost = cost
        self._sleep = sleep
        self._is_timed = cost.hardware != replace(
            cost.hardware, compute_flops=0.0, bandwidth_bytes=0.0, latency_s=0.0, sequence_latency_s=0.0
        )

    @property
    def num_sequences(self) -> int:
        """Sequences it knows."""
        return len(self._table)

    def drop_sequences(self) -> None:
        """Forgets all sequences."""
        table = self._table
        self._table = SequenceTable(
            vocab_size=table.vocab_size,
            max_model_len=table.max_model_len,
            num_blocks=table.num_blocks,
            block_size=table.block_size,
        )

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Runs a step. Raises StateMismatch, having changed nothing, when it disagrees with what is held."""
        output = StepOutput(step.step_id, start_unix_ns=time.time_ns())
        begin = time.perf_counter_ns()
        checked = check_step(step, self._table)
        for new in step.new_sequences:
            if new.grammar_key:
                checked.sequence_errors.setdefault(new.sequence_id, _NO_GRAMMARS)
        self._apply(step, checked)
        output.errors.update(checked.sequence_errors)
        table = self._table
        rows = np.fromiter((table.row_of[i] for i in step.sequence_ids), np.int64, len(step.sequence_ids))
        if table.scored:
            self._score_prompts(step, rows, checked, output)
        table.num_computed[rows] += checked.scheduled
        live = ~table.skipped[rows]
        sampled = live & (table.num_computed[rows] == table.num_tokens[rows])
        on_launch()
        prepared = time.perf_counter_ns()
        if self._is_timed:
            load = StepLoad.of(checked.scheduled[live].tolist(), checked.computed[live].tolist(), int(sampled.sum()))
            self._spend(self._cost.step_seconds(load), begin)
        forwarded = time.perf_counter_ns()
        ids = np.asarray(step.sequence_ids, np.int64).reshape(-1)
        self._sample(ids[sampled], rows[sampled], output)
        output.prepare_ns = prepared - begin
        output.forward_ns = forwarded - prepared
        output.sample_ns = time.perf_counter_ns() - forwarded
        return output

    def _spend(self, seconds: float, begin_ns: int) -> None:
        """Waits until the step has taken `seconds`, what was spent on it so far included."""
        left = seconds - (time.perf_counter_ns() - begin_ns) / 1e9
        if left > 0:
            self._sleep(left)

    def _apply(self, step: StepInput, checked: CheckedStep) -> None:
        table = self._table
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            table.remove(sequence_id)
        if step.new_sequences:
            computed = dict(zip(step.sequence_ids, checked.computed.tolist(), strict=True))
            for new in step.new_sequences:
                table.add(new, computed[new.sequence_id], failed=new.sequence_id in checked.sequence_errors)
        for sequence_id, blocks in zip(step.sequence_ids, checked.new_blocks, strict=True):
            if len(blocks):
                table.append_blocks(table.row_of[sequence_id], blocks)

    def _sample(self, ids: IntArray, rows: IntArray, output: StepOutput) -> None:
        table, sampling = self._table, self._table.sampling
        if not len(rows):
            return
        positions = table.num_tokens[rows] - table.prompt_token_count[rows]
        draws = uniforms(sampling.seed[rows], sampling.sequence_index[rows], positions)
        places = (draws * len(self._choices)).astype(np.int64)
        # Before min_tokens nothing may stop a sequence: it takes the next id that does not.
        may_not_stop = sampling.min_tokens[rows] > positions
        for _ in range(int(sampling.num_stops[rows].max(initial=0))):
            blocked = may_not_stop & sampling.is_stop(rows, self._choices[places])
            if not blocked.any():
                break
            places[blocked] = (places[blocked] + 1) % len(self._choices)
        token_ids = self._choices[places]
        table.append_tokens(rows, token_ids)
        stopped = sampling.is_stop(rows, token_ids)
        table.skipped[rows[stopped]] = True
        output.sequence_ids = ids.tolist()
        output.token_ids = token_ids.tolist()
        output.stopped_sequence_ids = ids[stopped].tolist()
        for place in np.flatnonzero(sampling.num_logprobs[rows] >= 0).tolist():
            count = int(sampling.num_logprobs[rows[place]])
            output.logprobs[int(ids[place])] = self._logprobs(int(places[place]), count)

    def _score_prompts(self, step: StepInput, rows: IntArray, checked: CheckedStep, output: StepOutput) -> None:
        table, num = self._table, len(self._choices)
        columns = (step.sequence_ids, rows.tolist(), checked.computed.tolist(), checked.scheduled.tolist())
        for sequence_id, row, computed, count in zip(*columns, strict=True):
            wish = table.scored.get(row)
            if wish is None or (positions := table.take_scored(row, computed, count)) is None:
                continue
            for first in range(*positions, MAX_PROMPT_POSITIONS):
                token_ids = table.token_ids[row, first : min(first + MAX_PROMPT_POSITIONS, positions[1])].tolist()
                top = self._choices[: wish.num_top].tolist() * len(token_ids)
                value = -math.log(num)
                values = [value] * len(token_ids), top, [value] * len(top)
                output.prompt_logprobs.append((sequence_id, PromptLogprobs(first, token_ids, *values)))

    def _logprobs(self, place: int, count: int) -> Logprobs:
        """Every token is as likely as any other, so the first of the most likely are taken from the sampled one on."""
        num = len(self._choices)
        value = -math.log(num)
        top = [(int(self._choices[(place + i) % num]), value) for i in range(min(count, num))]
        return Logprobs(int(self._choices[place]), value, top)


def _visible_token_ids(checkpoint: Checkpoint) -> IntArray:
    """The ids [n] that have text: those of the model that the tokenizer knows, without special ones and ends."""
    tokenizer = load_tokenizer(checkpoint)
    hidden = tokenizer.special_token_ids | set(checkpoint.config.eos_token_ids)
    num = min(checkpoint.config.vocab_size, tokenizer.vocab_size)
    choices = np.array([token_id for token_id in range(num) if token_id not in hidden], np.int64)
    if not len(choices):
        raise RuntimeFailure("unsupported", f"the tokenizer of {checkpoint.path} has special tokens only")
    return choices


def _present(value: T | None, what: str, call: str) -> T:
    if value is None:
        raise RuntimeFailure("invalid", f"the worker does not hold {what} yet; call {call} first")
    return value
