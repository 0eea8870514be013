"""Slots whose every byte can be computed again without the store.

The value at (layer, position) is a keyed hash of what was said up to that position, so KV of
another token, of another layer or from elsewhere never looks right.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout, Slots

MODEL = b"m" * 16
ROW_BYTES = 32
KEY = b"the bytes of no other test"


def slot_id(number: int) -> str:
    """The name of its block, in hex."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).hexdigest()


def key_of(number: int) -> BlockKey:
    return BlockKey(MODEL, bytes.fromhex(slot_id(number)))


def token_ids(number: int, num_tokens: int) -> list[int]:
    seed = hashlib.shake_128(KEY + number.to_bytes(8, "little")).digest(4 * num_tokens)
    return array("I", seed).tolist()


def row(layer: int, position: int, token_id: int) -> bytes:
    """The bytes that `layer` has for this token at this position."""
    said = f"{layer}/{position}/{token_id}".encode()
    return hashlib.blake2b(said, key=KEY, digest_size=ROW_BYTES).digest()


def sample(
    number: int, *, num_tokens: int = 6, num_layers: int = 2
) -> tuple[SlotAbout, list[int], list[Tensor]]:
    """What slot `number` says of itself, its tokens and its tensors: layers in BF16, one of another
    shape, and an empty one.
    """
    ids = token_ids(number, num_tokens)
    about = SlotAbout(*key_of(number), layout='{"layers":["sliced","state"]}', recompute_ms=12.5)
    tensors = [
        Tensor(f"{layer}.keys", "BF16", (num_tokens, 2, 8), layer_bytes(layer, ids))
        for layer in range(num_layers)
    ]
    state = hashlib.shake_128(KEY + bytes([number % 256])).digest(4 * 3 * 5)
    tensors.append(Tensor("state", "F32", (3, 5), state))
    tensors.append(Tensor("nothing", "F32", (1, 0, 4), b""))
    return about, ids, tensors


def layer_bytes(layer: int, ids: list[int]) -> bytes:
    return b"".join(row(layer, position, one) for position, one in enumerate(ids))


def publish_sample(root: Path, number: int, **sizes: int) -> Path:
    """Have slot `number` in the store at `root`, durably; its file."""
    slots = Slots(root / "slots")
    slots.put(*sample(number, **sizes))
    slots.sync([MODEL])
    return slots.path(key_of(number))


def expected_payload(number: int) -> bytes:
    """The payload of the sample's file, from nothing but its number."""
    _, ids, tensors = sample(number)
    return array("I", ids).tobytes() + b"".join(bytes(one.data) for one in tensors)


def served(root: Path, number: int) -> bool | None:
    """Whether what the store serves is what was computed for slot `number`; None for a miss."""
    about, ids, tensors = sample(number)
    slot = Slots(root / "slots").read(key_of(number), ids)
    if slot is None:
        return None
    return (slot.about, [(*one[:3], bytes(one.data)) for one in slot.tensors]) == (about, tensors)
