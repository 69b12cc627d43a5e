"""Which sequence holds which blocks: the block manager."""

from collections.abc import Iterable

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.prefix import KeyChain
from scheduler_service.core.request import Request, Sequence


class BlockManager:
    """Block tables of running sequences, shared prefixes, and the blocks promised to prompts under way.

    The only code that changes a sequence's `block_ids`, `computed`, `published` and `target_blocks`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._prefix_caching = config.prefix_caching
        self._pool = BlockPool(config.num_blocks)
        self._promised = 0

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a findable prefix."""
        return self._pool.num_cached

    @property
    def num_promised(self) -> int:
        """Free blocks that running sequences will need for tokens they already have."""
        return self._promised

    def num_owed(self, sequence: Sequence) -> int:
        """Of the promised blocks, those of this sequence."""
        return max(0, sequence.target_blocks - len(sequence.block_ids))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def key_chain(self, request: Request) -> KeyChain:
        """The empty chain of prefix keys of a request's sequences."""
        return KeyChain(block_size=self._block_size, adapter=request.adapter, salt=request.cache_salt)

    def num_leading_tokens(self, request: Request) -> int:
        """Prompt tokens that its first sequence computes before its siblings start: those of the full blocks, which
        they share; none without a prefix cache. All that are to be scored, so that those come before any output."""
        num = len(request.prompt_token_ids)
        if request.scores_prompt:
            return num if num > 1 else 0
        return num // self._block_size * self._block_size if self._prefix_caching else 0

    # Starting and growing.

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix that leaves at least one token to compute. Changes nothing.

        A prompt token is scored by computing the one before it, so what is not scored yet is not looked up.
        """
        if not self._prefix_caching:
            return []
        is_scored = sequence.scored >= sequence.prompt_token_count
        num = (len(sequence.token_ids) if is_scored else sequence.scored) - 1
        num //= self._block_size
        return self._pool.find(sequence.keys.keys(sequence.token_ids, num))

    def num_lacking(self, sequence: Sequence, hits: list[int]) -> int:
        """How many blocks are lacking for a sequence to start with all its known tokens; promised ones are not free."""
        needed = self.num_blocks_for(len(sequence.token_ids)) - len(hits)
        return max(0, needed + self._promised + self._pool.num_revived(hits) - self._pool.num_free)

    def start(self, sequence: Sequence, hits: list[int]) -> None:
        """Gives a sequence its cached prefix, and promises it the blocks of its other known tokens."""
        self._pool.hold(hits)
        sequence.block_ids = list(hits)
        sequence.computed = len(hits) * self._block_size
        sequence.published = len(hits)
        sequence.target_blocks = self.num_blocks_for(len(sequence.token_ids))
        self._promised += self.num_owed(sequence)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens can be computed; may be negative."""
        reach = sequence.computed + num_tokens
        if sequence.possible:
            reach = min(reach + sequence.possible, sequence.kv_limit)
        return -(-reach // self._block_size) - len(sequence.block_ids)

    def grow(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Allocates blocks at the end of a sequence's table. Raises ValueError when too few are free."""
        added = self._pool.allocate(num_blocks)
        self._promised -= self.num_owed(sequence)
        sequence.block_ids += added
        self._promised += self.num_owed(sequence)
        return added

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens as computed by the step being planned, and publishes the blocks that they fill.

        Sequences planned after this one may hold those blocks, in the same step too: a worker writes
        all KV of a layer before any sequence reads that layer.
        """
        sequence.computed += num_tokens
        size, published = self._block_size, sequence.published
        if sequence.computed // size > published and len(sequence.token_ids) // size > published:
            self._publish(sequence, sequence.computed)

    # Ending.

    def release(self, sequence: Sequence, *, publish_tokens: int = 0) -> None:
        """Takes all blocks from a sequence, after publishing the full ones among its first `publish_tokens` tokens."""
        self._publish(sequence, min(sequence.computed, publish_tokens))
        self._promised -= self.num_owed(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.computed = sequence.published = sequence.target_blocks = 0

    def num_released_by(self, sequence: Sequence) -> int:
        """Blocks that become free when this sequence lets go."""
        return sum(self._pool.count(block_id) == 1 for block_id in sequence.block_ids)

    def unpublish(self, sequence: Sequence, num_good_tokens: int) -> set[int]:
        """Takes out of the prefix cache what a sequence published beyond its first good tokens.

        Goes by content, so it also finds what the sequence no longer holds.
        """
        full = len(sequence.token_ids) // self._block_size
        keys = sequence.keys.keys(sequence.token_ids, full)[num_good_tokens // self._block_size :]
        taken = set()
        for key in keys:
            for block_id in self._pool.find([key]):
                self._pool.unpublish(block_id)
                taken.add(block_id)
        return taken

    def forget_content(self) -> None:
        """Empties the prefix cache: the KV tensors' content is gone."""
        self._pool.forget_all()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError when blocks leak, are given out twice, or are promised and not owed."""
        sequences = list(running)
        self._pool.check_integrity([sequence.block_ids for sequence in sequences])
        if self._promised != sum(map(self.num_owed, sequences)):
            raise RuntimeError("promised blocks are counted wrong")

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        full = min(num_tokens, len(sequence.token_ids)) // self._block_size
        if full <= sequence.published:
            return
        if self._prefix_caching:
            keys = sequence.keys.keys(sequence.token_ids, full)
            for index in range(sequence.published, full):
                self._pool.publish(sequence.block_ids[index], keys[index])
        sequence.published = full
