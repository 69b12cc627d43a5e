"""A tiny model on a model runner, and a scheduler in miniature that drives it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.quantised.load import load_rank
from loader.quantised.roundings import Rounding
from loader.quantised.settle import settle
from loader.shares import RankPlace
from worker_service.models.decoder import Decoder
from worker_service.models.registry import build_model
from worker_service.runtime.executor import Paging, TorchExecutor
from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.kv_cache import CacheShape, KvCache
from worker_service.runtime.native import NativeExecutor
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Logprobs, NewSequence, PromptLogprobs, Sampling, StepInput, StepOutput

CPU = torch.device("cpu")


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, and far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_tiny(
    path: Path, dtype: torch.dtype = torch.float32, rounding: Rounding | None = None, *, keep_blocks: bool = False
) -> Decoder:
    """The model of a checkpoint, weights placed; those of a GGUF whole, or with `keep_blocks` as they are stored."""
    checkpoint = open_checkpoint(path)
    if keep_blocks:
        checkpoint, _ = settle(checkpoint, "auto")
    model = build_model(checkpoint.config, RankPlace(), None)
    tensors = load_rank(
        checkpoint, RankPlace(), dtype=dtype, rounding=rounding, progress=lambda _: None, cancelled=lambda: False
    )
    model.place_weights(tensors)
    assert not tensors
    return model


def make_runner(
    model: Decoder,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_model_len: int = 256,
    grammars: GrammarStore | None = None,
    stored: torch.dtype | None = None,
    paging: Paging | None = None,
) -> tuple[ModelRunner, KvCache]:
    """A runner with a float32 cache of its own, whose values are rounded to `stored` where that is given."""
    model.prepare(max_model_len, dtype=torch.float32, device=CPU)
    shape = CacheShape(len(model.layers), model.num_kv_heads, model.config.head_dim, torch.float32, stored)
    cache = KvCache(shape, num_blocks, block_size, CPU, num_spare=int(paging is not None))
    executor = TorchExecutor(model, cache, max_model_len=max_model_len, device=CPU, paging=paging)
    executor.prepare_decodes(16)
    return ModelRunner(executor, max_model_len=max_model_len, grammars=grammars), cache


def reference_tokens(path: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What transformers continues each prompt with, greedily, one by one, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        made: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@dataclass
class Driven:
    """A sequence as the driver sees it."""

    sequence_id: int
    token_ids: list[int]
    prompt_token_count: int
    sampling: Sampling
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: bool = False
    token_limit: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    adapter: str = ""
    grammar_key: bytes = b""

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_token_count :]


class Driver:
    """Plans steps for a runner: scattered blocks, chunks of any size, preemption. Applies each answer at once."""

    def __init__(self, runner: ModelRunner, cache: KvCache | NativeExecutor, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = cache.block_size
        self.free = list(range(cache.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.sequences: dict[int, Driven] = {}
        self.step_id = 0
        self.finished: list[int] = []
        self.preempted: list[int] = []

    def add(
        self,
        sequence_id: int,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        adapter: str = "",
        *,
        num_outputs: int | None = None,
        grammar_key: bytes = b"",
    ) -> Driven:
        """A sequence; one that may speculate when its number of output tokens is given."""
        driven = Driven(sequence_id, list(prompt), len(prompt), sampling or Sampling(), adapter=adapter)
        driven.token_limit = 0 if num_outputs is None else len(prompt) + num_outputs
        driven.grammar_key = grammar_key
        self.sequences[sequence_id] = driven
        return driven

    def finish(self, sequence_id: int) -> None:
        driven = self.sequences.pop(sequence_id)
        self.free += driven.blocks
        self.finished.append(sequence_id)

    def preempt(self, sequence_id: int) -> None:
        driven = self.sequences[sequence_id]
        self.free += driven.blocks
        driven.blocks, driven.computed, driven.known = [], 0, False
        self.preempted.append(sequence_id)

    def plan(self, chunks: dict[int, int], num_drafts: int = 0) -> StepInput:
        """A step that computes at most so many tokens of each sequence, and verifies drafts where it decodes."""
        self.step_id += 1
        new: list[NewSequence] = []
        ids, counts, computed, block_counts, blocks, drafts = [], [], [], [], [], []
        for sequence_id, most in chunks.items():
            driven = self.sequences[sequence_id]
            count = min(most, len(driven.token_ids) - driven.computed)
            drafts.append(num_drafts if driven.known and driven.token_limit and count == 1 else 0)
            reach = min(driven.computed + count + drafts[-1], driven.token_limit - 1) if drafts[-1] else 0
            need = -(-max(driven.computed + count, reach) // self.block_size) - len(driven.blocks)
            added = [self.free.pop() for _ in range(need)]
            driven.blocks += added
            if not driven.known:
                new.append(
                    NewSequence(
                        sequence_id,
                        f"request-{sequence_id}",
                        list(driven.token_ids),
                        driven.prompt_token_count,
                        driven.sampling,
                        list(driven.blocks),
                        prompt_logprob_start=1 + sum(len(part.token_ids) for part in driven.prompt),
                        adapter=driven.adapter,
                        token_limit=driven.token_limit,
                        grammar_key=driven.grammar_key,
                    )
                )
                added, driven.known = [], True
            ids.append(sequence_id)
            counts.append(count)
            computed.append(driven.computed)
            block_counts.append(len(added))
            blocks += added
            driven.computed += count
        columns = (ids, counts, computed, block_counts, blocks, self.finished, self.preempted)
        step = StepInput(self.step_id, new, *columns, drafts if num_drafts else (), self.step_id - 1)
        self.finished, self.preempted = [], []
        return step

    def apply(self, output: StepOutput) -> None:
        for sequence_id, token_id in zip(output.sequence_ids, output.token_ids, strict=True):
            driven = self.sequences[sequence_id]
            early = output.accepted.get(sequence_id, [])
            driven.token_ids += [*early, token_id]
            driven.computed += len(early)
            if sequence_id in output.logprobs:
                driven.logprobs += [*output.accepted_logprobs.get(sequence_id, []), output.logprobs[sequence_id]]
        for sequence_id, part in output.prompt_logprobs:
            self.sequences[sequence_id].prompt.append(part)

    def step(self, chunks: dict[int, int], num_drafts: int = 0) -> StepOutput:
        """Plans, runs and applies one step."""
        output = self.runner.execute(self.plan(chunks, num_drafts))
        self.apply(output)
        return output

    def run(self, num_outputs: int, chunk: int = 1000, num_drafts: int = 0) -> int:
        """Steps all sequences together until each has so many output tokens; returns the number of steps."""
        num_steps = 0
        while waiting := [s for s in self.sequences.values() if len(s.output) < num_outputs]:
            output = self.step({driven.sequence_id: chunk for driven in waiting}, num_drafts)
            assert not output.errors, output.errors
            num_steps += 1
        return num_steps
