"""Blocks and their hash chain: a block's hash names every token up to its end, and the model.

Hashes are BLAKE2b-128 keyed with the store's secret, so that neither file names nor the index can
be used to guess a prompt (DESIGN section 6).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
BLOCK_TOKENS = 256


class HashChain:
    """The block hashes of one model's sequences.

    Each tenant's begin with a root of its own; `b""` stands for that of those without a name.
    """

    def __init__(self, secret: bytes, model_hash: bytes, *, block_size: int = BLOCK_TOKENS) -> None:
        self._secret = secret
        self._model_hash = model_hash
        self.block_size = block_size
        self.root = self._hash(model_hash, b"")
        """The hash of the empty prefix."""

    def root_of(self, tenant: str) -> bytes:
        """Where a tenant's hashes begin: nothing of it ever matches another's."""
        return self._hash(self._model_hash, tenant.encode()) if tenant else b""

    def block_hashes(
        self,
        token_ids: Sequence[int],
        known: Sequence[bytes] = (),
        *,
        root: bytes = b"",
    ) -> list[bytes]:
        """One hash for each complete block of a sequence, of which the first are known."""
        size = self.block_size
        first_token = len(known) * size
        data = memoryview(pack_ids(token_ids[first_token:]))
        hashes = list(known)
        parent = hashes[-1] if hashes else root or self.root
        for start in range(0, len(data) // 4 - size + 1, size):
            parent = self._hash(parent, data[start * 4 : (start + size) * 4])
            hashes.append(parent)
        return hashes

    def end_hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of a prefix that ends with an incomplete block of `token_ids` after `parent`.

        Without tokens the parent itself is the end.
        """
        return self._hash(parent, pack_ids(token_ids)) if token_ids else parent

    def turn_name(self, digest: bytes) -> bytes:
        """What the index has of the digest of a conversation at one of its turns."""
        return self._hash(b"turn", digest)

    def _hash(self, parent: bytes, content: bytes | memoryview) -> bytes:
        state = blake2b(parent, digest_size=HASH_BYTES, key=self._secret)
        state.update(content)
        return state.digest()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    return packed.tobytes()


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    least = min(len(one), len(other))
    if not least or one[0] != other[0]:
        return 0
    first, second = (ids if isinstance(ids, array) else array("I", ids) for ids in (one, other))
    # Arrays are compared at once, and what differs is halved until it is found.
    low, high = 0, least
    while low < high:
        middle = high if high == least and low == 0 else (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
