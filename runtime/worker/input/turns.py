"""Generated turns by the conversations they end, for healing: in memory, and in small files.

A turn belongs to its content, and has owners: every conversation that it is part of. It is gone
when the last of them is. A file holds token ids, so it is private like a slot, and is read when it
is wanted. Losing one costs time only.
"""

from __future__ import annotations

import os
import queue
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from runtime.kv.deletions import Deletions, Recognised
from runtime.kv.room import UNBOUNDED, WriteRoom
from runtime.prompt.canonical import advance, defaults_of
from runtime.prompt.healing import AnswerRecord, Cut, KnownPrefix, Lineage, TurnScope
from runtime.prompt.kept_tools import unpacked
from runtime.worker.input.template import Template
from store.disk import PRIVATE_DIRECTORY, PRIVATE_FILE
from store.errors import OverCap
from store.keyed_names import Asker, Chain, Whom, conversation_key, model_key
from store.temp_names import PART, temp_name
from store.turns import (
    Folders,
    Named,
    Turn,
    folder_name,
    link,
    name_of_key,
    name_of_turn,
    named,
    packed,
    read_turn,
    unnamed_folder,
)

MAX_MEMORY_BYTES = 64 << 20
MAX_READ_BYTES = 16 << 20
"""Of turns that are on disk, so much of what was read last is kept in memory as well."""
MAX_DISK_BYTES = 256 << 20
MAX_FILES = 50_000
MAX_ANSWERS = 4
"""So many answers to one question are tried, if they look the same."""
_CONTEXT_TOKENS = 8
Name = TypeVar("Name", str, bytes)


@dataclass(slots=True)
class _Held:
    """A turn in memory, its owners there, and which of them may have it on disk."""

    turn: Turn
    owners: dict[TurnScope, bool] = field(default_factory=dict[TurnScope, bool])


@dataclass(slots=True)
class _File:
    """A turn on disk: its links by the folders of its owners."""

    name: Named
    num_bytes: int
    links: dict[str, Path] = field(default_factory=dict[str, Path])


class _Job(NamedTuple):
    """A turn that is to be on disk for an owner."""

    turn: Turn
    scope: TurnScope


class _Latest(Generic[Name]):
    """Turns by what names their conversations, those that came last first."""

    def __init__(self) -> None:
        self._turns: dict[Name, dict[Name, None]] = {}

    def clear(self) -> None:
        self._turns.clear()

    def of(self, key: Name) -> list[Name]:
        return list(reversed(self._turns.get(key, {})))

    def add(self, key: Name, turn: Name) -> None:
        """It is the last that came."""
        turns = self._turns.setdefault(key, {})
        turns.pop(turn, None)
        turns[turn] = None

    def discard(self, key: Name, turn: Name) -> None:
        turns = self._turns.get(key, {})
        turns.pop(turn, None)
        if not turns:
            self._turns.pop(key, None)


class TurnFiles:
    """What is on disk of a model's turns, as it is known here. The lock is its user's."""

    def __init__(self) -> None:
        self.folders: OrderedDict[str, set[Named]] = OrderedDict()
        """Those that were used last at the end."""
        self._files: dict[str, _File] = {}
        """By what stands for the turn itself."""
        self._answers: _Latest[str] = _Latest()
        """By key."""
        self._bare: _Latest[str] = _Latest()
        self._asked: _Latest[str] = _Latest()
        self._num_bytes = 0

    def clear(self) -> None:
        self.folders.clear()
        self._files.clear()
        self._answers.clear()
        self._bare.clear()
        self._asked.clear()
        self._num_bytes = 0

    def learn(self, root: Path) -> None:
        """What is there from before."""
        if not root.is_dir():
            return
        with suppress(OSError):
            folders = [one for one in root.iterdir() if one.is_dir()]
            folders.sort(key=lambda folder: folder.stat().st_mtime)
            for folder in folders:
                self.learn_folder(folder)

    def learn_folder(self, folder: Path) -> None:
        """The same of one conversation."""
        with suppress(OSError):
            for path in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime_ns):
                if (name := named(path.name)) is not None:
                    self.note(folder.name, name, path, path.stat().st_size)
                else:  # unfinished, or of an earlier form
                    path.unlink(missing_ok=True)

    def note(self, folder: str, name: Named, path: Path, num_bytes: int) -> None:
        """There is a link to this turn now."""
        self.folders.setdefault(folder, set()).add(name)
        self.folders.move_to_end(folder)
        if name.turn not in self._files:
            self._files[name.turn] = _File(name, num_bytes)
            self._num_bytes += num_bytes
            self._answers.add(name.key, name.turn)
            if name.bare:
                self._bare.add(name.bare, name.turn)
            if name.asked:
                self._asked.add(name.asked, name.turn)
        self._files[name.turn].links[folder] = path

    def name_of(self, turn: str) -> Named | None:
        """What the files of a turn are called."""
        file = self._files.get(turn)
        return file.name if file is not None else None

    def paths(self, name: Named) -> list[Path]:
        """Where a turn is, in any of its owners' folders."""
        file = self._files.get(name.turn)
        return list(file.links.values()) if file is not None else []

    def has(self, folder: str, name: Named) -> bool:
        """Whether it is in this one; the server removes files as well."""
        file = self._files.get(name.turn)
        path = file.links.get(folder) if file is not None else None
        return path is not None and path.exists()

    def answers(self, key: str, folder: str) -> list[Named]:
        """The turns with this key, those of the folder first, then those that came last."""
        found = [self._files[turn].name for turn in self._answers.of(key)]
        mine = self.folders.get(folder, set())
        return sorted(found, key=lambda name: name not in mine)

    def with_tools(self, bare: str) -> list[Named]:
        """The turns that end this conversation with whatever tools, those that came last first."""
        return [self._files[turn].name for turn in self._bare.of(bare)]

    def to_question(self, asked: str) -> list[Named]:
        """All answers to this question, those that came last first."""
        return [self._files[turn].name for turn in self._asked.of(asked)]

    def lose(self, folder: str, name: Named) -> None:
        """A link is there no more."""
        file = self._files.get(name.turn)
        self.folders.get(folder, set[Named]()).discard(name)
        if file is None or file.links.pop(folder, None) is None or file.links:
            return
        del self._files[name.turn]
        self._num_bytes -= file.num_bytes
        self._answers.discard(file.name.key, name.turn)
        self._bare.discard(file.name.bare, name.turn)
        self._asked.discard(file.name.asked, name.turn)

    def forget(self, folder: str) -> list[Path]:
        """A folder's links, which are known no more."""
        names = self.folders.pop(folder, set())
        gone: list[Path] = []
        for name in names:
            gone.append(self._files[name.turn].links[folder])
            self.lose(folder, name)
        return gone

    def excess(self, max_bytes: int) -> list[Path]:
        """The links of the conversations that were idle longest, until the caps hold."""
        gone: list[Path] = []
        while len(self.folders) > 1 and (
            self._num_bytes > max_bytes or len(self._files) > MAX_FILES
        ):
            gone += self.forget(next(iter(self.folders)))
        return gone


class TurnMemory:
    """The turns in memory with their owners, within a cap. The lock is its user's."""

    def __init__(self, max_bytes: int) -> None:
        self.held: OrderedDict[bytes, _Held] = OrderedDict()
        """By their ids, those that were taken in last at the end."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._keys: _Latest[bytes] = _Latest()
        self._bare: _Latest[bytes] = _Latest()
        self._asked: _Latest[bytes] = _Latest()

    def answers(self, key: bytes) -> list[_Held]:
        """The turns with this key, those that came last first."""
        return [self.held[turn_id] for turn_id in self._keys.of(key)]

    def with_tools(self, bare: bytes) -> list[Turn]:
        """The same of what names a conversation with whatever tools."""
        return [self.held[turn_id].turn for turn_id in self._bare.of(bare)]

    def to_question(self, asked: bytes) -> list[Turn]:
        """The same of all answers to this question."""
        return [self.held[turn_id].turn for turn_id in self._asked.of(asked)]

    def has(self, turn: Turn, scope: TurnScope, *, is_durable: bool) -> bool:
        """It is there for this owner, and as durable."""
        held = self.held.get(turn.id)
        return held is not None and scope in held.owners and held.owners[scope] >= is_durable

    def remember(self, turn: Turn, scope: TurnScope, *, is_durable: bool) -> None:
        """Take it in for an owner; the oldest ones go for it."""
        turn_id = turn.id
        held = self.held.get(turn_id)
        if held is None:
            held = self.held[turn_id] = _Held(turn)
            self._num_bytes += _num_bytes(turn)
        self._keys.add(turn.key, turn_id)
        if turn.bare:
            self._bare.add(turn.bare, turn_id)
        if turn.asked:
            self._asked.add(turn.asked, turn_id)
        self.held.move_to_end(turn_id)
        held.owners[scope] = is_durable
        while self._num_bytes > self._max_bytes and len(self.held) > 1:
            oldest, held = next(iter(self.held.items()))
            for owner in list(held.owners):
                self.drop_owner(oldest, owner)

    def drop_owner(self, turn_id: bytes, scope: TurnScope) -> None:
        """It needs the turn no more, at least not in memory."""
        held = self.held.get(turn_id)
        if held is None or held.owners.pop(scope, None) is None or held.owners:
            return
        del self.held[turn_id]
        self._num_bytes -= _num_bytes(held.turn)
        self._keys.discard(held.turn.key, turn_id)
        self._bare.discard(held.turn.bare, turn_id)
        self._asked.discard(held.turn.asked, turn_id)


class TurnReader:
    """Reads turns, and keeps those that it read last: each turn goes on from all before it.

    What it kept is given only while a file of it is there. From any thread.
    """

    def __init__(self, max_bytes: int = MAX_READ_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._num_cleared = 0
        self.num_bytes = 0

    def clear(self) -> None:
        """Keep nothing, not even of what is being read right now."""
        with self._lock:
            self._turns.clear()
            self.num_bytes = 0
            self._num_cleared += 1

    def read(self, name: Named, path: Path) -> Turn | None:
        """The turn of this name, which is at this path; None where it is not there."""
        with self._lock:
            kept, began = self._turns.pop(name.turn, None), self._num_cleared
            self.num_bytes -= _num_bytes(kept) if kept is not None else 0
        turn = kept if kept is not None and path.exists() else read_turn(path)
        with self._lock:
            if turn is not None and began == self._num_cleared and name.turn not in self._turns:
                self._turns[name.turn] = turn
                self.num_bytes += _num_bytes(turn)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _num_bytes(self._turns.popitem(last=False)[1])
        return turn


def _no_root(tenant: str) -> bytes:
    """Nobody has a name."""
    del tenant
    return b""


class TurnWithTools(NamedTuple):
    """A turn, and the tools that it was asked with, packed."""

    turn: Turn
    tools: bytes


class TurnStore:
    """In memory, and once there is a disk there. `run` belongs to a thread of its own.

    Whoever has it forget something adds that to `deletions` before.
    """

    def __init__(
        self,
        deletions: Deletions | None = None,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        max_disk_bytes: int = MAX_DISK_BYTES,
        room: WriteRoom = UNBOUNDED,
    ) -> None:
        self.deletions = Deletions() if deletions is None else deletions
        self._room = room
        self._root: Path | None = None
        self._secret = b""
        self._tenant_root: Callable[[str], bytes] = _no_root
        self._max_disk_bytes = max_disk_bytes
        self._lock = threading.Lock()
        self._memory = TurnMemory(max_memory_bytes)
        self._files = TurnFiles()
        self._reader = TurnReader()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._placing = threading.Lock()
        """Held from where it is known that a turn is wanted until its file is there."""

    def attach(
        self, root: Path, secret: bytes, tenant_root: Callable[[str], bytes] = _no_root
    ) -> None:
        """From now on turns are kept at `root` as well, those that came before among them.

        Names there are keyed with the store's `secret`, and tenants told by where their hashes
        begin.
        """
        with self._lock:
            if (root, secret) == (self._root, self._secret):
                return
            self._root, self._secret, self._tenant_root = root, secret, tenant_root
            self._files.clear()
            self._reader.clear()
            self._files.learn(root)
            for held in self._memory.held.values():
                for scope, is_durable in held.owners.items():
                    if is_durable:
                        self._jobs.put(_Job(held.turn, scope))

    def find(
        self, links: Sequence[bytes], scope: TurnScope
    ) -> tuple[int, list[KnownPrefix]] | None:
        """The last of a conversation's digests that ends in a turn of ours, with all its tokens.

        More than one where several answers look the same; those that `scope` was given come first.
        """
        self._look_at(scope)
        for number in range(len(links) - 1, -1, -1):
            ways = [self._way_to(turn) for turn in self._answers(links[number], scope)]
            if found := [known_prefix(way) for way in ways if way is not None]:
                return number, found
        return None

    def with_tools(self, bare: bytes) -> list[TurnWithTools]:
        """The turns that end a conversation, whatever its tools are, each with those it had.

        `bare` is what names the conversation without them. Those that came last come first.
        """
        with self._lock:
            turns = self._memory.with_tools(bare)
            names = self._files.with_tools(name_of_key(self._secret, bare))
        turns += [one for one in self._all_of(names) if one.bare == bare]
        return [TurnWithTools(way[-1], tools_of(way)) for way in self._ways_to(turns)]

    def to_question(self, asked: bytes) -> list[list[Turn]]:
        """The last answers to the question that this names, each with all turns before it."""
        with self._lock:
            turns = self._memory.to_question(asked)
            names = self._files.to_question(name_of_key(self._secret, asked))
        turns += [one for one in self._all_of(names) if one.asked == asked]
        return self._ways_to(turns)

    def is_of(self, turn: Turn, scope: TurnScope) -> bool:
        """Whether a turn is part of this conversation."""
        self._look_at(scope)
        with self._lock:
            is_held = self._memory.has(turn, scope, is_durable=False)
            return is_held or self._files.has(self._folder(scope), self._named(turn))

    def had_thoughts(self, scope: TurnScope) -> bool:
        """Whether answers of this conversation had any, as far as a few of them tell."""
        self._look_at(scope)
        with self._lock:
            turns = [one.turn for one in self._memory.held.values() if scope in one.owners]
            names = self._files.folders.get(self._folder(scope), set[Named]())
            some = [*islice(names, MAX_ANSWERS)]
        return any(turn.thoughts for turn in [*turns, *self._all_of(some)])

    def put(
        self,
        turn: Turn,
        scope: TurnScope,
        *,
        is_durable: bool,
        recognised: Recognised | None = None,
    ) -> None:
        """Take a turn in, unless its conversation, as it is `recognised`, was deleted since."""
        self.adopt([turn], scope, is_durable=is_durable, recognised=recognised)

    def adopt(
        self,
        turns: Sequence[Turn],
        scope: TurnScope,
        *,
        is_durable: bool,
        recognised: Recognised | None = None,
    ) -> None:
        """These turns are part of a conversation, unless that was deleted since, as by `put`."""
        with self._lock:
            folder = self._folder(scope)
            if recognised is not None and self._root is not None:
                recognised = recognised._replace(root=self._tenant_root(scope.tenant))
            if recognised is not None and self.deletions.mean(recognised):
                return
            new = [
                turn
                for turn in turns
                if not self._memory.has(turn, scope, is_durable=is_durable)
                and not self._files.has(folder, self._named(turn))
            ]
            for turn in new:
                self._memory.remember(turn, scope, is_durable=is_durable)
        if is_durable and self._root is not None:
            for turn in new:
                self._jobs.put(_Job(turn, scope))

    def forget(self, whom: Whom, secret: bytes) -> None:
        """A conversation, or all, are owners no more, in memory and on disk. From any thread.

        `secret` is the store's, also before it was attached. Files of a chain the server removes.
        """
        if whom.chain is not None:
            self._forget_chain(whom.chain, whom.model or "")
            with self._placing:  # nothing of it is being written any more
                self._reader.clear()
                return
        with self._lock:
            whose = _folders_of(whom, secret)
            for turn_id, held in list(self._memory.held.items()):
                for scope in [one for one in held.owners if whom.means(one.asker, secret)]:
                    self._memory.drop_owner(turn_id, scope)
            paths: list[Path] = []
            for name in [name for name in self._files.folders if name in whose]:
                paths += self._files.forget(name)
        with self._placing:  # what was being written has gone again
            for path in paths:
                _remove(path)
        self._reader.clear()

    def _forget_chain(self, chain: Chain, model: str) -> None:
        """Turns that only this chain without a session id is made of leave memory, from the end;
        whose a summary is cannot be told there, so all of those do.
        """
        scopes: dict[TurnScope, dict[bytes, Turn]] = {}
        token_ids = array("I", chain.token_ids)
        with self._lock:
            is_known = self._root is not None
            for turn_id, one in self._memory.held.items():
                for scope in one.owners:
                    is_its = not is_known or self._tenant_root(scope.tenant) == chain.root
                    if is_its and scope.asker == Asker(model):
                        scopes.setdefault(scope, {})[turn_id] = one.turn
        for scope, turns in scopes.items():
            going_on = Counter(one.parent for one in turns.values())
            for turn in sorted(turns.values(), key=lambda one: one.end, reverse=True):
                if not going_on[turn.id] and (turn.summary or self._is_made_of(turn, token_ids)):
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

    def run(self) -> None:
        """Write what comes until closed."""
        while (job := self._jobs.get()) is not None:
            self._write(job)

    def close(self) -> None:
        """Let `run` end when everything is written."""
        self._jobs.put(None)

    # Reading

    def _look_at(self, scope: TurnScope) -> None:
        """A conversation that was branched off has its folder from the server."""
        with self._lock:
            folder = self._folder(scope)
            if self._root is not None and folder not in self._files.folders:
                self._files.learn_folder(self._root / folder)

    def _answers(self, key: bytes, scope: TurnScope) -> list[Turn]:
        """The turns with this key: those of a conversation first, then those that came last."""
        with self._lock:
            held = self._memory.answers(key)
            folder = self._folder(scope)
            names = self._files.answers(name_of_key(self._secret, key), folder)
            mine = self._files.folders.get(folder, set[Named]())
        found = [(scope not in one.owners, one.turn) for one in held]
        for name in names[:MAX_ANSWERS]:
            turn = self._read(name)
            if turn is not None and turn.key == key:
                found.append((name not in mine, turn))
        ordered = sorted(found, key=lambda one: one[0])
        return list({turn.id: turn for _, turn in ordered}.values())[:MAX_ANSWERS]

    def _all_of(self, names: Sequence[Named]) -> list[Turn]:
        read = [self._read(name) for name in names[:MAX_ANSWERS]]
        return [turn for turn in read if turn is not None]

    def _ways_to(self, turns: Sequence[Turn]) -> list[list[Turn]]:
        """To the first few of these turns."""
        latest = list({turn.id: turn for turn in turns}.values())[:MAX_ANSWERS]
        return [way for turn in latest if (way := self._way_to(turn)) is not None]

    def _way_to(self, turn: Turn) -> list[Turn] | None:
        """A turn and all before it, the first one first; None when one of them is missing."""
        turns = [turn]
        while turns[-1].start:
            last = turns[-1]
            parent = self._get(last.parent)
            if parent is None or parent.end != last.start or parent.start >= last.start:
                return None
            turns.append(parent)
        return turns[::-1] if all(one.token_ids for one in turns) else None

    def _get(self, turn_id: bytes) -> Turn | None:
        with self._lock:
            if (held := self._memory.held.get(turn_id)) is not None:
                return held.turn
            name = self._files.name_of(name_of_turn(self._secret, turn_id))
        turn = self._read(name) if name is not None else None
        return turn if turn is not None and turn.id == turn_id else None

    def _read(self, name: Named) -> Turn | None:
        with self._lock:
            paths = self._files.paths(name)
        for path in paths:
            if (turn := self._reader.read(name, path)) is not None:
                return turn
            with self._lock:
                self._files.lose(path.parent.name, name)
        return None

    def _named(self, turn: Turn) -> Named:
        key, bare, asked = (
            name_of_key(self._secret, one) if one else ""
            for one in (turn.key, turn.bare, turn.asked)
        )
        return Named(key, name_of_turn(self._secret, turn.id), bare, asked)

    def _folder(self, scope: TurnScope) -> str:
        """What stands for a conversation; one with a session's id as the store's rows have it."""
        asker = scope.asker
        if asker.session_id is not None:
            conversation = conversation_key(self._secret, asker.session_id).hex()
        else:
            tenant = self._tenant_root(scope.tenant)
            conversation = unnamed_folder(self._secret, scope.beginning, tenant)
        name = model_key(self._secret, asker.model) if asker.model else ""
        return folder_name(conversation, name)

    # Writing

    def _write(self, job: _Job) -> None:
        turn, scope = job
        with self._lock:
            root, name, folder = self._root, self._named(turn), self._folder(scope)
            if root is None or not self._is_wanted(job):
                return  # it was forgotten meanwhile
        path, data = root / folder / name.file, packed(turn)
        key = temp_name(path.name, PART)
        try:
            self._room.take(key, len(data))
        except OverCap:
            return  # it stays in memory
        with self._placing:
            for one in self._place(job, name, path, data):
                _remove(one)

    def _place(self, job: _Job, name: Named, path: Path, data: bytes) -> list[Path]:
        """Have a turn at this path, unless it is forgotten; the files that have to go for it."""
        with self._lock:
            others = self._files.paths(name) if self._is_wanted(job) else None
        if others is None:
            return []
        try:
            if not _linked(path, others):
                _write_file(path, data)
            num_bytes = path.stat().st_size
        except OSError:
            return []  # it stays in memory; what ails the disk the slots' own writer reports
        with self._lock:
            if not self._is_wanted(job):
                return [path]  # it was forgotten while it was written
            if self._named(job.turn) != name:
                return []  # another store came meanwhile, and it is to be written there
            self._memory.drop_owner(job.turn.id, job.scope)
            self._files.note(self._folder(job.scope), name, path, num_bytes)
            return self._files.excess(self._max_disk_bytes)

    def _is_wanted(self, job: _Job) -> bool:
        held = self._memory.held.get(job.turn.id)
        return held is not None and held.owners.get(job.scope) is True


def _linked(path: Path, others: Sequence[Path]) -> bool:
    """Have a turn at this path as one more link to another's file, if one is there.

    Raises OSError.
    """
    for directory in (path.parent.parent.parent, path.parent.parent, path.parent):
        directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    for other in others:
        with suppress(FileNotFoundError):  # its owner was deleted meanwhile
            link(other, path)
            return True
    return False


def _write_file(path: Path, data: bytes) -> None:
    """Have a turn at this path as a file of its own. Raises OSError."""
    temporary = path.with_name(temp_name(path.name, PART))
    try:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, PRIVATE_FILE), "wb") as file:
            file.write(data)
        temporary.rename(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
    is_durable: bool
    came_after: int = 0
    """The number of the last deletion before its request came."""
    spoken: AnswerRecord = field(default_factory=AnswerRecord)

    def __post_init__(self) -> None:
        way, scope = self.lineage.way, self.lineage.scope
        self.turns.adopt(way, scope, is_durable=self.is_durable, recognised=self._recognised)

    @property
    def _recognised(self) -> Recognised:
        (asker, beginning, _), num_said = self.lineage.scope, self.lineage.start
        return Recognised(asker, self.came_after, self.prompt_ids, beginning, num_said)

    def end(
        self, output_ids: Sequence[int], cut: Cut | None = None, *, is_whole: bool = True
    ) -> None:
        """All of it was said, with these tokens, but for what ended it.

        What says nothing, or no more than it began with, is no turn: it would be its own parent.
        Unless it `is_whole` it ended inside of thoughts or of a call.
        """
        if self.spoken.is_empty:
            return
        self.spoken.texts.insert(0, self.lineage.begun)
        if cut is not None:
            kept = self._before(cut, output_ids)
            if kept is None:
                return
            output_ids = kept
        lineage = self.lineage
        before = lineage.way[-1] if lineage.way else None
        is_resumed = before is not None and before.asked == lineage.key
        token_ids = array("I", self.prompt_ids[lineage.start :])
        token_ids.extend(output_ids)
        end = len(self.prompt_ids) + len(output_ids)
        form = self.spoken.form(defaults_of(unpacked(lineage.tools)))
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
        whose = self._recognised
        self.turns.put(turn, lineage.scope, is_durable=self.is_durable, recognised=whose)

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


def _folders_of(whom: Whom, secret: bytes) -> Folders:
    """Where the turns of those that somebody names lie."""
    key = whom.key
    if key is None and whom.session_id is not None:
        key = conversation_key(secret, whom.session_id)
    name = model_key(secret, whom.model) if whom.model is not None else None
    return Folders(key.hex() if key is not None else None, name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
