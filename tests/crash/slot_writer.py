"""A process that writes slots and heads as a worker and a server do together; made to be killed.

    python -m tests.crash.slot_writer ROOT groups|one

Standard output is the acknowledgement.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from store.block_names import HashChain
from store.disk import make_directory
from store.errors import StoreError
from store.head_file import Head, Owner, head_folder, read_end, read_head, write_head
from store.heads import Heads, Whom
from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout, Slots
from store.temp_names import SUFFIX
from tests.slot_samples import MODEL, layer_bytes, publish_sample, slot_id, token_ids

GROUPS = ((1, 2), (3,))
REMOVED = 2
BLOCK = 4
NUM_TOKENS = 10
"""Two blocks, and what comes behind them."""
SECRET = b"s" * 32
CHAIN = HashChain(SECRET, MODEL, block_size=BLOCK)
BEGIN = "the work begins here"


def heads_at(root: Path) -> Heads:
    return Heads(root / "heads", Slots(root / "slots"), lambda _: CHAIN, lambda: 0.0)


def keys_of(number: int) -> list[BlockKey]:
    names = CHAIN.block_hashes(token_ids(number, NUM_TOKENS))
    return [BlockKey(MODEL, name) for name in names]


def tensors(ids: list[int]) -> list[Tensor]:
    return [Tensor("kv", "U8", (len(ids), 32), layer_bytes(0, ids))]


def session_of(number: int) -> bytes:
    return b"%016d" % number


def found(root: Path, number: int) -> bool | None:
    """Whether what is there of this turn is what was written; None where something is a miss."""
    ids, keys = token_ids(number, NUM_TOKENS), keys_of(number)
    path = head_path(root, number)
    try:
        said, end = list(read_head(path).token_ids), read_end(path)
    except StoreError:
        return None
    pairs = [(end, tensors(ids[len(keys) * BLOCK :]))]
    for at, key in enumerate(keys):
        its = ids[at * BLOCK : (at + 1) * BLOCK]
        slot = Slots(root / "slots").read(key, its)
        if slot is None:
            return None
        pairs.append((slot.tensors, tensors(its)))
    return said == ids and all(_plain(one) == _plain(other) for one, other in pairs)


def _plain(tensors: list[Tensor]) -> list[tuple[object, ...]]:
    return [(*one[:3], bytes(one.data)) for one in tensors]


def head_path(root: Path, number: int) -> Path:
    return head_folder(root / "heads", keys_of(number)[-1]) / f"{slot_id(number)}{SUFFIX}"


def acknowledge(text: str) -> None:
    os.write(1, text.encode())


def write(heads: Heads, number: int) -> None:
    """A turn's slots, and then its head."""
    ids, keys = token_ids(number, NUM_TOKENS), keys_of(number)
    for at, key in enumerate(keys):
        its = ids[at * BLOCK : (at + 1) * BLOCK]
        heads.slots.put(SlotAbout(*key), its, tensors(its))
    heads.slots.sync([MODEL])
    owner = Owner(b"a" * 16, session_of(number), b"")
    staged = heads.staging_path()
    head = Head(slot_id(number), MODEL, owner, NUM_TOKENS)
    write_head(staged, head, ids, tensors(ids[len(keys) * BLOCK :]))
    heads.publish(staged, 0)


def write_groups(heads: Heads) -> None:
    for group in GROUPS:
        for number in group:
            write(heads, number)
        acknowledge("".join(f"{number}\n" for number in group))
    heads.delete(Whom(session=session_of(REMOVED)))
    acknowledge(f"-{REMOVED}\n")


def write_one(root: Path) -> None:
    try:
        publish_sample(root, 1)
    except StoreError as error:
        acknowledge(f"{type(error).__name__}\n")
    else:
        acknowledge("published\n")


def main() -> None:
    root, program = Path(sys.argv[1]), sys.argv[2]
    heads = heads_at(root)
    (root.parent / BEGIN).exists()
    for folder in (root, root / "slots", root / "heads"):
        make_directory(folder)
    if program == "groups":
        write_groups(heads)
    else:
        write_one(root)


if __name__ == "__main__":
    main()
