"""A worker in miniature for tests of the scheduler core: it executes plans and cannot be fooled.

Each KV slot holds a digest of all tokens up to its position, written by whoever computes it. A
token is a function of the slots it reads, so one wrong, stale or stolen slot changes every token
after it; the test compares the tokens with those of an undisturbed run. Draft tokens, some right and
some wrong, are written as a worker would, and the wrong ones overwritten.
"""

import hashlib
import random
from dataclasses import dataclass, field

from scheduler_service.core.plan import PromptLogprobs, StepPlan, StepResult

VOCAB = 50
STOP_TOKEN = 0
SPOILED = b"spoiled"
NEVER = 1 << 62


def digest(parent: bytes, token_id: int) -> bytes:
    """What a KV slot holds, given the slot before it."""
    return hashlib.blake2b(parent + token_id.to_bytes(4, "little"), digest_size=8).digest()


def draw(slot: bytes, index: int, *, stop_one_in: int) -> int:
    """The token sampled after a slot, for the sequence of this index."""
    value = int.from_bytes(hashlib.blake2b(slot + bytes([index]), digest_size=8).digest(), "little")
    return STOP_TOKEN if value % stop_one_in == 0 else 1 + value % (VOCAB - 1)


def undisturbed(prompt: list[int], index: int, max_tokens: int, *, stop_one_in: int) -> list[int]:
    """The whole output of a sequence that nothing happens to."""
    slot = b""
    for token_id in prompt:
        slot = digest(slot, token_id)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(draw(slot, index, stop_one_in=stop_one_in))
        if output[-1] == STOP_TOKEN:
            break
        slot = digest(slot, output[-1])
    return output


def prompt_scores(prompt: list[int]) -> list[bytes]:
    """What is told of each token of a prompt but the first, when nothing happens to it."""
    slots = [b""]
    for token_id in prompt[:-1]:
        slots.append(digest(slots[-1], token_id))
    return slots[1:]


@dataclass
class _State:
    token_ids: list[int]
    index: int
    block_ids: list[int]
    computed: int = 0
    is_skipped: bool = False
    scored: int = 0
    num_prompt: int = 0
    token_limit: int = NEVER
    accepted: list[tuple[int, int]] = field(default_factory=list)
    """(step, draft tokens accepted in it)."""

    def computed_as_of(self, step_id: int) -> int:
        """What a scheduler counts that has the answers up to a step."""
        return self.computed - sum(num for step, num in self.accepted if step > step_id)


@dataclass
class ModelWorker:
    """Executes steps in order; raises AssertionError for a plan that no correct scheduler sends."""

    num_blocks: int
    block_size: int
    stop_one_in: int
    slots: dict[tuple[int, int], bytes] = field(default_factory=dict)
    sequences: dict[int, _State] = field(default_factory=dict)
    last_step_id: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def execute(self, plan: StepPlan, fail: int | None = None) -> StepResult:
        """Runs a step; `fail` is the place in the plan of a sequence that fails and writes rubbish."""
        assert plan.step_id == self.last_step_id + 1
        self.last_step_id = plan.step_id
        for sequence_id in [*plan.finished_sequence_ids, *plan.preempted_sequence_ids]:
            self.sequences.pop(sequence_id, None)
        computed_of = dict(zip(plan.sequence_ids, plan.computed_token_counts, strict=True))
        for new in plan.new_sequences:
            sequence_id = new.sequence_id
            assert sequence_id not in self.sequences
            state = _State(list(new.token_ids), new.sequence.index, list(new.block_ids), computed_of[sequence_id])
            state.scored, state.num_prompt = new.sequence.scored, new.sequence.prompt_token_count
            assert state.scored == state.num_prompt or state.computed < state.scored, "a position cannot be scored"
            if new.sequence.request.max_draft_tokens:
                state.token_limit = new.sequence.kv_limit + 1
            self.sequences[sequence_id] = state
        added = iter(plan.new_block_ids)
        for sequence_id, num in zip(plan.sequence_ids, plan.new_block_counts, strict=True):
            self.sequences[sequence_id].block_ids += [next(added) for _ in range(num)]
        assert next(added, None) is None
        accepted: dict[int, list[tuple[int, object]]] = {}
        result = StepResult(plan.step_id, [], [], stopped := set(), {}, errors := {}, prompts := [], accepted)  # type: ignore[arg-type]
        written: set[tuple[int, int]] = set()
        for place, sequence_id in enumerate(plan.sequence_ids):
            state = self.sequences[sequence_id]
            num = plan.scheduled_token_counts[place]
            assert num >= 1
            computed = plan.computed_token_counts[place]
            assert state.computed_as_of(plan.applied_step_id) == computed, "computed counts disagree"
            if state.is_skipped:
                state.computed += num
                continue
            self._write(state, num, written, spoil=place == fail)
            if place == fail:
                errors[sequence_id] = "made to fail"
                state.is_skipped = True
                continue
            if state.scored < (last := min(state.computed + 1, state.num_prompt)):
                values = [self._slot(state, position - 1) for position in range(state.scored, last)]
                prompts.append((sequence_id, PromptLogprobs(state.scored, len(values), values)))
                state.scored = last
            if state.computed == len(state.token_ids):
                *early, token_id = self._sample(state, plan.draft_counts.get(sequence_id, 0), written)
                if early:
                    accepted[sequence_id] = [(early_id, None) for early_id in early]
                    state.accepted.append((plan.step_id, len(early)))
                result.sequence_ids.append(sequence_id)
                result.token_ids.append(token_id)
                if token_id == STOP_TOKEN:
                    stopped.add(sequence_id)
                state.is_skipped = token_id == STOP_TOKEN or len(state.token_ids) == state.token_limit
        return result

    def _sample(self, state: _State, most: int, written: set[tuple[int, int]]) -> list[int]:
        """The tokens that a step brings, of which at most `most` were drafted. Drafts become wrong at some place."""
        slot = self._slot(state, state.computed - 1)
        tokens, is_right = [draw(slot, state.index, stop_one_in=self.stop_one_in)], True
        for i in range(min(self.rng.randint(0, most), state.token_limit - len(state.token_ids) - 1)):
            right = draw(slot, state.index, stop_one_in=self.stop_one_in)
            draft = right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
            slot = digest(slot, draft)
            self._put(state, state.computed + i, slot, written)
            is_right = is_right and draft == tokens[-1] != STOP_TOKEN
            if is_right:
                tokens.append(draw(slot, state.index, stop_one_in=self.stop_one_in))
        state.token_ids += tokens
        state.computed += len(tokens) - 1
        return tokens

    def restart(self) -> None:
        """A new epoch: sequences and KV are gone."""
        self.sequences.clear()
        self.slots.clear()
        self.last_step_id = 0

    def _write(self, state: _State, num: int, written: set[tuple[int, int]], *, spoil: bool) -> None:
        assert state.computed + num <= len(state.token_ids), "more tokens scheduled than there are"
        assert len(state.block_ids) * self.block_size >= state.computed + num, "the block table is too short"
        slot = self._slot(state, state.computed - 1) if state.computed else b""
        for position in range(state.computed, state.computed + num):
            slot = SPOILED if spoil else digest(slot, state.token_ids[position])
            self._put(state, position, slot, written)
        state.computed += num

    def _put(self, state: _State, position: int, slot: bytes, written: set[tuple[int, int]]) -> None:
        place = self._place(state, position)
        assert place not in written, "two sequences write one slot in one step"
        written.add(place)
        self.slots[place] = slot

    def _place(self, state: _State, position: int) -> tuple[int, int]:
        block_id = state.block_ids[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id, position % self.block_size

    def _slot(self, state: _State, position: int) -> bytes:
        # A step after the one that failed may read what a skipped sequence never wrote; its answer is void.
        return self.slots.get(self._place(state, position), SPOILED)
