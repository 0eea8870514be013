"""Generated turns by the conversations they end, for healing: in memory, and in heads on disk.

A turn belongs to its content, and has owners: every conversation that it is part of. It is gone
when the last of them is. On disk it is part of its conversation's head; the server says which heads
have what is looked for, and they are read when they are wanted. Losing one costs time only.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.kv.deletions import Deletions, Recognised
from runtime.kv_messages import TurnsFound, TurnsWanted
from runtime.prompt.canonical import advance, defaults_of
from runtime.prompt.healing import AnswerRecord, Cut, KnownPrefix, Lineage, TurnScope
from runtime.prompt.kept_tools import unpacked as tools_in
from runtime.worker.input.template import Template
from store.errors import StoreError
from store.head_file import Owner, owner_of, read_head
from store.keyed_names import Asker, Chain, Whom
from store.turns import Turn, unpacked

MAX_MEMORY_BYTES = 64 << 20
MAX_ANSWERS = 4
"""So many answers to one question are tried, if they look the same."""
_CONTEXT_TOKENS = 8
_QUICK_S = 0.05
_PATIENCE_S = 2.0
"""So long a request waits for the server to say what heads there are."""


@dataclass(slots=True)
class _Held:
    """A turn in memory, and its owners there; None stands for others, in whose heads it is."""

    turn: Turn
    owners: set[TurnScope | None] = field(default_factory=set["TurnScope | None"])


class _Latest:
    """Turns by what names their conversations, those that came last first."""

    def __init__(self) -> None:
        self._turns: dict[bytes, dict[bytes, None]] = {}

    def of(self, key: bytes) -> list[bytes]:
        return list(reversed(self._turns.get(key, {})))

    def add(self, key: bytes, turn: bytes) -> None:
        """It is the last that came."""
        if key:
            turns = self._turns.setdefault(key, {})
            turns.pop(turn, None)
            turns[turn] = None

    def discard(self, key: bytes, turn: bytes) -> None:
        turns = self._turns.get(key, {})
        turns.pop(turn, None)
        if not turns:
            self._turns.pop(key, None)


class TurnMemory:
    """The turns in memory with their owners, within a cap. The lock is its user's."""

    def __init__(self, max_bytes: int) -> None:
        self.held: OrderedDict[bytes, _Held] = OrderedDict()
        """By their ids, those that were taken in last at the end."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._keys, self._bare, self._asked = _Latest(), _Latest(), _Latest()

    def answers(self, key: bytes) -> list[_Held]:
        """The turns with this key, those that came last first."""
        return [self.held[turn_id] for turn_id in self._keys.of(key)]

    def with_tools(self, bare: bytes) -> list[Turn]:
        """The same of what names a conversation with whatever tools."""
        return [self.held[turn_id].turn for turn_id in self._bare.of(bare)]

    def to_question(self, asked: bytes) -> list[Turn]:
        """The same of all answers to this question."""
        return [self.held[turn_id].turn for turn_id in self._asked.of(asked)]

    def has(self, turn: Turn, scope: TurnScope) -> bool:
        """It is there for this owner."""
        held = self.held.get(turn.id)
        return held is not None and scope in held.owners

    def remember(self, turn: Turn, scope: TurnScope | None) -> None:
        """Take it in for an owner; the oldest ones go for it."""
        turn_id = turn.id
        held = self.held.get(turn_id)
        if held is None:
            held = self.held[turn_id] = _Held(turn)
            self._num_bytes += _num_bytes(turn)
        for names, name in self._names_of(turn):
            names.add(name, turn_id)
        self.held.move_to_end(turn_id)
        held.owners.add(scope)
        while self._num_bytes > self._max_bytes and len(self.held) > 1:
            oldest, held = next(iter(self.held.items()))
            for owner in list(held.owners):
                self.drop_owner(oldest, owner)

    def drop_owner(self, turn_id: bytes, scope: TurnScope | None) -> None:
        """It needs the turn no more, at least not in memory."""
        held = self.held.get(turn_id)
        if held is None or scope not in held.owners:
            return
        held.owners.discard(scope)
        if not held.owners:
            del self.held[turn_id]
            self._num_bytes -= _num_bytes(held.turn)
            for names, name in self._names_of(held.turn):
                names.discard(name, turn_id)

    def _names_of(self, turn: Turn) -> tuple[tuple[_Latest, bytes], ...]:
        return (self._keys, turn.key), (self._bare, turn.bare), (self._asked, turn.asked)


class Others(Protocol):
    """Those who are to be taken in beside a request that waits."""

    def aside(self) -> AbstractContextManager[None]:
        """The next one is taken in meanwhile."""
        ...

    def slow_down(self) -> None:
        """All others are taken in meanwhile, from now on."""
        ...


class AskedHeads:
    """The server is asked through `send` which heads have turns; `hear` takes its answers.

    From any thread.
    """

    def __init__(self, send: Callable[[TurnsWanted], None]) -> None:
        self.others: Others | None = None
        """They go on while somebody waits."""
        self._send = send
        self._answers: dict[int, tuple[str, ...] | None] = {}
        self._told = threading.Condition()
        self._num_asked = 0
        self._is_closed = False

    def ask(self, owner: Owner, digests: Sequence[bytes]) -> tuple[str, ...]:
        """The files of heads, the best first; none if nobody answers."""
        with self._told:
            if self._is_closed:
                return ()
            self._num_asked += 1
            number = self._num_asked
            self._answers[number] = None
            self._send(TurnsWanted(number=number, owner=owner, digests=tuple(digests)))
        try:
            with self.others.aside() if self.others is not None else nullcontext():
                self._wait_for(number)
        finally:
            answer = self._answers.pop(number)
        return answer or ()

    def _wait_for(self, number: int) -> None:
        def is_settled() -> bool:
            return self._is_closed or self._answers[number] is not None

        with self._told:
            is_quick = self._told.wait_for(is_settled, _QUICK_S)
        if not is_quick and self.others is not None:
            self.others.slow_down()
        with self._told:
            self._told.wait_for(is_settled, _PATIENCE_S)

    def hear(self, found: TurnsFound) -> None:
        """The server has answered."""
        with self._told:
            if found.number in self._answers:
                self._answers[found.number] = found.paths
                self._told.notify_all()

    def close(self) -> None:
        """The server is gone: nothing is found any more."""
        with self._told:
            self._is_closed = True
            self._told.notify_all()


class TurnWithTools(NamedTuple):
    """A turn, and the tools that it was asked with, packed."""

    turn: Turn
    tools: bytes


class _Names(NamedTuple):
    """What names owners in the store that is open."""

    secret: bytes
    tenant_root: Callable[[str], bytes]

    def owner_of(self, scope: TurnScope) -> Owner:
        return owner_of(self.secret, scope.asker, self.tenant_root(scope.tenant))


class TurnStore:
    """In memory, and what `heads` finds on disk once there is a store there. For any thread.

    Whoever has it forget something adds that to `deletions` before.
    """

    def __init__(
        self,
        deletions: Deletions | None = None,
        heads: AskedHeads | None = None,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self.deletions = Deletions() if deletions is None else deletions
        self._heads = heads
        self._names: _Names | None = None
        self._lock = threading.Lock()
        self._memory = TurnMemory(max_memory_bytes)
        self._num_forgotten = 0

    def attach(self, secret: bytes, tenant_root: Callable[[str], bytes]) -> None:
        """From now on turns are looked for on disk as well.

        Owners there are keyed with the store's `secret`, and tenants told by where their hashes
        begin.
        """
        with self._lock:
            self._names = _Names(secret, tenant_root)

    def has(self, key: bytes, bare: bytes, scope: TurnScope) -> bool:
        """Whether a turn of its own that ends this conversation is in memory with all before it,
        whatever its tools were.
        """
        with self._lock:
            turns = [one.turn for one in self._memory.answers(key)] + self._memory.with_tools(bare)
            own = [one for one in turns if self._memory.has(one, scope)]
        return any(self._way_to(one) is not None for one in own)

    def fetch(self, digests: Sequence[bytes], scope: TurnScope) -> None:
        """Have in memory what heads on disk have of a conversation that is called like one of these
        at a turn or a question, those that matter most first.
        """
        if not (digests and self._fetched(digests, scope)):
            # What was deleted meanwhile may have been read: by now no head has it.
            self._fetched(digests, scope)

    def _fetched(self, digests: Sequence[bytes], scope: TurnScope) -> bool:
        """Whether nothing was forgotten meanwhile; else nothing more is taken in."""
        with self._lock:
            names, num_forgotten = self._names, self._num_forgotten
        if names is None or self._heads is None or not digests:
            return True
        owner = names.owner_of(scope)
        for path in reversed(self._heads.ask(owner, digests)):  # the best comes last
            with suppress(StoreError):
                head, token_ids, data = read_head(Path(path))
                said = unpacked(data, token_ids)
                is_its = owner.session != b"" or said.beginning == scope.beginning
                whose = scope if head.owner == owner and is_its else None
                with self._lock:
                    if num_forgotten != self._num_forgotten:
                        return False
                    for turn in (*said.turns, *filter(None, [said.summary])):
                        self._memory.remember(turn, whose)
        return True

    def lend(self, turns: Iterable[Turn], recognised: Recognised) -> None:
        """Have these in memory for who asks next, unless that was deleted since, as by `put`."""
        with self._lock:
            if not self.deletions.mean(recognised):
                for turn in turns:
                    self._memory.remember(turn, None)

    def find(
        self, links: Sequence[bytes], scope: TurnScope
    ) -> tuple[int, list[KnownPrefix]] | None:
        """The last of a conversation's digests that ends in a turn of ours, with all its tokens.

        More than one where several answers look the same; those that `scope` was given come first.
        """
        for number in range(len(links) - 1, -1, -1):
            ways = [self._way_to(turn) for turn in self._answers(links[number], scope)]
            if found := [known_prefix(way) for way in ways if way is not None]:
                return number, found
        return None

    def summary(self, key: bytes, scope: TurnScope) -> Turn | None:
        """What stands for the beginning of a conversation, if that was summed up."""
        for is_fetched in (False, True):
            if is_fetched:
                self.fetch([key], scope)
            if found := [one for one in self._answers(key, scope) if one.summary]:
                return found[0]
        return None

    def with_tools(self, bare: bytes) -> list[TurnWithTools]:
        """The turns that end a conversation, whatever its tools are, each with those it had.

        `bare` is what names the conversation without them. Those that came last come first.
        """
        with self._lock:
            turns = self._memory.with_tools(bare)
        return [TurnWithTools(way[-1], tools_of(way)) for way in self._ways_to(turns)]

    def to_question(self, asked: bytes) -> list[list[Turn]]:
        """The last answers to the question that this names, each with all turns before it."""
        with self._lock:
            turns = self._memory.to_question(asked)
        return self._ways_to(turns)

    def is_of(self, turn: Turn, scope: TurnScope) -> bool:
        """Whether a turn is part of this conversation."""
        with self._lock:
            return self._memory.has(turn, scope)

    def had_thoughts(self, scope: TurnScope) -> bool:
        """Whether answers of this conversation had any, as far as a few of them tell."""
        with self._lock:
            held = self._memory.held.values()
            own = (one.turn for one in held if scope in one.owners)
            return any(one.thoughts for one in islice(own, MAX_ANSWERS))

    def put(self, turn: Turn, scope: TurnScope, recognised: Recognised | None = None) -> None:
        """Take a turn in, unless its conversation, as it is `recognised`, was deleted since."""
        self.adopt([turn], scope, recognised)

    def adopt(
        self, turns: Iterable[Turn], scope: TurnScope, recognised: Recognised | None = None
    ) -> None:
        """These turns are part of a conversation, unless that was deleted since, as by `put`."""
        with self._lock:
            if recognised is not None and self._names is not None:
                root = self._names.tenant_root(scope.tenant)
                recognised = recognised._replace(root=root)
            if recognised is None or not self.deletions.mean(recognised):
                for turn in turns:
                    self._memory.remember(turn, scope)

    def forget(self, whom: Whom, secret: bytes) -> None:
        """A conversation, or all, are owners no more. From any thread.

        `secret` is the store's, also before it was attached. What heads of others have is read
        again: some of these may be meant.
        """
        with self._lock:
            self._num_forgotten += 1
            for turn_id, held in list(self._memory.held.items()):
                meant = [one for one in held.owners if one and whom.means(one.asker, secret)]
                for scope in [None, *meant]:
                    self._memory.drop_owner(turn_id, scope)
        if whom.chain is not None:
            self._forget_chain(whom.chain, whom.model or "")

    def _forget_chain(self, chain: Chain, model: str) -> None:
        """Turns that only this chain without a session id is made of leave memory, from the end;
        whose a summary is cannot be told there, so all of those do.
        """
        scopes: dict[TurnScope, dict[bytes, Turn]] = {}
        token_ids, ids = array("I", chain.token_ids), {*chain.turns}
        with self._lock:
            names = self._names
            for turn_id, one in self._memory.held.items():
                for scope in filter(None, one.owners):
                    is_its = names is None or names.tenant_root(scope.tenant) == chain.root
                    if is_its and scope.asker == Asker(model):
                        scopes.setdefault(scope, {})[turn_id] = one.turn
        for scope, turns in scopes.items():
            going_on = Counter(one.parent for one in turns.values())
            for turn in sorted(turns.values(), key=lambda one: one.end, reverse=True):
                is_its = turn.summary or turn.id in ids or self._is_made_of(turn, token_ids)
                if is_its and not going_on[turn.id]:
                    going_on[turn.parent] -= 1
                    with self._lock:
                        self._memory.drop_owner(turn.id, scope)

    def _is_made_of(self, turn: Turn, chain: array[int]) -> bool:
        """As far as the chain goes: the KV of an answer may end before its last token."""
        way = self._way_to(turn) or [turn]
        return all(
            array("I", one.token_ids)[: len(there)] == there
            for one in way
            if (there := chain[one.start : one.end]) or not one.start
        )

    def _answers(self, key: bytes, scope: TurnScope) -> list[Turn]:
        """The turns with this key: those of a conversation first, then those that came last."""
        with self._lock:
            held = sorted(self._memory.answers(key), key=lambda one: scope not in one.owners)
            return [one.turn for one in held[:MAX_ANSWERS]]

    def _ways_to(self, turns: Sequence[Turn]) -> list[list[Turn]]:
        """To the first few of these turns."""
        return [way for one in turns[:MAX_ANSWERS] if (way := self._way_to(one)) is not None]

    def _way_to(self, turn: Turn) -> list[Turn] | None:
        """A turn and all before it, the first one first; None when one of them is missing."""
        turns = [turn]
        with self._lock:
            while turns[-1].start:
                last = turns[-1]
                held = self._memory.held.get(last.parent)
                parent = held.turn if held is not None else None
                if parent is None or parent.end != last.start or parent.start >= last.start:
                    return None
                turns.append(parent)
        return turns[::-1] if all(one.token_ids for one in turns) else None


def tools_of(way: Sequence[Turn]) -> bytes:
    """The tools that the last of these turns was asked with, packed."""
    return next((turn.tools for turn in reversed(way) if turn.tools), b"")


def _num_bytes(turn: Turn) -> int:
    return len(turn.token_ids) + len(turn.tools) + len(turn.summary)


def known_prefix(turns: Sequence[Turn]) -> KnownPrefix:
    """Turns in a row as the beginning of a conversation."""
    token_ids = array("I")
    for turn in turns:
        token_ids.frombytes(turn.token_ids)
    return KnownPrefix(
        turns=tuple(turns),
        token_ids=token_ids.tolist(),
        ends=tuple(end for turn in turns for end in turn.ends),
        prefix_end=turns[0].prefix_end,
        thoughts={turn.key: turn.thoughts for turn in turns},
    )


@dataclass(slots=True)
class PendingTurn:
    """An answer that is being given: once the model has ended it, it becomes a turn."""

    turns: TurnStore
    lineage: Lineage
    template: Template
    prompt_ids: Sequence[int]
    came_after: int = 0
    """The number of the last deletion before its request came."""
    spoken: AnswerRecord = field(default_factory=AnswerRecord)

    def __post_init__(self) -> None:
        way, scope = self.lineage.way, self.lineage.scope
        self.turns.adopt(way, scope, self._recognised)

    @property
    def _recognised(self) -> Recognised:
        (asker, beginning, _), num_said = self.lineage.scope, self.lineage.start
        return Recognised(asker, self.came_after, self.prompt_ids, beginning, num_said)

    def end(
        self, output_ids: Sequence[int], cut: Cut | None = None, *, is_whole: bool = True
    ) -> Turn | None:
        """All of it was said, with these tokens, but for what ended it: the turn that it is.

        What says nothing, or no more than it began with, is no turn: it would be its own parent.
        Unless it `is_whole` it ended inside of thoughts or of a call.
        """
        if self.spoken.is_empty:
            return None
        self.spoken.texts.insert(0, self.lineage.begun)
        if cut is not None:
            kept = self._before(cut, output_ids)
            if kept is None:
                return None
            output_ids = kept
        lineage = self.lineage
        before = lineage.way[-1] if lineage.way else None
        is_resumed = before is not None and before.asked == lineage.key
        token_ids = array("I", self.prompt_ids[lineage.start :])
        token_ids.extend(output_ids)
        end = len(self.prompt_ids) + len(output_ids)
        form = self.spoken.form(defaults_of(tools_in(lineage.tools)))
        turn = Turn(
            key=advance(lineage.key, form) if is_whole else b"",
            parent=before.id if before is not None else b"",
            start=lineage.start,
            token_ids=token_ids.tobytes(),
            ends=(*lineage.ends, end),
            prefix_end=lineage.prefix_end,
            thoughts=self.spoken.thought(),
            bare=advance(lineage.bare, self.spoken.form()) if lineage.bare and is_whole else b"",
            tools=lineage.tools if lineage.tools != tools_of(lineage.way) else b"",
            # Where an answer that its client began has begun nobody knows, if it was not ours.
            asked=lineage.key if is_resumed or not lineage.begun else b"",
            said_at=before.said_at if before is not None and is_resumed else len(self.prompt_ids),
        )
        self.turns.put(turn, lineage.scope, self._recognised)
        return turn

    def _before(self, cut: Cut, output_ids: Sequence[int]) -> list[int] | None:
        """The tokens up to where the cut is; None where that is in doubt."""
        stop = cut.mark
        said = "".join("".join(self.spoken.texts).split())
        last = len(output_ids) - 1
        for number in range(last, max(last - len(stop.encode()) - _CONTEXT_TOKENS, -1), -1):
            before = output_ids[max(number - _CONTEXT_TOKENS, 0) : number]
            tail = self._text_of(output_ids[number:], before)
            if stop not in tail:
                continue
            rest = tail[: tail.index(stop)]
            shown = "".join((self._text_of(before, ()) + rest).split())
            is_sure = bool(said) and (shown.endswith(said) or said.endswith(shown))
            kept = [*output_ids[:number], *self.template.encode(rest).token_ids]
            return kept if is_sure or cut.is_last else None
        return None

    def _text_of(self, token_ids: Sequence[int], before: Sequence[int]) -> str:
        detokenizer = self.template.detokenizer(before or self.prompt_ids)
        return "".join(detokenizer.add(one) for one in token_ids) + detokenizer.finish()
