"""Slot files: stage, publish, read, verify, remove.

The order that keeps promises P1 and P2: reserve, write a temporary file, sync its data, rename,
sync the directory, and only then a row in the index. Every first read verifies all checksums.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from store.disk import (
    CHUNK_BYTES,
    NewFile,
    ReaderInPlace,
    Reserve,
    SequentialReader,
    Yield,
    keep_going,
    make_directory,
    new_file,
    no_cap,
    opened,
    reported,
    sync_directories,
)
from store.errors import SlotDamaged, SlotForeign, StoreError, StoreFailed
from store.slot_file import (
    TOKENS,
    Checker,
    Damage,
    SlotContents,
    TensorEntry,
    front_bytes,
    header_problem,
    is_slot_id,
    pack_front,
    place,
    tensor_problem,
    unpack_front,
)
from store.temp_names import SUFFIX, slot_id_of, temp_name
from store.types import SlotHeader, TensorData

SLOTS = "slots"

_FRONT_GUESS_BYTES = 16 << 10


Into = Callable[[TensorEntry], memoryview]
"""Where the bytes of a tensor are to be: as many as it has."""


class StagedSlot(NamedTuple):
    """A whole and synced slot file that has no name of its own yet. Sizes are in bytes."""

    id: str
    path: Path
    num_bytes: int
    took_s: float = 0.0


class CheckedSlot(NamedTuple):
    """A slot of which every byte was read, and what of it is not as it was written."""

    header: SlotHeader
    token_ids: array[int]
    num_bytes: int
    damage: Damage


def slot_path(root: Path, slot_id: str) -> Path:
    """Where the slot lives when published. Raises ValueError unless the id is 32 hex characters."""
    if not is_slot_id(slot_id):
        raise ValueError(f"not a slot id: {slot_id[:64]!r}")
    return root / SLOTS / slot_id[:2] / f"{slot_id}{SUFFIX}"


def stage(
    root: Path,
    header: SlotHeader,
    token_ids: Sequence[int],
    tensors: Sequence[TensorData],
    yield_: Yield = keep_going,
    reserve: Reserve = no_cap,
) -> StagedSlot:
    """Write a slot beside its later place and sync it; `publish` makes it visible.

    `reserve` is asked before the file is made. `yield_` is called with the bytes written since its
    last call, about every MiB. Whatever they raise leaves nothing behind.

    Raises:
        ValueError: header, token ids and tensors contradict each other.
        StoreFull: no room; noticed before the first byte where the filesystem can reserve.
        StoreFailed: the system refused, or the data may not have reached the disk.
    """
    start_s = time.perf_counter()
    pieces, entries = _laid_out(header, token_ids, tensors)
    path = slot_path(root, header.id).with_name(temp_name(header.id))
    make_directory(path.parent)
    num_front_bytes = len(pack_front(header, entries))
    num_bytes = num_front_bytes + entries[-1].end
    reserve(num_bytes)
    with new_file(path, num_bytes) as file:
        file.leave_room(num_front_bytes)
        checker = Checker(header)
        _write_payload(file, entries, pieces, checker, yield_)
        file.write_at(pack_front(header, entries, checker.checksums()), 0)
    return StagedSlot(header.id, path, num_bytes, time.perf_counter() - start_s)


def file_bytes(header: SlotHeader, token_ids: Sequence[int], tensors: Sequence[TensorData]) -> int:
    """How large the file is that `stage` makes of these. Raises ValueError."""
    _, entries = _laid_out(header, token_ids, tensors)
    return len(pack_front(header, entries)) + entries[-1].end


def _laid_out(
    header: SlotHeader, token_ids: Sequence[int], tensors: Sequence[TensorData]
) -> tuple[list[TensorData], list[TensorEntry]]:
    """What the file holds, and where."""
    tokens = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    pieces = [TensorData(TOKENS, "U32", (len(tokens),), memoryview(tokens)), *tensors]
    return pieces, _checked_entries(header, pieces)


def _checked_entries(header: SlotHeader, pieces: Sequence[TensorData]) -> list[TensorEntry]:
    for name, dtype, shape, data in pieces:
        if problem := tensor_problem(name, dtype, shape):
            raise ValueError(problem)
        if not data.c_contiguous:
            raise ValueError(f"tensor {name} is not contiguous")
    entries = place((name, dtype, shape) for name, dtype, shape, _ in pieces)
    if len({entry.name for entry in entries}) != len(entries):
        raise ValueError("two tensors have one name")
    for entry, piece in zip(entries, pieces, strict=True):
        if entry.num_bytes != piece.data.nbytes:
            raise ValueError(f"{piece.data.nbytes} bytes for tensor {entry.name} {entry.shape}")
    if problem := header_problem(header, entries):
        raise ValueError(problem)
    return entries


def _write_payload(
    file: NewFile,
    entries: Sequence[TensorEntry],
    pieces: Sequence[TensorData],
    checker: Checker,
    yield_: Yield,
) -> None:
    """Write and hash chunk by chunk."""
    unreported = 0
    for entry, piece in zip(entries, pieces, strict=True):
        hash_ = checker.tensor(entry)
        data = piece.data.cast("B") if entry.num_bytes else memoryview(b"")
        for start in range(0, entry.num_bytes, CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            hash_(chunk)
            file.write(chunk)
            unreported += len(chunk)
            if unreported >= CHUNK_BYTES:
                yield_(unreported)
                unreported = 0
    if unreported:
        yield_(unreported)


def publish(staged: StagedSlot) -> Path:
    """Give a staged slot its name, durably. Returns its path. Raises as `publish_all`."""
    return publish_all([staged])[0]


def publish_or_remove(staged: StagedSlot) -> None:
    """The same, and nothing is left of what fails: the next attempt wants its name again."""
    try:
        publish_all([staged])
    except StoreError:
        with suppress(StoreError):
            remove(staged.path)
        raise


def publish_all(group: Iterable[StagedSlot]) -> list[Path]:
    """Give staged slots their names, then sync each directory once. Returns their paths in order.

    Raises:
        SlotMissing: a staged file is gone.
        SlotDamaged: a staged file is not as long as it was.
        StoreFailed: a name is taken already, or the system refused. Those renamed before are left
            for the orphan sweep; none of the group may be acknowledged.
    """
    paths = [_rename(staged) for staged in group]
    sync_directories(path.parent for path in paths)
    return paths


def _rename(staged: StagedSlot) -> Path:
    if slot_id_of(staged.path.name) != staged.id:
        raise SlotDamaged(f"{staged.path.name} does not hold slot {staged.id}")
    path = staged.path.with_name(f"{staged.id}{SUFFIX}")
    with opened(staged.path) as fd:
        if os.fstat(fd).st_size != staged.num_bytes:
            raise SlotDamaged(f"{staged.path.name} is not {staged.num_bytes} bytes long")
    # Only the store's owner publishes, so nobody can take the name after this look.
    if os.path.lexists(path):
        raise StoreFailed(f"{path.name} exists already")
    with reported(path):
        staged.path.rename(path)
    return path


def read_header(path: Path) -> SlotHeader:
    """The header of a slot file, checked; the payload is not read.

    Raises:
        SlotMissing, SlotDamaged, StoreFailed: as `verify`.
    """
    with opened(path) as fd:
        return _named(path, read_contents(fd)).header


def read_token_ids(path: Path) -> array[int]:
    """The token ids of a slot file, checked; no other tensor is read. Raises as `verify`."""
    return read_front(path)[1]


def read_front(path: Path, *, is_strict: bool = True) -> tuple[SlotContents, array[int]]:
    """Header, tensor table and token ids of a slot file, checked, for whoever checks the rest.

    The token ids are checked only where `is_strict`.

    Raises:
        SlotMissing, SlotDamaged, StoreFailed: as `verify`.
    """
    with opened(path) as fd:
        contents = _named(path, read_contents(fd))
        checker = Checker(contents.header)
        token_ids = _read_token_ids(fd, contents, checker)
        if is_strict and checker.checksums().tokens != contents.checksums.tokens:
            raise SlotDamaged("the checksum of the token ids differs")
        return contents, token_ids


def check(path: Path, yield_: Yield = keep_going, into: Into | None = None) -> CheckedSlot:
    """Read the whole file once, in order, and compare every checksum.

    Afterwards the file is in the page cache; `mx.load(path)` gives the bytes that were checked.
    `yield_` is called with the bytes read after each tensor. With `into` each tensor is read to
    where that says, and what is compared is what is there.

    Raises:
        SlotMissing: there is no file.
        SlotDamaged: its header is not as written, it holds another slot than its name says, or it
            is not a regular file.
        StoreFailed: reading failed.
    """
    with opened(path) as fd:
        contents = _named(path, read_contents(fd))
        checker = Checker(contents.header)
        token_ids = _read_token_ids(fd, contents, checker)
        start = contents.payload_start + contents.tensors[0].end
        placed = ReaderInPlace(fd, start) if into is not None else None
        reader = placed or SequentialReader(fd, start, contents.file_bytes)
        for entry in contents.tensors[1:]:
            if placed is not None and into is not None:
                placed.target = into(entry)
            for num_bytes, hash_ in checker.pieces(entry):
                for piece in reader.take(num_bytes):
                    hash_(piece)
            yield_(entry.num_bytes)
    damage = contents.damage(checker.checksums())
    return CheckedSlot(contents.header, token_ids, contents.file_bytes, damage)


def verify(path: Path, yield_: Yield = keep_going) -> CheckedSlot:
    """The same of a file of which nothing may be damaged. Raises SlotDamaged also where it is."""
    slot = check(path, yield_)
    if slot.damage:
        raise SlotDamaged(str(slot.damage))
    return slot


def is_bad(path: Path) -> bool:
    """It cannot be read, or not as it was written; one that another release wrote is not bad."""
    try:
        verify(path)
    except SlotForeign:
        return False
    except StoreError:
        return True
    return False


def read_contents(fd: int) -> SlotContents:
    """Header and tensor table of the slot file open at `fd`, checked. Raises as `verify`."""
    try:
        file_bytes = os.fstat(fd).st_size
        front = os.pread(fd, _FRONT_GUESS_BYTES, 0)
        wanted = front_bytes(front, file_bytes)
        if wanted > len(front):
            front = os.pread(fd, wanted, 0)
    except OSError as error:
        raise StoreFailed(f"reading failed: {error.strerror}") from error
    if wanted > len(front):
        raise SlotDamaged("the file ends inside its header")
    return unpack_front(front[:wanted], file_bytes)


def _named(path: Path, contents: SlotContents) -> SlotContents:
    """A file under another slot's name is as wrong as a flipped bit."""
    said = slot_id_of(path.name) or path.name.removesuffix(SUFFIX)
    if said != contents.header.id:
        raise SlotDamaged(f"{path.name} holds slot {contents.header.id}")
    return contents


def _read_token_ids(fd: int, contents: SlotContents, checker: Checker) -> array[int]:
    """Those of the slot open at `fd`, as they are, which `checker` is told."""
    entry, start = contents.tensors[0], contents.payload_start
    token_ids = array("I")
    data = bytearray()
    for piece in SequentialReader(fd, start, start + entry.end).take(entry.num_bytes):
        data += piece
    checker.tensor(entry)(bytes(data))
    token_ids.frombytes(data)
    return token_ids


def remove(path: Path) -> bool:
    """Unlink a slot file; False where it was gone already. Raises StoreFailed."""
    try:
        with reported(path):
            path.unlink()
    except StoreFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True
