"""A mixture of everything that happens to sequences, and transformers' word for what they must say."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.tiny_runner import Driver
from worker_service.runtime.kv_cache import KvCache
from worker_service.runtime.runner import ModelRunner

LENGTHS = (1, 2, 5, 17, 31, 64, 90)
NUM_OUTPUTS = 64


def mixed_prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def run_mixture(runner: ModelRunner, cache: KvCache, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the runner makes of the prompts, and of the longest once more: its last output.

    Sequences come one after the other, their prompts in chunks of any size beside others' decodes; some lose their
    blocks and come back; the last takes what it can of its prompt from the blocks of the one that is like it.
    """
    driver, rng = Driver(runner, cache), random.Random(5)
    todo = list(enumerate(prompts))
    twin = len(prompts)
    while todo or (waiting := [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]):
        if todo:
            driver.add(*todo.pop(0))
        elif twin not in driver.sequences and driver.sequences[twin - 1].output:
            first, sibling = driver.sequences[twin - 1], driver.add(twin, prompts[-1])
            num_shared = (len(prompts[-1]) - 1) // driver.block_size
            sibling.blocks, sibling.computed = first.blocks[:num_shared], num_shared * driver.block_size
        waiting = [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]
        victim = rng.choice(waiting)
        if victim.known and victim.sequence_id < twin - 1 and rng.random() < 0.2:
            driver.preempt(victim.sequence_id)
        output = driver.step({s.sequence_id: rng.choice((1, 3, 11, 29)) for s in waiting})
        assert not output.errors, output.errors
    return [driver.sequences[number].output for number in range(twin + 1)]


def greedy_tokens(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What a model of transformers takes for the likeliest token at each place of an output.

    Equal to the output if and only if the model continues the prompt greedily with it.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    made: list[int] = logits.argmax(-1).tolist()
    return made
