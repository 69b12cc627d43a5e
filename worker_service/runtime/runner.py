"""Runs steps: state, batch, model, sampler."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.models.decoder import Decoder
from worker_service.runtime.attention import AttentionPlanner, PagedAttention
from worker_service.runtime.batch import StepBatch, build_batch
from worker_service.runtime.checks import CheckedStep, check_step
from worker_service.runtime.kv_cache import KvCache
from worker_service.runtime.sampler import Sampler
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import StepInput, StepOutput

IntArray = NDArray[np.int64]


class ModelRunner:
    """Holds the sequences of one rank and executes steps on them. Used by one thread only.

    What it holds of a sequence is a function of what the scheduler sent and of the tokens sampled
    since; it can be dropped at any time.
    """

    def __init__(self, model: Decoder, cache: KvCache, *, max_model_len: int, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self.max_model_len = max_model_len
        # A window that no context outgrows is none.
        windows = [w if w is not None and w < max_model_len else None for w in model.windows]
        self._planner = AttentionPlanner(cache, device, windows)
        self.drop_sequences()

    @property
    def num_sequences(self) -> int:
        """Sequences it knows."""
        return len(self._table)

    def drop_sequences(self) -> None:
        """Forgets all sequences; the cache's content means nothing from then on."""
        self._table = SequenceTable(
            vocab_size=self._model.config.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=self._cache.num_blocks,
            block_size=self._cache.block_size,
        )
        self._sampler = Sampler(self._model.config.vocab_size, self._device)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Runs a step. Raises StateMismatch, having changed nothing, when it disagrees with what is held."""
        output = StepOutput(step.step_id, start_unix_ns=time.time_ns())
        begin = time.perf_counter_ns()
        checked = check_step(step, self._table)
        self._apply(step, checked)
        output.errors.update(checked.sequence_errors)
        batch = build_batch(step, checked, self._table)
        rows = np.fromiter((self._table.row_of[i] for i in step.sequence_ids), np.int64, len(step.sequence_ids))
        self._table.num_computed[rows] += checked.scheduled
        if not len(batch):
            output.prepare_ns = time.perf_counter_ns() - begin
            return output
        plan = self._planner.plan(batch.slots, batch.counts, batch.computed, batch.tables)
        attention = PagedAttention(self._cache, self._planner, plan)
        token_ids, positions = self._tensor(batch.token_ids), self._tensor(batch.positions)
        prepared = time.perf_counter_ns()
        logits = self._forward(batch, token_ids, positions, attention)
        self._wait()
        forwarded = time.perf_counter_ns()
        if logits is not None:
            self._sample(batch, logits, output)
        output.prepare_ns = prepared - begin
        output.forward_ns = forwarded - prepared
        output.sample_ns = time.perf_counter_ns() - forwarded
        return output

    def _apply(self, step: StepInput, checked: CheckedStep) -> None:
        table, entered = self._table, []
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            row = table.remove(sequence_id)
            if row is not None:
                self._sampler.penalties.remove(row)
        computed = dict(zip(step.sequence_ids, checked.computed.tolist(), strict=True))
        for new in step.new_sequences:
            failed = new.sequence_id in checked.sequence_errors
            row = table.add(new, computed[new.sequence_id], failed=failed)
            if failed:
                continue
            entered.append(np.asarray(new.block_ids, np.int64)[-(-computed[new.sequence_id] // table.block_size) :])
            if table.sampling.has_penalty[row]:
                tokens = table.token_ids[row, : len(new.token_ids)].astype(np.int64)
                prompt, so_far = np.split(tokens, [new.prompt_token_count])
                self._sampler.penalties.add(row, prompt, so_far)
        for sequence_id, blocks in zip(step.sequence_ids, checked.new_blocks, strict=True):
            if len(blocks):
                row = table.row_of[sequence_id]
                table.append_blocks(row, blocks)
                if not table.skipped[row]:
                    entered.append(blocks)
        if entered:
            self._cache.clear(self._tensor(np.concatenate(entered)))

    def _forward(
        self, batch: StepBatch, token_ids: torch.Tensor, positions: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor | None:
        hidden = self._model.forward(token_ids, positions, attention)
        if not len(batch.sampled):
            return None
        if len(batch.sampled) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(batch.sampled_tokens))
        return self._model.logits(hidden)

    def _sample(self, batch: StepBatch, logits: torch.Tensor, output: StepOutput) -> None:
        table = self._table
        rows, ids = batch.rows[batch.sampled], batch.sequence_ids[batch.sampled]
        num_outputs = table.num_tokens[rows] - table.prompt_token_count[rows]
        sampled = self._sampler.sample(logits, rows, num_outputs, table.sampling)
        table.skipped[rows[sampled.failed]] = True
        output.errors.update(
            dict.fromkeys(ids[sampled.failed].tolist(), "the model produced logits that are not finite")
        )
        good = ~sampled.failed
        rows, token_ids = rows[good], sampled.token_ids[good]
        table.append_tokens(rows, token_ids)
        penalised = table.sampling.has_penalty[rows]
        if penalised.any():
            self._sampler.penalties.record(rows[penalised], token_ids[penalised])
        stopped = table.sampling.is_stop(rows, token_ids)
        table.skipped[rows[stopped]] = True
        output.sequence_ids = ids[good].tolist()
        output.token_ids = token_ids.tolist()
        output.stopped_sequence_ids = ids[good][stopped].tolist()
        output.logprobs = {int(ids[place]): logprobs for place, logprobs in sampled.logprobs.items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
