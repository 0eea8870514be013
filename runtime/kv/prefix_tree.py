"""The prefix tree: which runs of tokens have KV somewhere, and how far a prompt follows them.

Pure: it knows tokens and hashes, not arrays and not files. A *run* is a contiguous piece
`[start, end)` of a sequence whose KV is kept as one. Its `start_hash` names the tokens before it,
and it hangs on whichever run has them; one whose beginning nobody has any more waits, *loose*,
for whoever computes it again. Runs hold complete blocks, and at their end a part of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from store.block_names import HashChain
from store.types import MediaSpan, part_hashes


@dataclass(eq=False, slots=True)
class Run:
    """A node of the tree. `token_ids` is None while its tokens are only in its file.

    `start_hash` names the whole prefix up to `start`, empty where that is 0; `parent` is a run that
    has the last of these tokens, None also where none does now. `last_block` is the hash of the
    last complete block at or before `end`, and `end_hash` names the whole prefix up to `end`.
    `has_state` says that the state of layers that cannot be sliced is kept as it was at `end`.
    `root` is the tenant's: runs of others are never looked at. `media` and `rope_delta` are as in a
    slot's header, known when the tokens are.
    """

    parent: Run | None
    start: int
    end: int
    block_hashes: tuple[bytes, ...]
    last_block: bytes
    end_hash: bytes
    start_hash: bytes = b""
    token_ids: array[int] | None = None
    has_state: bool = False
    root: bytes = b""
    media: tuple[MediaSpan, ...] = ()
    rope_delta: int = 0
    children: list[Run] = field(default_factory=list["Run"])

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_loose(self) -> bool:
        """Some of the tokens before it are not in the tree: it cannot be taken up."""
        return _top(self).start > 0


class Match(NamedTuple):
    """The deepest run that a prompt follows, and how many of the prompt's tokens agree.

    `unread` are runs that might agree with more of the prompt than was counted: their tokens are
    not in memory. They matter only for the last, incomplete block.
    """

    run: Run | None
    num_tokens: int
    unread: tuple[Run, ...] = ()


class PrefixTree:
    """All runs of one hash chain."""

    def __init__(self, chain: HashChain) -> None:
        self._chain = chain
        self._blocks: dict[bytes, Run] = {}
        self._twins: dict[bytes, list[Run]] = {}
        self._ends: dict[bytes, list[Run]] = {}
        self._enders: dict[bytes, list[Run]] = {}
        self._states: dict[bytes, list[Run]] = {}
        self._roots: dict[bytes, list[Run]] = {}
        self._loose: dict[bytes, list[Run]] = {}
        self._starts: dict[bytes, list[Run]] = {}
        self._num_runs = 0

    def __len__(self) -> int:
        return self._num_runs

    def __iter__(self) -> Iterator[Run]:
        tops = (*self._roots.values(), *self._loose.values())
        stack = [run for runs in tops for run in runs]
        while stack:
            run = stack.pop()
            stack.extend(run.children)
            yield run

    def match(
        self, token_ids: Sequence[int], block_hashes: Sequence[bytes], root: bytes = b""
    ) -> Match:
        """How far `token_ids` is known; `block_hashes` are those of its complete blocks.

        A loose run that goes on within a block is joined to what has the tokens before it.
        """
        found = self._match(token_ids, block_hashes, root)
        while self._loose and self._join_within(token_ids, block_hashes, found, root):
            found = self._match(token_ids, block_hashes, root)
        return found

    def _match(self, token_ids: Sequence[int], block_hashes: Sequence[bytes], root: bytes) -> Match:
        num_blocks = self._num_known_blocks(block_hashes)
        position = num_blocks * self._chain.block_size
        last_block = block_hashes[num_blocks - 1] if num_blocks else root or self._chain.root
        runs: list[Run | None] = [run for run in self._holding(last_block) if not run.is_loose]
        children = (child for run in runs if run is not None for child in run.children)
        runs += [child for child in children if _may_follow(child, position, token_ids)]
        roots = self._roots.get(root, [])
        matches = [_follow(roots, run, position, token_ids) for run in runs or [None]]
        matches += [
            _follow(roots, run, run.end, token_ids)
            for run in self._ending(self._ends, last_block, token_ids, len(token_ids))
            if run.end > position
        ]
        best = max(matches, key=lambda match: match.num_tokens)
        unread = (run for match in matches for run in match.unread if run.end > best.num_tokens)
        return best._replace(unread=tuple(dict.fromkeys(unread)))

    def _join_within(
        self, token_ids: Sequence[int], block_hashes: Sequence[bytes], found: Match, root: bytes
    ) -> bool:
        """Whether anything was joined: only a prompt tells the tokens within a block."""
        is_joined = False
        begun = found.num_tokens - found.num_tokens % self._chain.block_size
        above = block_hashes[begun // self._chain.block_size - 1] if begun else root
        for start in range(begun + 1, found.num_tokens + 1):
            name = self._chain.end_hash(above or self._chain.root, token_ids[begun:start])
            for loose in list(self._loose.get(name, ())):
                [*_, (holder, _)] = path_to(found.run, start)
                self.move(loose, holder)
                self._join(loose)
                is_joined = True
        return is_joined

    def next_loose(
        self,
        token_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        position: int,
        root: bytes = b"",
    ) -> list[tuple[Run, int]]:
        """The runs that go on with a prompt once it is computed from `position` to their beginning.

        Each with where it is left, the last one where it ends itself or a block of the prompt does.
        Empty where the prompt is not known any further; the first one starts after `position`. Of
        several that begin at the same place it is what leads furthest.
        """
        if not self._loose:
            return []
        tops: set[Run] = set()
        last, end = None, position
        for number in range(position // self._chain.block_size, len(block_hashes) + 1):
            reached = self._reaching(number, token_ids, block_hashes, root)
            if not tops:
                later = (run for run in reached if run.start > position)
                said = [run for run in later if self._says(token_ids, block_hashes, run, root)]
                first = min(map(_start_of, said), default=0)
                tops = {run for run in said if run.start == first}
            else:
                tops = {run for run in tops if run in reached}
                if not tops:
                    break
            if tops:
                last, end = max((reached[run] for run in tops), key=lambda way: way[1])
        return path_to(last, end)

    def _reaching(
        self, number: int, token_ids: Sequence[int], block_hashes: Sequence[bytes], root: bytes
    ) -> dict[Run, tuple[Run, int]]:
        """The runs that hold the end of a block of a prompt, or end within it with its tokens.

        Each with the position up to which it has them, by the first run that is there on the way
        to it; of several that with the most tokens.
        """
        above = block_hashes[number - 1] if number else root or self._chain.root
        ending = self._ending(self._ends, above, token_ids, len(token_ids), with_loose=True)
        found = {_top(run): (run, run.end) for run in sorted(ending, key=lambda run: run.end)}
        if number < len(block_hashes):
            end = (number + 1) * self._chain.block_size
            found |= {_top(run): (run, end) for run in self._holding(block_hashes[number])}
        return found

    def match_visible(
        self, token_ids: Sequence[int], root: bytes, is_hidden: Callable[[Run], bool]
    ) -> Match:
        """The same token by token, past hidden runs of which the prompt does not say all."""
        return _follow(self._roots.get(root, []), None, 0, token_ids, is_hidden)

    def state(
        self,
        token_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        limit: int,
        root: bytes = b"",
    ) -> Run | None:
        """The run that keeps state at the deepest position up to `limit` on the way of a prompt."""
        num_blocks = limit // self._chain.block_size
        for number in range(self._num_known_blocks(block_hashes[:num_blocks]), -1, -1):
            last_block = block_hashes[number - 1] if number else root or self._chain.root
            runs = self._ending(self._states, last_block, token_ids, limit)
            if (deepest := max(runs, key=lambda run: run.end, default=None)) is not None:
                return deepest
        return None

    def insert(self, run: Run) -> None:
        """Add a run below its parent, or the run that has the tokens before it, if there is one.

        Loose runs that go on from it hang on it.
        """
        if run.parent is None and run.start:
            run.parent = self._before(run)
        self._siblings(run).append(run)
        for block_hash in run.block_hashes:
            if self._blocks.setdefault(block_hash, run) is not run:
                self._twins.setdefault(block_hash, []).append(run)
        if run.end_hash != run.last_block:
            self._ends.setdefault(run.last_block, []).append(run)
            self._enders.setdefault(run.end_hash, []).append(run)
        if run.has_state:
            self._states.setdefault(run.last_block, []).append(run)
        self._starts.setdefault(run.start_hash, []).append(run)
        self._num_runs += 1
        self._join(run)

    def remove(self, run: Run) -> None:
        """Take a run out. What hangs on it hangs on another one with these tokens, or is loose."""
        self._leave(run)
        self._forget(run)
        below = list(run.children)
        while below:
            child = below.pop()
            before = self._before(child)
            self.move(child, before)
            if before is None or before.is_loose:
                below += child.children

    def move(self, child: Run, parent: Run | None) -> None:
        """Hang a run, with what is below it, on another one that holds the tokens before it."""
        self._leave(child)
        child.parent = parent
        self._siblings(child).append(child)
        if parent is not None:
            self._name_end(child)

    def _join(self, run: Run) -> None:
        """Hang on a run what has waited for its tokens, and on that what has waited for its own."""
        is_loose = run.is_loose
        there = [run]
        while there:
            one = there.pop()
            for end in (*one.block_hashes, one.end_hash):
                for other in list(self._starts.get(end, ())):
                    if other.parent is None or (other.is_loose and not is_loose):
                        self.move(other, one)
            there += one.children

    def _name_end(self, run: Run) -> None:
        """Where a run without a complete block ends is known now that what is above it is."""
        if run.last_block:
            return
        last_block = _last_block(self._chain, run, run.end, run.root)
        for index in (self._ends, self._states):
            if run in index.get(b"", ()):
                _discard(index, b"", run)
                index.setdefault(last_block, []).append(run)
        run.last_block = last_block
        for child in run.children:
            self._name_end(child)

    def _leave(self, run: Run) -> None:
        """Let a run hang nowhere."""
        if run.parent is not None:
            run.parent.children.remove(run)
        elif run.start:
            _discard(self._loose, run.start_hash, run)
        else:
            _discard(self._roots, run.root, run)

    def _before(self, run: Run) -> Run | None:
        """A run that has the tokens before this one, and is not loose if there is such a one."""
        found = [*self._holding(run.start_hash), *self._enders.get(run.start_hash, ())]
        found = [one for one in found if one is not run and one.start < run.start <= one.end]
        return min(found, key=lambda one: one.is_loose, default=None)

    def _says(
        self, token_ids: Sequence[int], block_hashes: Sequence[bytes], run: Run, root: bytes
    ) -> bool:
        """A prompt has all the tokens before this run."""
        begun = run.start - run.start % self._chain.block_size
        last_block = block_hashes[begun // self._chain.block_size - 1] if begun else root
        tail = token_ids[begun : run.start]
        return self._chain.end_hash(last_block or self._chain.root, tail) == run.start_hash

    def _holding(self, block_hash: bytes) -> list[Run]:
        """The runs that hold the end of a block."""
        run = self._blocks.get(block_hash)
        return [run, *self._twins.get(block_hash, ())] if run is not None else []

    def lose_state(self, run: Run) -> None:
        """The state at the end of this run is no longer kept."""
        run.has_state = False
        _discard(self._states, run.last_block, run)

    def _forget(self, run: Run) -> None:
        for block_hash in run.block_hashes:
            if self._blocks[block_hash] is not run:
                _discard(self._twins, block_hash, run)
            elif block_hash in self._twins:
                self._blocks[block_hash] = self._twins[block_hash][0]
                _discard(self._twins, block_hash, self._blocks[block_hash])
            else:
                del self._blocks[block_hash]
        _discard(self._ends, run.last_block, run)
        _discard(self._enders, run.end_hash, run)
        _discard(self._states, run.last_block, run)
        _discard(self._starts, run.start_hash, run)
        self._num_runs -= 1

    def _siblings(self, run: Run) -> list[Run]:
        if run.parent is not None:
            return run.parent.children
        if run.start:
            return self._loose.setdefault(run.start_hash, [])
        return self._roots.setdefault(run.root, [])

    def _num_known_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these blocks can be taken up: all that come before are there as well."""
        there: set[Run] = set()
        for number, block_hash in enumerate(block_hashes):
            runs = self._holding(block_hash)
            there.update(run for run in runs if _goes_on(run, there))
            if there.isdisjoint(runs):
                return number
        return len(block_hashes)

    def _ending(
        self,
        index: dict[bytes, list[Run]],
        last_block: bytes,
        token_ids: Sequence[int],
        limit: int,
        *,
        with_loose: bool = False,
    ) -> list[Run]:
        """The runs that end in the block after `last_block`, up to `limit`, with these tokens."""
        size = self._chain.block_size
        hashes: dict[int, bytes] = {}
        found: list[Run] = []
        for run in index.get(last_block, ()):
            if run.end > limit:
                continue
            if run.end not in hashes:
                tail = token_ids[run.end - run.end % size : run.end]
                hashes[run.end] = self._chain.end_hash(last_block, tail)
            if hashes[run.end] == run.end_hash and (with_loose or not run.is_loose):
                found.append(run)
        return found


def run_of(
    chain: HashChain,
    parent: Run | None,
    start: int,
    end: int,
    hashes: tuple[bytes, ...],
    *,
    root: bytes = b"",
) -> Run:
    """A run below `parent`, not in a tree yet, with the `end_hash` of one that ends a block.

    `hashes` are its `start_hash` and those of its blocks. Without a parent the tree finds one.
    """
    assert parent is None or parent.root == root, "a run continues its own tenant's"
    start_hash, *block_hashes = hashes
    run = Run(parent, start, end, tuple(block_hashes), b"", b"", start_hash, root=root)
    run.last_block = run.end_hash = _last_block(chain, run, end, root)
    return run


def start_hash_of(chain: HashChain, parent: Run | None, start: int, root: bytes) -> bytes:
    """The hash of the prefix that ends at `start` in `parent`, which has its tokens or ends there;
    empty for the beginning.
    """
    if parent is None or not start:
        return b""
    if start == parent.end:
        return parent.end_hash
    begun = start - start % chain.block_size
    return chain.end_hash(_last_block(chain, parent, begun, root), _tokens(parent, begun, start))


def part_of(run: Run, start: int, end: int, block_size: int) -> Run:
    """The tokens `[start, end)` of a run without pictures as one of their own, not in a tree yet.

    Both are where a block ends, or where the run begins or ends.
    """
    start_hash, block_hashes, end_hash = part_hashes(run, start, end, block_size)
    last_block = block_hashes[-1] if block_hashes else run.last_block
    part = Run(None, start, end, block_hashes, last_block, end_hash, start_hash)
    part.root, part.rope_delta = run.root, run.rope_delta
    part.has_state = run.has_state and end == run.end
    if run.token_ids is not None:
        part.token_ids = run.token_ids[start - run.start : end - run.start]
    return part


def renamed(old: PrefixTree, chain: HashChain, root_of: Callable[[bytes], bytes]) -> PrefixTree:
    """The same runs under the names of another chain; all of them must have their tokens.

    `root_of` gives for a tenant's root the one of that chain.
    """
    runs, new = list(old), PrefixTree(chain)
    for run in runs:
        run.children.clear()
    for run in runs:  # parents first
        _rename(chain, run, root_of(run.root))
        new.insert(run)
    return new


def _rename(chain: HashChain, run: Run, root: bytes) -> None:
    assert run.token_ids is not None
    size = chain.block_size
    begun = run.start - run.start % size
    whole = _tokens(run.parent, begun, run.start) + run.token_ids
    run.root = root
    run.start_hash = start_hash_of(chain, run.parent, run.start, root)
    above = _last_block(chain, run.parent, run.start, root)
    run.block_hashes = tuple(chain.block_hashes(whole, root=above))
    run.last_block = run.block_hashes[-1] if run.block_hashes else above
    run.end_hash = chain.end_hash(run.last_block, whole[len(whole) - run.end % size :])


def _tokens(run: Run | None, start: int, end: int) -> array[int]:
    """Those from `start` to `end` on the way to a run."""
    found = array("I")
    for one, leave in path_to(run, end):
        if leave > start and one.token_ids is not None:
            found += one.token_ids[max(start - one.start, 0) : leave - one.start]
    return found


def _last_block(chain: HashChain, run: Run | None, end: int, root: bytes) -> bytes:
    """The hash of the last block that is complete at `end`, which ends in `run` or above it; empty
    where what is above is not there.
    """
    number = end // chain.block_size
    position = number * chain.block_size
    while run is not None and position:
        if run.start < position <= run.end:
            return run.block_hashes[number - run.start // chain.block_size - 1]
        if position == run.start:
            return run.start_hash
        if run.parent is None:
            return b""
        run = run.parent
    return root or chain.root


def num_common(known: Sequence[int], known_start: int, token_ids: Sequence[int], start: int) -> int:
    """How many tokens of `known` from `known_start` on are those of `token_ids` from `start` on."""
    limit = min(len(known) - known_start, len(token_ids) - start)
    if limit <= 0 or known[known_start] != token_ids[start]:
        return 0
    # Comparing slices runs in C. Mostly all is the same; else halving finds the first difference.
    a = array("I", known[known_start : known_start + limit])
    if a == array("I", token_ids[start : start + limit]):
        return limit
    low, high = 1, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        a = array("I", known[known_start + low : known_start + middle])
        if a == array("I", token_ids[start + low : start + middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _follow(
    roots: Sequence[Run],
    run: Run | None,
    position: int,
    token_ids: Sequence[int],
    is_hidden: Callable[[Run], bool] | None = None,
) -> Match:
    """Go on token by token, inside the run and into what hangs on it; without one from `roots`."""
    unread: list[Run] = []
    while True:
        if run is not None and position < min(run.end, len(token_ids)):
            if run.token_ids is None:
                unread.append(run)
            else:
                position += num_common(run.token_ids, position - run.start, token_ids, position)
        following = run.children if run is not None else roots
        best, num_best = None, 0
        for child in following:
            if not _may_follow(child, position, token_ids):
                continue
            if child.token_ids is None:
                unread.append(child)
                continue
            count = num_common(child.token_ids, 0, token_ids, position)
            if is_hidden is not None and count < child.num_tokens and is_hidden(child):
                continue
            if count > num_best:
                best, num_best = child, count
        if best is None:
            return Match(run, position, tuple(unread))
        run = best


def _may_follow(run: Run, position: int, token_ids: Sequence[int]) -> bool:
    """A run goes on there, with the same token if it is known: of thousands few do."""
    if run.start != position or position >= len(token_ids):
        return False
    return not run.token_ids or run.token_ids[0] == token_ids[position]


def path_to(run: Run | None, num_tokens: int) -> list[tuple[Run, int]]:
    """The runs that hold the first `num_tokens` tokens in order, each with where it is left.

    Of a loose run those that are there.
    """
    path: list[tuple[Run, int]] = []
    end = num_tokens
    while run is not None:
        if end > run.start:
            path.append((run, min(end, run.end)))
        end = min(end, run.start)
        run = run.parent
    path.reverse()
    return path


def tokens_to(run: Run) -> array[int]:
    """All tokens up to the end of a run, as far as they are known."""
    token_ids = array("I")
    for one, leave in path_to(run, run.end):
        if one.start != len(token_ids) or one.token_ids is None:
            break
        token_ids += one.token_ids[: leave - one.start]
    return token_ids


def _start_of(run: Run) -> int:
    return run.start


def _top(run: Run) -> Run:
    """The first run on the way to this one that is there."""
    while run.parent is not None:
        run = run.parent
    return run


def _goes_on(run: Run, there: Container[Run]) -> bool:
    """Whether it goes on from one of these, or has all tokens from the first on before it."""
    while run.parent is not None:
        run = run.parent
        if run in there:
            return True
    return not run.start


def _discard(index: dict[bytes, list[Run]], key: bytes, run: Run) -> None:
    runs = index.get(key, [])
    if run in runs:
        runs.remove(run)
        if not runs:
            del index[key]
