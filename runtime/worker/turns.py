"""Generated turns by the conversations they end, for healing: in memory, and in small files.

A file holds token ids, so it is private like a slot, lies in a folder that only its conversation
has, and is read when it is wanted: what was deleted is gone at once. Losing one costs time only.
"""

from __future__ import annotations

import os
import queue
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.prompt.canonical import advance
from runtime.prompt.healing import Known, Lineage, Spoken, Talk, Turn
from runtime.types import Chunk
from runtime.worker.template import Template
from store.disk import PRIVATE_DIRECTORY, PRIVATE_FILE
from store.keyed_names import Asker, Whom, conversation_key, keyed_hash, model_key
from store.turns import EVERYBODYS, SUFFIX, UNNAMED, Folders, folder_name

MAX_MEMORY_BYTES = 64 << 20
MAX_DISK_BYTES = 256 << 20
MAX_FILES = 50_000
MAX_FORGOTTEN = 1024
_CHECK_BYTES = 16
_TEMPORARY = ".tmp-"
_CONTEXT_TOKENS = 8
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Turn).decode


@dataclass(slots=True)
class _Folder:
    """What one conversation has on disk."""

    num_bytes: int = 0
    paths: dict[bytes, Path] = field(default_factory=dict[bytes, Path])


class _Kept(NamedTuple):
    """A turn in memory, of which conversation it is, and whether it may be on disk."""

    turn: Turn
    talk: Talk
    is_durable: bool


class TurnStore:
    """In memory, and once there is a disk there. `run` belongs to a thread of its own."""

    def __init__(
        self,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        max_disk_bytes: int = MAX_DISK_BYTES,
    ) -> None:
        self._root: Path | None = None
        self._secret = b""
        self._max_memory_bytes = max_memory_bytes
        self._max_disk_bytes = max_disk_bytes
        self._lock = threading.Lock()
        self._memory: OrderedDict[tuple[bytes, Asker], _Kept] = OrderedDict()
        self._tellers: dict[bytes, list[Asker]] = {}
        """Who said each of these turns: two names may have said the same."""
        self._memory_bytes = 0
        self._num_forgotten = 0
        self._forgotten: OrderedDict[Folders, int] = OrderedDict()
        self._all_forgotten = 0
        self._folders: OrderedDict[str, _Folder] = OrderedDict()
        self._places: dict[bytes, list[Path]] = {}
        self._jobs: queue.SimpleQueue[_Kept | None] = queue.SimpleQueue()

    def attach(self, root: Path, secret: bytes) -> None:
        """From now on turns are kept at `root` as well, those that came before among them.

        Names there are keyed with the store's `secret`.
        """
        with self._lock:
            if (root, secret) == (self._root, self._secret):
                return
            self._root, self._secret = root, secret
            if self._num_forgotten:  # under other names
                self._note_forgotten(EVERYBODYS)
            self._folders.clear()
            self._places.clear()
            self._learn(root)
            kept = [one for one in self._memory.values() if one.is_durable]
        for one in kept:
            self._jobs.put(one)

    def find(self, links: Sequence[bytes]) -> tuple[int, Known] | None:
        """The last of a conversation's digests that ends in a turn of ours, and all its tokens."""
        for number in range(len(links) - 1, -1, -1):
            if (turns := self._way_to(links[number])) is None:
                continue
            token_ids = array("I")
            for turn in turns:
                token_ids.frombytes(turn.token_ids)
            last = turns[-1]
            return number, Known(
                key=last.key,
                token_ids=token_ids.tolist(),
                ends=tuple(end for turn in turns for end in turn.ends),
                prefix_end=turns[0].prefix_end,
                thoughts={turn.key: turn.thoughts for turn in turns},
            )
        return None

    def put(self, turn: Turn, talk: Talk, *, is_durable: bool, age: int = 0) -> None:
        """Take a turn in, unless its conversation was forgotten since it began."""
        with self._lock:
            if age < self._forgotten_at(self._folder(talk)):
                return
            kept = _Kept(turn, talk, is_durable)
            self._remember(kept)
        if is_durable and self._root is not None:
            self._jobs.put(kept)

    def forget(self, whom: Whom, secret: bytes) -> None:
        """Forget a conversation's turns, or all, in memory and on disk. From any thread.

        `secret` is the store's, also before it was attached.
        """
        with self._lock:
            whose = _folders_of(whom, secret)
            self._note_forgotten(whose if secret == self._secret else EVERYBODYS)
            for key, one in list(self._memory.items()):
                if whom.means(one.talk.asker, secret):
                    self._drop_from_memory(key)
            paths: list[Path] = []
            for name in [name for name in self._folders if name in whose]:
                paths += self._forget_folder(name)
        for path in paths:
            _remove(path)

    @property
    def age(self) -> int:
        """How often anything was forgotten."""
        return self._num_forgotten

    def run(self) -> None:
        """Write what comes until closed."""
        while (job := self._jobs.get()) is not None:
            self._write(job)

    def close(self) -> None:
        """Let `run` end when everything is written."""
        self._jobs.put(None)

    def _note_forgotten(self, whose: Folders) -> None:
        """When a conversation was; those of long ago are taken for forgotten all together."""
        self._num_forgotten += 1
        if whose == EVERYBODYS:
            self._forgotten.clear()
            self._all_forgotten = self._num_forgotten
            return
        self._forgotten[whose] = self._num_forgotten
        self._forgotten.move_to_end(whose)
        if len(self._forgotten) > MAX_FORGOTTEN:
            _, self._all_forgotten = self._forgotten.popitem(last=False)

    def _forgotten_at(self, folder: str) -> int:
        times = (at for whose, at in self._forgotten.items() if folder in whose)
        return max(times, default=self._all_forgotten)

    def _forget_folder(self, name: str) -> list[Path]:
        """Its files, which are known no more."""
        folder = self._folders.pop(name)
        for key, path in folder.paths.items():
            self._lose(key, path)
        return list(folder.paths.values())

    def _lose(self, name: bytes, path: Path) -> None:
        """A turn is not in this file any more."""
        places = self._places.get(name, [])
        if path in places:
            places.remove(path)
        if not places:
            self._places.pop(name, None)

    # Reading

    def _way_to(self, key: bytes) -> list[Turn] | None:
        """A turn and all before it, the first one first; None when one of them is missing."""
        turns: list[Turn] = []
        expected: int | None = None
        while True:
            turn = self._get(key)
            if turn is None or turn.key != key:
                return None
            num_tokens = len(turn.token_ids) // 4
            if not num_tokens or expected not in (None, turn.start + num_tokens):
                return None
            turns.append(turn)
            if not turn.start:
                return turns[::-1]
            key, expected = turn.parent, turn.start

    def _get(self, key: bytes) -> Turn | None:
        with self._lock:
            tellers, name = self._tellers.get(key), self._name(key)
            if tellers:
                return self._memory[key, tellers[0]].turn
            paths = list(self._places.get(name, ()))
        for path in paths:
            try:
                data = path.read_bytes()
                check, payload = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
                if check == _digest(payload):
                    return _decode(payload)
            except (OSError, msgspec.DecodeError):
                pass
            with self._lock:
                self._lose(name, path)
        return None

    def _name(self, key: bytes) -> bytes:
        """What stands for a turn's key in the names of files."""
        return keyed_hash(self._secret, "turn", key)

    def _folder(self, talk: Talk) -> str:
        """The same for a conversation; one with a session's id as the store's rows have it."""
        asker = talk.asker
        if asker.session_id is not None:
            conversation = conversation_key(self._secret, asker.session_id).hex()
        else:
            conversation = UNNAMED + keyed_hash(self._secret, "unnamed", talk.beginning).hex()
        name = model_key(self._secret, asker.model) if asker.model else ""
        return folder_name(conversation, name)

    def _remember(self, kept: _Kept) -> None:
        key = kept.turn.key, kept.talk.asker
        self._drop_from_memory(key)
        self._memory[key] = kept
        self._tellers.setdefault(key[0], []).append(key[1])
        self._memory_bytes += len(kept.turn.token_ids)
        while self._memory_bytes > self._max_memory_bytes and len(self._memory) > 1:
            self._drop_from_memory(next(iter(self._memory)))

    def _drop_from_memory(self, key: tuple[bytes, Asker]) -> None:
        if (old := self._memory.pop(key, None)) is not None:
            self._memory_bytes -= len(old.turn.token_ids)
            tellers = self._tellers[key[0]]
            tellers.remove(key[1])
            if not tellers:
                del self._tellers[key[0]]

    # Writing

    def _write(self, kept: _Kept) -> None:
        turn, key = kept.turn, (kept.turn.key, kept.talk.asker)
        with self._lock:
            root, name, folder = self._root, self._name(turn.key), self._folder(kept.talk)
            if root is None or self._memory.get(key) is not kept:
                return  # it was forgotten meanwhile
        payload = _encode(turn)
        path = root / folder / f"{name.hex()}{SUFFIX}"
        temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
        try:
            for directory in (root.parent, root, path.parent):
                directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, PRIVATE_FILE), "wb") as file:
                file.write(_digest(payload) + payload)
            temporary.rename(path)
        except OSError:
            # It stays in memory; what ails the disk the slots' own writer reports.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        with self._lock:
            if self._memory.get(key) is not kept:
                path.unlink(missing_ok=True)  # it was forgotten while it was written
                return
            if self._name(turn.key) != name:
                return  # another store came meanwhile, and it is to be written there
            self._drop_from_memory(key)
            self._note(folder, name, path, len(payload) + _CHECK_BYTES)
            gone = self._excess()
        for one in gone:
            _remove(one)

    def _note(self, folder: str, key: bytes, path: Path, num_bytes: int) -> None:
        held = self._folders.setdefault(folder, _Folder())
        self._folders.move_to_end(folder)
        if key not in held.paths:
            held.num_bytes += num_bytes
        held.paths[key] = path
        places = self._places.setdefault(key, [])
        if path not in places:
            places.append(path)

    def _excess(self) -> list[Path]:
        """The files of the conversations that were idle longest, until the caps hold."""
        gone: list[Path] = []
        num_bytes = sum(folder.num_bytes for folder in self._folders.values())
        while len(self._folders) > 1 and (
            num_bytes > self._max_disk_bytes or len(self._places) > MAX_FILES
        ):
            name, folder = next(iter(self._folders.items()))
            num_bytes -= folder.num_bytes
            gone += self._forget_folder(name)
        return gone

    def _learn(self, root: Path) -> None:
        """What is on disk from before, the folders that were used last at the end."""
        if not root.is_dir():
            return
        with suppress(OSError):
            folders = [one for one in root.iterdir() if one.is_dir()]
            folders.sort(key=lambda folder: folder.stat().st_mtime)
            for folder in folders:
                for path in folder.iterdir():
                    if path.name.startswith(_TEMPORARY):
                        path.unlink(missing_ok=True)
                    elif (key := _key_of(path.name)) is not None:
                        self._note(folder.name, key, path, path.stat().st_size)


@dataclass(slots=True)
class Answer:
    """An answer that is being given: once the model has ended it, it becomes a turn."""

    turns: TurnStore
    lineage: Lineage
    template: Template
    prompt_ids: Sequence[int]
    is_durable: bool
    spoken: Spoken = field(default_factory=Spoken)
    age: int = 0

    def __post_init__(self) -> None:
        self.age = self.turns.age

    def add(self, chunk: Chunk) -> None:
        """Something was said to the client."""
        self.spoken.add(chunk)

    def end(self, output_ids: Sequence[int], stop: str | None = None) -> None:
        """All of it was said, with these tokens, but for the stop string that ended it.

        What says nothing, or no more than it began with, is no turn: it would be its own parent.
        """
        if self.spoken.is_empty:
            return
        self.spoken.texts.insert(0, self.lineage.begun)
        if stop is not None:
            kept = self._before(stop, output_ids)
            if kept is None:
                return
            output_ids = kept
        lineage = self.lineage
        token_ids = array("I", self.prompt_ids[lineage.start :])
        token_ids.extend(output_ids)
        end = len(self.prompt_ids) + len(output_ids)
        turn = Turn(
            key=advance(lineage.key, self.spoken.form()),
            parent=lineage.parent,
            start=lineage.start,
            token_ids=token_ids.tobytes(),
            ends=(*lineage.ends, end),
            prefix_end=lineage.prefix_end,
            thoughts=self.spoken.thought(),
        )
        self.turns.put(turn, lineage.talk, is_durable=self.is_durable, age=self.age)

    def _before(self, stop: str, output_ids: Sequence[int]) -> list[int] | None:
        """The tokens up to where the stop string began; None where that is in doubt."""
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
            return kept if is_sure else None
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


def _key_of(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX))
    except ValueError:
        return None


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_CHECK_BYTES).digest()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
