"""`python -m ops.studies.kv_lookup`: what it costs to look a long prompt up, hashing included.

The tree holds many conversations that share a system prompt, as one model's index may after weeks;
the prompt is one of them, edited at its very end. Each figure is the median of rounds, beside the
time that copying the same token ids takes in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable

import msgspec

from runtime.kv.prefix_tree import PrefixTree, Run, num_common, path_to, run_of
from store.block_names import HashChain, pack_ids

RUN_TOKENS = 2048
SYSTEM_TOKENS = 8192


class Lookup(msgspec.Struct):
    """Times in ms. `match` is of a prompt whose tokens are in memory, `hash` of all its blocks.

    `confirm` compares all tokens on the way; `sibling` is a match of a new conversation that leaves
    the others at the end of the system prompt; `copy` packs the ids once, for comparison.
    """

    num_tokens: int
    num_runs: int
    hash_ms: float
    match_ms: float
    state_ms: float
    sibling_ms: float
    confirm_ms: float
    copy_ms: float

    @property
    def total_ms(self) -> float:
        return self.hash_ms + self.match_ms + self.state_ms + self.confirm_ms


def filled(chain: HashChain, prompt: list[int], num_conversations: int) -> PrefixTree:
    """The prompt's conversation, and others that leave it after the system prompt."""
    tree = PrefixTree(chain)
    leaf = _insert(chain, tree, None, prompt, 0)
    shared = path_to(leaf, SYSTEM_TOKENS)[-1][0]
    dice = random.Random(2)
    for _ in range(num_conversations):
        other = prompt[:SYSTEM_TOKENS] + dice.choices(range(100_000), k=4000)
        _insert(chain, tree, shared, other, SYSTEM_TOKENS)
    return tree


def _insert(
    chain: HashChain, tree: PrefixTree, parent: Run | None, ids: list[int], start: int
) -> Run | None:
    hashes = chain.block_hashes(ids)
    size = chain.block_size
    while start < len(ids):
        end = min(start + RUN_TOKENS, len(ids))
        before = hashes[start // size - 1] if start else b""
        run = run_of(chain, parent, start, end, (before, *hashes[start // size : end // size]))
        run.token_ids = array("I", ids[start:end])
        run.end_hash = chain.end_hash(run.last_block, ids[end - end % size : end])
        run.has_state = end % (4 * RUN_TOKENS) == 0
        tree.insert(run)
        parent, start = run, end
    return parent


def measure(num_tokens: int, num_conversations: int, rounds: int) -> Lookup:
    """Look one prompt up in a tree of many conversations."""
    chain = HashChain(b"secret", b"model")
    prompt = random.Random(1).choices(range(100_000), k=num_tokens)
    tree = filled(chain, prompt, num_conversations)
    sibling = [*prompt[:SYSTEM_TOKENS], *(one + 1 for one in prompt[SYSTEM_TOKENS:])]
    sibling_hashes = chain.block_hashes(sibling)
    assert tree.match(sibling, sibling_hashes).num_tokens == SYSTEM_TOKENS
    edited = [*prompt[:-1], prompt[-1] + 1]
    hashes = chain.block_hashes(edited)
    match = tree.match(edited, hashes)
    assert match.num_tokens == num_tokens - 1

    def confirm() -> None:
        for run, end in path_to(match.run, match.num_tokens):
            assert run.token_ids is not None
            assert num_common(run.token_ids, 0, edited, run.start) >= end - run.start

    def timed(work: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1000

    return Lookup(
        num_tokens=num_tokens,
        num_runs=len(tree),
        hash_ms=timed(lambda: chain.block_hashes(edited)),
        match_ms=timed(lambda: tree.match(edited, hashes)),
        state_ms=timed(lambda: tree.state(edited, hashes, num_tokens - 1)),
        sibling_ms=timed(lambda: tree.match(sibling, sibling_hashes)),
        confirm_ms=timed(confirm),
        copy_ms=timed(lambda: pack_ids(edited)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--conversations", type=int, default=5000)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = [
        measure(num_tokens, arguments.conversations, arguments.rounds)
        for num_tokens in (16 << 10, 128 << 10)
    ]
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(figures)))
        return
    for one in figures:
        print(
            f"{one.num_tokens:>7} tokens, {one.num_runs} runs: {one.total_ms:.2f} ms = hash "
            f"{one.hash_ms:.2f} + match {one.match_ms:.2f} + state {one.state_ms:.2f} + confirm "
            f"{one.confirm_ms:.2f}; match of a sibling {one.sibling_ms:.2f} ms; packing the ids "
            f"once {one.copy_ms:.2f} ms"
        )


if __name__ == "__main__":
    main()
