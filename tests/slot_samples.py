"""Slots whose every byte can be computed again without the store.

The value at (layer, position) is a keyed hash of what was said up to that position, so KV of
another token, of another layer or from elsewhere never looks right.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import msgspec

from store import slots
from store.errors import StoreError
from store.types import SlotHeader, TensorData

ROW_BYTES = 32
KEY = b"the bytes of no other test"


def slot_id(number: int) -> str:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).hexdigest()


def token_ids(number: int, num_tokens: int) -> list[int]:
    seed = hashlib.shake_128(KEY + number.to_bytes(8, "little")).digest(4 * num_tokens)
    return array("I", seed).tolist()


def row(layer: int, position: int, token_id: int) -> bytes:
    """The bytes that `layer` has for this token at this position."""
    said = f"{layer}/{position}/{token_id}".encode()
    return hashlib.blake2b(said, key=KEY, digest_size=ROW_BYTES).digest()


def sample(
    number: int, *, num_tokens: int = 6, num_layers: int = 2
) -> tuple[SlotHeader, list[int], list[TensorData]]:
    """Header, token ids and tensors of slot `number`: BF16 layers, a state and an empty tensor."""
    ids = token_ids(number, num_tokens)
    header = SlotHeader(
        id=slot_id(number),
        model=b"m" * 32,
        start_hash=b"",
        start=0,
        end=num_tokens,
        block_size=4,
        block_hashes=tuple(bytes([number % 256, n % 256] * 8) for n in range(num_tokens // 4)),
        end_hash=bytes([number % 256] * 16),
        layout='{"layers":["sliced","state"]}',
        has_state=True,
        recompute_ms=12.5,
        created_s=1_700_000_000.25,
    )
    tensors = [
        TensorData(f"{layer}.keys", "BF16", (num_tokens, 2, 8), memoryview(layer_bytes(layer, ids)))
        for layer in range(num_layers)
    ]
    state = memoryview(hashlib.shake_128(KEY + bytes([number % 256])).digest(4 * 3 * 5))
    tensors.append(TensorData("state", "F32", (3, 5), state))
    tensors.append(TensorData("nothing", "F32", (1, 0, 4), memoryview(b"")))
    return header, ids, tensors


def layer_bytes(layer: int, ids: list[int]) -> bytes:
    return b"".join(row(layer, position, one) for position, one in enumerate(ids))


def stage_sample(root: Path, number: int, **sizes: int) -> slots.StagedSlot:
    return slots.stage(root, *sample(number, **sizes))


def publish_sample(root: Path, number: int, **sizes: int) -> Path:
    return slots.publish(stage_sample(root, number, **sizes))


def expected_payload(number: int, **sizes: int) -> bytes:
    """The payload of the sample's file, from nothing but its number."""
    _, ids, tensors = sample(number, **sizes)
    return array("I", ids).tobytes() + b"".join(bytes(one.data) for one in tensors)


def is_served(path: Path) -> bool:
    """Whether the store would serve this file; anything but yes or a miss is a failure."""
    try:
        slots.verify(path)
    except StoreError:
        return False
    return True


def holds(path: Path, number: int, **sizes: int) -> bool:
    """Whether a served file holds exactly what was computed for slot `number`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = slots.read_header(path)
    is_right = msgspec.json.encode(header) == msgspec.json.encode(sample(number, **sizes)[0])
    return is_right and data[8 + length :] == expected_payload(number, **sizes)
