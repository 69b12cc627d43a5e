"""The sequences of a simulated device, and steps on them. Imports no torch."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepwire.simulation.cost import CostModel, StepLoad
from worker_service.runtime.checks import CheckedStep, check_step
from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.masks import GrammarMasks, GrammarMissing, Masks
from worker_service.runtime.rng import uniforms
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import (
    MAX_PROMPT_POSITIONS,
    Failure,
    Logprobs,
    NewSequence,
    PromptLogprobs,
    StepInput,
    StepOutput,
    nobody_waits,
)

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_NO_TOKEN = Failure("its grammar and what else it asks for leave no token", "GRAMMAR_INVALID")


class SimRunner:
    """The sequences of a simulated rank, and steps on them. Keeps `table`'s limits when its sequences are dropped."""

    def __init__(
        self,
        table: SequenceTable,
        choices: IntArray,
        grammars: GrammarStore,
        cost: CostModel,
        sleep: Callable[[float], None],
    ) -> None:
        self._table = table
        self._choices = choices
        self._grammars = grammars
        self._masks = GrammarMasks(table.vocab_size, grammars)
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
        self._masks = GrammarMasks(table.vocab_size, self._grammars)

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Runs a step. Raises StateMismatch, having changed nothing, when it disagrees with what is held."""
        output = StepOutput(step.step_id, start_unix_ns=time.time_ns())
        begin = time.perf_counter_ns()
        checked = check_step(step, self._table)
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
        pending = self._masks.begin(rows[sampled], table) if self._masks.are_used else None
        prepared = time.perf_counter_ns()
        if self._is_timed:
            load = StepLoad.of(checked.scheduled[live].tolist(), checked.computed[live].tolist(), int(sampled.sum()))
            self._spend(self._cost.step_seconds(load), begin)
        forwarded = time.perf_counter_ns()
        ids = np.asarray(step.sequence_ids, np.int64).reshape(-1)
        masks = None if pending is None else pending.wait(rows[sampled])
        self._sample(ids[sampled], rows[sampled], masks, output)
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
            row = table.remove(sequence_id)
            if row is not None:
                self._masks.remove(row)
        if step.new_sequences:
            computed = dict(zip(step.sequence_ids, checked.computed.tolist(), strict=True))
            for new in step.new_sequences:
                failed = new.sequence_id in checked.sequence_errors
                row = table.add(new, computed[new.sequence_id], failed=failed)
                if new.grammar_key and not failed:
                    self._take_grammar(row, new, checked)
        for sequence_id, blocks in checked.new_blocks.items():
            table.append_blocks(table.row_of[sequence_id], blocks)

    def _take_grammar(self, row: int, new: NewSequence, checked: CheckedStep) -> None:
        try:
            self._masks.take(row, new.grammar_key)
        except GrammarMissing as error:
            checked.sequence_errors[new.sequence_id] = str(error)
            self._table.skipped[row] = True

    def _sample(self, ids: IntArray, rows: IntArray, masks: Masks | None, output: StepOutput) -> None:
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
        formed = {} if masks is None else self._formed(ids, rows, draws, may_not_stop, masks, output)
        for place, token_id in formed.items():
            token_ids[place] = token_id
        good = np.array([sequence_id not in output.errors for sequence_id in ids.tolist()])
        table.skipped[rows[~good]] = True
        ids, rows, token_ids, places = ids[good], rows[good], token_ids[good], places[good]
        table.append_tokens(rows, token_ids)
        stopped = sampling.is_stop(rows, token_ids)
        table.skipped[rows[stopped]] = True
        output.sequence_ids = ids.tolist()
        output.token_ids = token_ids.tolist()
        output.stopped_sequence_ids = ids[stopped].tolist()
        for place in np.flatnonzero(sampling.num_logprobs[rows] >= 0).tolist():
            count = int(sampling.num_logprobs[rows[place]])
            output.logprobs[int(ids[place])] = self._logprobs(int(token_ids[place]), int(places[place]), count)

    def _formed(
        self,
        ids: IntArray,
        rows: IntArray,
        draws: NDArray[np.float64],
        may_not_stop: BoolArray,
        masks: Masks,
        output: StepOutput,
    ) -> dict[int, int]:
        """The tokens at the places that have a grammar, drawn from all that it allows; those without any fail."""
        formed = {}
        for place in masks.places.tolist():
            failure = masks.errors.get(place)
            if failure is None:
                allowed = masks.allowed(place)
                if may_not_stop[place]:
                    row = np.full(len(allowed), rows[place])
                    allowed = allowed[~self._table.sampling.is_stop(row, allowed)]
                if len(allowed):
                    formed[place] = int(allowed[int(draws[place] * len(allowed))])
                    continue
                failure = _NO_TOKEN
            output.fail(int(ids[place]), failure)
        return formed

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

    def _logprobs(self, token_id: int, place: int, count: int) -> Logprobs:
        """Every token is as likely as any other, so the first of the most likely are taken from where one was drawn."""
        num = len(self._choices)
        value = -math.log(num)
        top = [(int(self._choices[(place + i) % num]), value) for i in range(min(count, num))]
        return Logprobs(token_id, value, top)
