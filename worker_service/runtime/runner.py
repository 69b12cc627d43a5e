"""Runs steps: state, batch, model, sampler."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.runtime.adapters import AdapterMissing, AdapterTable, SequenceAdapters
from worker_service.runtime.batch import StepBatch, build_batch
from worker_service.runtime.checks import CheckedStep, check_step
from worker_service.runtime.drafting import Drafter
from worker_service.runtime.executor import Executor
from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.masks import GrammarMasks, GrammarMissing
from worker_service.runtime.prompt_logprobs import ScoredPart, score_prompts, scored_parts
from worker_service.runtime.sampler import Sampled, Sampler
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.shared_tokens import SharedTokens
from worker_service.runtime.step import Failure, NewSequence, StepInput, StepOutput, nobody_waits
from worker_service.runtime.verification import drafted_before, final_places, last_places

IntArray = NDArray[np.int64]

NOT_FINITE = "the model produced logits that are not finite"


class ModelRunner:
    """Holds the sequences of one rank and executes steps on them. Used by one thread only.

    What it holds of a sequence is a function of what the scheduler sent and of the tokens sampled
    since; it can be dropped at any time.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_model_len: int,
        adapters: AdapterTable | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        self._executor = executor
        self._grammars = grammars
        self._adapters = SequenceAdapters(adapters)
        self._shared = None if executor.group is None else SharedTokens(executor.group)
        self.max_model_len = max_model_len
        self.drop_sequences()

    @property
    def num_sequences(self) -> int:
        """Sequences it knows."""
        return len(self._table)

    def drop_sequences(self) -> None:
        """Forgets all sequences; the cache's content means nothing from then on."""
        if self._shared is not None:
            self._shared.drop()
        self._adapters.clear()
        self._table = SequenceTable(
            vocab_size=self._executor.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=self._executor.num_blocks,
            block_size=self._executor.block_size,
        )
        self._sampler = Sampler(self._executor.vocab_size, self._executor.device)
        self._drafter = Drafter(self._table, self._executor.token_cost)
        self._masks = GrammarMasks(self._executor.vocab_size, self._grammars)

    @torch.inference_mode()
    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Runs a step; calls `on_launch` before the forward pass.

        Raises StateMismatch, having changed nothing, when it disagrees with what is held.
        """
        output = StepOutput(step.step_id, start_unix_ns=time.time_ns())
        begin = time.perf_counter_ns()
        if self._shared is not None:
            for step_id, batch, sampled in self._shared.needed_for(step):
                self._record(batch, sampled, StepOutput(step_id))
        checked = check_step(step, self._table)
        self._apply(step, checked)
        output.errors.update(checked.sequence_errors)
        rows = self._table.rows_of(step.sequence_ids)
        drafts = None if checked.drafts is None else self._draft(checked, checked.drafts, rows, output)
        decodes_first = self._executor.wants_decodes_first
        batch = build_batch(
            step, checked, self._table, self._adapters.by_row, drafts=drafts, decodes_first=decodes_first
        )
        self._table.num_computed[rows] += checked.scheduled
        if not len(batch):
            output.prepare_ns = time.perf_counter_ns() - begin
            return output
        output.prepare_ns = time.perf_counter_ns() - begin
        on_launch()
        self._compute(batch, output)
        return output

    def _apply(self, step: StepInput, checked: CheckedStep) -> None:
        table, entered = self._table, []
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            row = table.remove(sequence_id)
            if row is not None:
                self._sampler.penalties.remove(row)
                self._sampler.edits.remove(row)
                self._adapters.leave(row)
                self._drafter.remove(row)
                self._masks.remove(row)
        if table.accepted:
            table.forget_accepted(step.applied_step_id)
        computed = dict(zip(step.sequence_ids, checked.computed.tolist(), strict=True)) if step.new_sequences else {}
        for new in step.new_sequences:
            failed = new.sequence_id in checked.sequence_errors
            row = table.add(new, computed[new.sequence_id], failed=failed)
            if failed or not self._take_extras(row, new, checked):
                continue
            entered.append(np.asarray(new.block_ids, np.int64)[-(-computed[new.sequence_id] // table.block_size) :])
            if table.sampling.has_edits[row]:
                self._sampler.edits.add(row, new.sampling)
            if table.sampling.has_penalty[row]:
                tokens = table.token_ids[row, : len(new.token_ids)].astype(np.int64)
                prompt, so_far = np.split(tokens, [new.prompt_token_count])
                self._sampler.penalties.add(row, prompt, so_far)
        for sequence_id, blocks in checked.new_blocks.items():
            row = table.row_of[sequence_id]
            table.append_blocks(row, blocks)
            if not table.skipped[row]:
                entered.append(blocks)
        if entered:
            self._executor.take_blocks(entered)

    def _take_extras(self, row: int, new: NewSequence, checked: CheckedStep) -> bool:
        """Gives a new sequence its adapter and its grammar; one that is not to be had is the sequence's error."""
        try:
            if new.adapter:
                self._adapters.take(row, new.adapter)
            if new.grammar_key:
                self._masks.take(row, new.grammar_key)
        except (AdapterMissing, GrammarMissing) as error:
            checked.sequence_errors[new.sequence_id] = str(error)
            self._table.skipped[row] = True
            return False
        return True

    def _draft(self, checked: CheckedStep, most: IntArray, rows: IntArray, output: StepOutput) -> IntArray | None:
        """Drafts in as many tokens as the step has to spare; how many for each sequence, None for none at all."""
        num_tokens = int(checked.scheduled[~self._table.skipped[rows]].sum())
        drafts = self._drafter.draft(rows, most, self._executor.num_cheap_tokens - num_tokens)
        output.num_draft_tokens = int(drafts.sum())
        return drafts if output.num_draft_tokens else None

    def _compute(self, batch: StepBatch, output: StepOutput) -> None:
        begin, table = time.perf_counter_ns(), self._table
        if self._shared is not None and not self._shared.samples:
            self._executor.forward(batch)
            self._shared.expect(output.step_id, batch)
            output.forward_ns = time.perf_counter_ns() - begin
            return
        if self._shared is not None:
            self._shared.begin(batch)
        # Computed beside the forward pass.
        pending = self._masks.begin(batch.rows[batch.sampled], table) if self._masks.are_used else None
        prompts = scored_parts(batch, table) if table.scored else ()
        if prompts:
            batch, hidden = self._score_prompts(batch, prompts, output)
        rows = batch.rows[batch.sampled]
        num_outputs = table.num_tokens[rows] - table.prompt_token_count[rows]
        if batch.offsets is not None:
            num_outputs += batch.offsets
        is_greedy = pending is None and self._sampler.is_greedy(rows, num_outputs, table.sampling)
        if len(rows) and is_greedy and not prompts:
            # The executor has a shorter way to the likeliest token than through all logits.
            token_ids, finite = self._executor.greedy(batch)
            output.forward_ns = time.perf_counter_ns() - begin
            self._record(batch, Sampled(token_ids, ~finite), output)
        else:
            if not prompts:
                hidden = self._executor.forward(batch)
            logits = self._executor.logits(hidden) if len(rows) else None
            output.forward_ns = time.perf_counter_ns() - begin
            if logits is not None:
                drafted = drafted_before(batch, table)
                masks = None if pending is None else pending.wait(rows)
                sampled = self._sampler.sample(logits, rows, num_outputs, table.sampling, drafted, masks)
                self._record(batch, sampled, output)
        if self._shared is not None:
            self._shared.publish()
        output.sample_ns = time.perf_counter_ns() - begin - output.forward_ns

    def _score_prompts(
        self, batch: StepBatch, prompts: Sequence[ScoredPart], output: StepOutput
    ) -> tuple[StepBatch, torch.Tensor]:
        """Runs all layers and reports the prompts' log-probabilities; answers what is left to sample, and its states.

        A sequence whose prompt has no finite logits fails.
        """
        table = self._table
        wanted = np.concatenate([part.tokens for part in prompts])
        # The sampled rows are never among them: what comes after those is no prompt.
        hidden_tokens = np.sort(np.concatenate([wanted, batch.sampled_tokens]))
        hidden = self._executor.forward(replace(batch, hidden_tokens=hidden_tokens))
        places = np.searchsorted(hidden_tokens, wanted)
        for part, scores in score_prompts(self._executor, hidden, places, prompts):
            sequence_id = int(batch.sequence_ids[part.place])
            if scores is None:
                table.skipped[part.row] = True
                output.errors[sequence_id] = NOT_FINITE
            else:
                output.prompt_logprobs += [(sequence_id, piece) for piece in scores]
        good = ~table.skipped[batch.rows[batch.sampled]]
        batch = batch.sampled_at(good)
        kept = torch.from_numpy(np.searchsorted(hidden_tokens, batch.sampled_tokens))
        return batch, hidden.index_select(0, kept.to(hidden.device))

    def _record(self, batch: StepBatch, sampled: Sampled, output: StepOutput) -> None:
        if self._shared is not None and self._shared.samples:
            sampled = self._shared.share(batch, sampled)
        table, which = self._table, batch.sampled
        if batch.offsets is not None:
            last = self._accept(batch, batch.offsets, sampled, output)
            which, sampled = which[last], sampled.at(last)
        rows, ids, token_ids = batch.rows[which], batch.sequence_ids[which], sampled.token_ids
        output.logprobs = {int(ids[place]): logprobs for place, logprobs in sampled.logprobs.items()}
        if sampled.failed.any():
            table.skipped[rows[sampled.failed]] = True
            for place in np.flatnonzero(sampled.failed).tolist():
                output.fail(int(ids[place]), sampled.reasons.get(place, Failure(NOT_FINITE)))
            good = ~sampled.failed
            rows, ids, token_ids = rows[good], ids[good], token_ids[good]
        table.append_tokens(rows, token_ids)
        penalised = table.sampling.has_penalty[rows]
        if penalised.any():
            self._sampler.penalties.record(rows[penalised], token_ids[penalised])
        stopped = table.sampling.is_stop(rows, token_ids)
        if stopped.any():
            table.skipped[rows[stopped]] = True
            output.stopped_sequence_ids = ids[stopped].tolist()
        if table.num_speculating:
            table.skipped[rows[table.num_tokens[rows] == table.token_limit[rows]]] = True
        output.sequence_ids, output.token_ids = ids.tolist(), token_ids.tolist()

    def _accept(self, batch: StepBatch, offsets: IntArray, sampled: Sampled, output: StepOutput) -> IntArray:
        """Takes the drafts that were right into the table and the answer; answers each sequence's last place."""
        table, last = self._table, last_places(batch, offsets, sampled, self._table)
        for place, final in zip(last.tolist(), final_places(offsets).tolist(), strict=True):
            num_drafts, num_accepted = int(offsets[final]), int(offsets[place])
            if not num_drafts:
                continue
            sequence = batch.sampled[place]
            row, sequence_id = int(batch.rows[sequence]), int(batch.sequence_ids[sequence])
            self._drafter.learn(row, num_drafts, num_accepted)
            if not num_accepted or sampled.failed[place]:
                continue
            table.accept(row, output.step_id, num_accepted)
            token_ids = sampled.token_ids[place - num_accepted : place]
            if table.sampling.has_penalty[row]:
                self._sampler.penalties.record(np.full(num_accepted, row), token_ids)
            output.accepted[sequence_id] = token_ids.tolist()
            if place in sampled.logprobs:
                places = range(place - num_accepted, place)
                output.accepted_logprobs[sequence_id] = [sampled.logprobs[early] for early in places]
        return last
