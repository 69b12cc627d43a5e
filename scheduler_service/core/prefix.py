"""The keys of the prefix cache: a hash chain over a canonical encoding of token ids.

key(block i) = SHA-256(key(block i-1) ‖ its token ids as little-endian int32). The chain's root
covers everything else that KV values depend on, or that must keep tenants apart: block size,
adapter and salt, each with its length, so that no two inputs encode alike.
"""

import hashlib
import struct
from collections.abc import Sequence

_VERSION = b"stepwire-prefix-1"


def root_key(*, block_size: int, adapter: str, salt: str) -> bytes:
    """The parent of a sequence's first block."""
    parts = [_VERSION, struct.pack("<i", block_size)]
    for text in (adapter, salt):
        encoded = text.encode("utf-8", "surrogatepass")
        parts += [struct.pack("<q", len(encoded)), encoded]
    return hashlib.sha256(b"".join(parts)).digest()


class KeyChain:
    """The keys of one sequence's full blocks, computed as far as they were needed."""

    __slots__ = ("_encode", "_keys", "_root")

    def __init__(self, *, block_size: int, adapter: str, salt: str) -> None:
        self._root = root_key(block_size=block_size, adapter=adapter, salt=salt)
        self._encode = struct.Struct(f"<{block_size}i")
        self._keys: list[bytes] = []

    def keys(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks of `token_ids`; earlier ids never change."""
        keys, encode = self._keys, self._encode
        size = encode.size // 4
        for index in range(len(keys), num_blocks):
            parent = keys[-1] if keys else self._root
            block = encode.pack(*token_ids[index * size : (index + 1) * size])
            keys.append(hashlib.sha256(parent + block).digest())
        return keys[:num_blocks] if len(keys) > num_blocks else keys
