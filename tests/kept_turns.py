"""Turns of a worker whose heads are published at once, and asked for as the server answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from runtime.kv_messages import TurnsFound, TurnsWanted
from runtime.prompt.healing import TurnScope
from runtime.worker.input.turns import MAX_MEMORY_BYTES, AskedHeads, TurnStore
from store.block_names import HashChain
from store.errors import SlotMissing
from store.head_file import Head, KnownHead, owner_of, read_head, write_head
from store.heads import Heads, Published
from store.slots import Slots
from store.turns import Said, packed, unpacked

MODEL = b"m" * 32
SECRET = b"secret"
CHAIN = HashChain(SECRET, MODEL, block_size=16)


def turns_below(root: Path) -> set[bytes]:
    """The ids of all turns that the heads of a store on disk have."""
    found: set[bytes] = set()
    for path in (root / "heads").glob("*/*/*.safetensors"):
        with suppress(SlotMissing):  # another one takes its place
            _, token_ids, said = read_head(path)
            found |= {turn.id for turn in unpacked(said, token_ids).turns}
    return found


class KeptHeads:
    """Heads below `root`, as a server has them."""

    def __init__(self, root: Path) -> None:
        (root / "heads").mkdir(0o700, parents=True)
        slots = Slots(root / "slots")
        self.heads = Heads(root / "heads", slots, lambda _: CHAIN, time.monotonic)
        self.asked: list[TurnsWanted] = []

    def turns(self, max_memory_bytes: int = MAX_MEMORY_BYTES) -> TurnStore:
        """Those of a worker that starts now."""

        def answer(wanted: TurnsWanted) -> None:
            self.asked.append(wanted)
            found = self.heads.with_turns(MODEL, wanted.owner, wanted.digests, 4)
            asked.hear(TurnsFound(number=wanted.number, paths=tuple(map(str, found))))

        asked = AskedHeads(answer)
        turns = TurnStore(heads=asked, max_memory_bytes=max_memory_bytes)
        turns.attach(SECRET, CHAIN.root_of)
        return turns

    def keep(self, scope: TurnScope, token_ids: Sequence[int], said: Said) -> KnownHead:
        """A turn ended, or a prompt was read."""
        owner = owner_of(SECRET, scope.asker, CHAIN.root_of(scope.tenant))
        head = Head(uuid4().hex, MODEL, owner, len(token_ids), name=scope.asker.model)
        staged = self.heads.staging_path()
        write_head(staged, head, token_ids, (), packed(said, token_ids))
        published = self.heads.publish(staged, self.heads.number)
        assert isinstance(published, Published)
        return published.known

    @property
    def files(self) -> list[Path]:
        """Those of all heads."""
        return [one.path for one in self.heads.known.values() if one.path is not None]
