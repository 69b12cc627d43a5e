"""The KV blocks: which are free, who shares which, and which still hold a reusable prefix."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts of blocks, and the prefixes that blocks hold.

    A block is *held* (count above 0), *cached* (free, but its content is found by its key and
    may be held again), or *blank* (free, nothing in it). Blank blocks are given out first, then
    cached ones, least recently freed first. Every operation is constant time for each block.
    Knows nothing of sequences or tokens.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can be found."""
        return len(self._cached)

    def count(self, block_id: int) -> int:
        """How many hold this block."""
        return self._counts[block_id]

    def allocate(self, num: int) -> list[int]:
        """Takes `num` blocks, each held once; evicts cached content as needed.

        Raises ValueError, and changes nothing, when fewer are free.
        """
        if num > self.num_free:
            raise ValueError(f"{num} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(num):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                del self._block_of_key[self._key_of_block.pop(block_id)]
            self._counts[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives back one hold on each block, last block first, so that a prefix outlives its tail."""
        for block_id in reversed(block_ids):
            count = self._counts[block_id]
            if count < 1:
                raise ValueError(f"block {block_id} is not held")
            self._counts[block_id] = count - 1
            if count == 1:
                if block_id in self._key_of_block:
                    self._cached[block_id] = None
                else:
                    self._blank.append(block_id)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known keys from the first on. Changes nothing."""
        found = []
        for key in keys:
            block_id = self._block_of_key.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_revived(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free, so that holding them lowers num_free. Changes nothing."""
        counts = self._counts
        return sum(counts[block_id] == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Holds blocks that `find` returned, once more each."""
        for block_id in block_ids:
            if self._counts[block_id] == 0:
                del self._cached[block_id]
            self._counts[block_id] += 1

    def publish(self, block_id: int, key: bytes) -> None:
        """Makes a held block's content findable. A key that is known keeps its block."""
        if key not in self._block_of_key and block_id not in self._key_of_block:
            self._block_of_key[key] = block_id
            self._key_of_block[block_id] = key

    def unpublish(self, block_id: int) -> bool:
        """Makes a block's content unfindable; says whether it was findable."""
        key = self._key_of_block.pop(block_id, None)
        if key is None:
            return False
        del self._block_of_key[key]
        if self._counts[block_id] == 0:
            del self._cached[block_id]
            self._blank.append(block_id)
        return True

    def forget_all(self) -> None:
        """Makes every content unfindable: the KV tensors are gone."""
        for block_id in list(self._key_of_block):
            self.unpublish(block_id)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless counts, free lists and keys agree with the block tables in `held`."""
        counts = [0] * self.num_blocks
        for table in held:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block table names a block twice: {list(table)}")
            for block_id in table:
                counts[block_id] += 1
        if counts != self._counts:
            wrong = [i for i in range(self.num_blocks) if counts[i] != self._counts[i]]
            raise RuntimeError(f"blocks counted wrong (leaked, or freed while held): {wrong}")
        free = self._blank + list(self._cached)
        if sorted(free) != [i for i in range(self.num_blocks) if counts[i] == 0]:
            raise RuntimeError("the free lists are not the blocks that nobody holds, each once")
        if {block: key for key, block in self._block_of_key.items()} != self._key_of_block:
            raise RuntimeError("keys and blocks do not mirror each other")
        if not self._cached.keys() <= self._key_of_block.keys() or self._key_of_block.keys() & set(self._blank):
            raise RuntimeError("a blank block has a key, or a cached one has none")
