"""Block hashes by exact values: what they cover, what they are keyed with, how they continue."""

from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.block_names import BLOCK_TOKENS, HashChain, pack_ids

SECRET, MODEL = b"s" * 32, b"m" * 32


def chain(block_size: int = 4, **fields: bytes) -> HashChain:
    return HashChain(SECRET, MODEL, block_size=block_size, **fields)


def hashed(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=16, key=SECRET).digest()


def test_a_block_hash_is_keyed_and_covers_its_parent_and_its_tokens():
    ids = [1, 2, 3, 4, 5, 70_000, 7, 8, 9]
    first = hashed(hashed(MODEL), b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0")
    second = hashed(first, b"\5\0\0\0\x70\x11\1\0\7\0\0\0\x08\0\0\0")
    assert chain().block_hashes(ids) == [first, second]
    assert chain().root == hashed(MODEL)


def test_hashes_are_sixteen_bytes_and_blocks_256_tokens():
    assert BLOCK_TOKENS == 256
    plain = HashChain(SECRET, MODEL)
    assert plain.block_hashes(range(255)) == []
    (one,) = plain.block_hashes(range(300))
    assert len(one) == len(plain.root) == 16


@pytest.mark.parametrize(
    "other",
    [
        HashChain(b"t" * 32, MODEL, block_size=4),
        HashChain(SECRET, b"n" * 32, block_size=4),
        HashChain(SECRET, MODEL, block_size=5),
    ],
)
def test_secret_model_and_block_size_tell_chains_apart(other: HashChain):
    assert not set(other.block_hashes(range(40))) & set(chain().block_hashes(range(40)))


def test_no_hash_of_a_tenant_is_another_tenants():
    one, ids = chain(), list(range(10))
    hashes: set[bytes] = set()
    for tenant in ("", "alice", "bob"):
        root = one.root_of(tenant)
        blocks = one.block_hashes(ids, root=root)
        ends = [one.end_hash(blocks[1], ids[8:]), one.end_hash(root or one.root, ids[:3])]
        hashes |= {root or one.root, *blocks, *ends}
    assert len(hashes) == 3 * 5
    assert one.root_of("") == b""
    root = one.root_of("alice")
    assert root == hashed(MODEL, b"alice")
    known = one.block_hashes(ids[:4], root=root)
    assert one.block_hashes(ids, known=known, root=root) == one.block_hashes(ids, root=root)


def test_a_store_without_a_secret_has_hashes_too():
    assert len(HashChain(b"", b"", block_size=4).block_hashes(range(8))) == 2


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 39), st.integers(1, 7))
def test_a_changed_token_changes_its_block_and_all_after_it(ids: list[int], at: int, size: int):
    at %= max(len(ids), 1)
    other = [*ids[:at], (ids[at] + 1) % 2**32, *ids[at + 1 :]] if ids else [1]
    hashes, changed = chain(size).block_hashes(ids), chain(size).block_hashes(other)
    num_same = at // size
    assert hashes[:num_same] == changed[:num_same]
    assert not set(hashes[num_same:]) & set(changed[num_same:])


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(0, 10), st.integers(1, 7))
def test_known_hashes_are_continued(ids: list[int], num_known: int, size: int):
    one = chain(size)
    whole = one.block_hashes(ids)
    known = whole[:num_known]
    assert one.block_hashes(ids, known=known) == whole
    assert one.block_hashes(array("I", ids), known=known) == whole


def test_the_end_of_an_incomplete_block_has_a_hash_of_its_own():
    one = chain()
    (first,) = one.block_hashes([1, 2, 3, 4])
    assert one.end_hash(first, []) == first
    assert one.end_hash(first, [5, 6]) == hashed(first, pack_ids([5, 6]))
    assert one.end_hash(first, [5, 6]) != one.end_hash(first, [5, 6, 0])
