"""The theory of the KV cache by exact values, and the real prefix tree compared with it."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.theory import Blocks, story
from tests.unit.test_prefix import CHAIN, SIZE, Tree

BLOCK = st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE)
PROMPT = st.lists(BLOCK, max_size=5).map(lambda blocks: [one for block in blocks for one in block])


def test_the_story():
    assert story() == [
        "alice computes 16 tokens",
        "bob, with the same system prompt, 4",
        "after a crash alice computes 0",
        "alice is deleted; of bob's 12 tokens 12 are there",
        "one block is evicted; 8 are there",
    ]


def test_what_was_not_written_is_lost_in_a_crash():
    store = Blocks(CHAIN)
    store.answer([1] * 8, "a")
    store.write()
    store.answer([1] * 12, "a")
    store.crash()
    assert store.find([1] * 12) == 8


def test_what_is_behind_a_gap_is_found_again_once_the_gap_is_computed():
    store = Blocks(CHAIN)
    store.answer([1] * 12, "a")
    store.lose(CHAIN.block_hashes([1] * 4))
    assert store.find([1] * 12) == 0
    store.answer([1] * 4, "b")
    assert store.find([1] * 12) == 12


@given(st.data())
def test_the_prefix_tree_finds_what_the_theory_finds(data: st.DataObject):
    tree, store = Tree(), Blocks(CHAIN)
    for _ in range(data.draw(st.integers(1, 8))):
        if len(tree.tree) and data.draw(st.booleans()):
            run = data.draw(st.sampled_from(list(tree.tree)))
            tree.tree.remove(run)
            store.lose(run.block_hashes)
        else:
            prompt = data.draw(PROMPT)
            tree.insert_new(prompt)
            store.answer(prompt, "somebody")
        probe = data.draw(PROMPT)
        _, num_tokens, _ = tree.match(probe)
        assert num_tokens - num_tokens % SIZE == store.find(probe)
