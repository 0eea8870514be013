"""The cold store: slots that rest, packed, in a directory or in a bucket.

Demoting makes the packed slot durable; only then does the caller change the row and remove the
warm file. Promoting gives a staged warm file, byte for byte what was demoted, or a miss.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url

from store.cold_codec import ByteSource, ChunkSource
from store.disk import (
    CHUNK_BYTES,
    PRIVATE_DIRECTORY,
    SequentialReader,
    disk_bytes,
    make_directory,
    new_file,
    opened,
    reported,
    sync_directories,
)
from store.errors import ColdAway, SlotDamaged, SlotMissing, StoreFailed, StoreFull
from store.temp_names import SUFFIX, is_slot_id, temp_name
from store.upkeep import sweep_fan_out

T = TypeVar("T")

COLD_SUFFIX = f"{SUFFIX}.zst"
OWNER = "hearth-owner"
MARK = "hearth-owner.json"
_MAX_MARK_BYTES = 1 << 16
_PROBE = ".probe"
_UNFINISHED_MARK = f".tmp-{OWNER}-"

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import RetryConfig

_SILENCE_S = 5.0
"""So long an object store may take for its answer to begin."""

_RETRIES: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
"""A request may be waiting for a slot: sooner or later it is better computed again."""


class ColdSlot(NamedTuple):
    """A slot in the cold store; `num_bytes` is what it takes there."""

    id: str
    num_bytes: int


class ColdStore(Protocol):
    """Where slots rest. All calls block; `yield_` may wait between chunks, or raise to give up.

    Every call raises StoreFailed where the system does, and ColdAway, which is one, where the
    network does or whoever is behind it.
    """

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        """Keep these bytes under that id, whole and durably, or nothing. Raises StoreFull."""
        ...

    def get(self, slot_id: str) -> AbstractContextManager[ByteSource]:
        """The bytes under that id. Raises SlotMissing."""
        ...

    def delete(self, slot_id: str) -> bool:
        """Remove the slot; False where there was none."""
        ...

    def slots(self) -> Iterator[ColdSlot]:
        """Whatever bears the name of a slot there."""
        ...

    def sweep(self) -> int:
        """Remove what dead processes left unfinished; how many files."""
        ...

    def probe(self) -> None:
        """Do a little of everything, and leave nothing. Raises ColdAway."""
        ...

    @property
    def mark_lasts_s(self) -> float:
        """For how long what `mark` said may be believed."""
        ...

    def mark(self) -> bytes | None:
        """What the mark of its owner says; None where it has none. Raises ColdAway."""
        ...

    def make_mark(self, content: bytes, *, replaces: bool = False) -> bool:
        """Make the mark, whole and durable; False where there is one and `replaces` is not set.

        Of several at the same time one makes it. Raises ColdAway.
        """
        ...


def open_cold(url: str) -> ColdStore:
    """The bucket at `url` (s3://bucket/prefix).

    Raises:
        StoreFailed: the url is not understood.
    """
    try:
        return ColdBucket(from_url(url, retry_config=_RETRIES))
    except (BaseError, ValueError) as error:
        raise StoreFailed("the address of the cold store is not understood") from error


class ColdDirectory:
    """A `ColdStore` on a disk, made durable like slots. Sizes are those of real disk blocks.

    Its own directory is made with the mark, and never one above it: that may be a missing disk's.
    """

    mark_lasts_s = 0.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, slot_id: str) -> Path:
        if not is_slot_id(slot_id):
            raise ValueError(f"not a slot id: {slot_id[:64]!r}")
        return self._directory / slot_id[:2] / f"{slot_id}{COLD_SUFFIX}"

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        cold_path = self._path(slot_id)
        temporary = cold_path.with_name(temp_name(slot_id, COLD_SUFFIX))
        make_directory(cold_path.parent)
        with new_file(temporary, 0) as file:
            for chunk in chunks:
                file.write(chunk)
        with reported(cold_path):
            temporary.replace(cold_path)
        sync_directories([cold_path.parent])
        return ColdSlot(slot_id, disk_bytes(cold_path))

    @contextmanager
    def get(self, slot_id: str) -> Generator[ByteSource]:
        with opened(self._path(slot_id)) as fd:
            num_bytes = os.fstat(fd).st_size
            yield ChunkSource(SequentialReader(fd, 0, num_bytes).take(num_bytes))

    def delete(self, slot_id: str) -> bool:
        path = self._path(slot_id)
        with reported(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def sweep(self) -> int:
        for path in self._directory.glob(f"{_UNFINISHED_MARK}*"):
            shutil.rmtree(path, ignore_errors=True)
        return sweep_fan_out(self._directory)

    def probe(self) -> None:
        path = self._directory / temp_name("0" * 32)
        with _local(self._directory):
            try:
                with new_file(path, 0) as file:
                    file.write(b"probe")
                with reported(path):
                    path.replace(self._directory / _PROBE)
                    (self._directory / _PROBE).unlink()
            except StoreFull:
                pass  # demoting finds that out, and what is there can be had

    def mark(self) -> bytes | None:
        path = self._directory / OWNER / MARK
        with _local(self._directory), reported(path):
            try:
                with opened(path) as fd:
                    return os.read(fd, _MAX_MARK_BYTES)
            except SlotMissing:
                return None
            except SlotDamaged:  # it is no file, and so nothing that can be read
                return b""

    def make_mark(self, content: bytes, *, replaces: bool = False) -> bool:
        """A directory with the mark in it gets its name: only one can, and never half of it."""
        folder = self._directory / OWNER
        with _local(self._directory):
            with reported(self._directory):
                self._directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
                unfinished = Path(mkdtemp(prefix=_UNFINISHED_MARK, dir=self._directory))
            with new_file(unfinished / MARK, 0) as file:
                file.write(content)
            sync_directories([unfinished])
            with reported(folder):
                try:
                    unfinished.rename(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    if replaces:
                        (unfinished / MARK).replace(folder / MARK)
                    shutil.rmtree(unfinished, ignore_errors=True)
                    if not replaces:
                        return False
            sync_directories([folder, self._directory, self._directory.parent])
        return True

    def slots(self) -> Iterator[ColdSlot]:
        with reported(self._directory):
            paths = sorted(self._directory.glob(f"[0-9a-f][0-9a-f]/*{COLD_SUFFIX}"))
        for path in paths:
            slot_id = path.name.removesuffix(COLD_SUFFIX)
            if is_slot_id(slot_id) and path.parent.name == slot_id[:2]:
                yield ColdSlot(slot_id, disk_bytes(path))


class ColdBucket:
    """A `ColdStore` in an object store. Uploads appear whole or not at all.

    Parts of an upload that a kill broke off are for the bucket's own rule to remove.
    """

    mark_lasts_s = 10.0
    is_used: ClassVar[bool] = False
    """In this process, which has threads of the object store's own from then on."""

    def __init__(self, bucket: ObjectStore) -> None:
        self._bucket = bucket
        ColdBucket.is_used = True

    def _name(self, slot_id: str) -> str:
        if not is_slot_id(slot_id):
            raise ValueError(f"not a slot id: {slot_id[:64]!r}")
        return f"{slot_id[:2]}/{slot_id}{COLD_SUFFIX}"

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        with self._asking(slot_id):
            obstore.put(self._bucket, self._name(slot_id), iter(chunks))
        return ColdSlot(slot_id, self._num_bytes(slot_id))

    def _num_bytes(self, slot_id: str) -> int:
        with self._asking(slot_id):
            return _heard(lambda: obstore.head_async(self._bucket, self._name(slot_id)))["size"]

    @contextmanager
    def get(self, slot_id: str) -> Generator[ByteSource]:
        with self._asking(slot_id):
            found = _heard(lambda: obstore.get_async(self._bucket, self._name(slot_id)))
            # Awaiting each chunk takes ten times longer than reading it.
            chunks = map(memoryview, found.stream(CHUNK_BYTES))
            yield ChunkSource(chunks)

    def delete(self, slot_id: str) -> bool:
        try:
            self._num_bytes(slot_id)
        except SlotMissing:
            return False
        with self._asking(slot_id):
            _heard(lambda: obstore.delete_async(self._bucket, self._name(slot_id)))
        return True

    def slots(self) -> Iterator[ColdSlot]:
        found = [one for several in self._listed() for one in several]
        for one in sorted(found, key=lambda one: one["path"]):
            slot_id = one["path"].rpartition("/")[2].removesuffix(COLD_SUFFIX)
            if is_slot_id(slot_id) and one["path"] == self._name(slot_id):
                yield ColdSlot(slot_id, one["size"])

    def sweep(self) -> int:
        return 0

    def probe(self) -> None:
        for _ in self._listed("probe"):
            break

    def mark(self) -> bytes | None:
        try:
            with self._asking(MARK):
                found = _heard(lambda: obstore.get_async(self._bucket, MARK))
                is_short = found.meta["size"] <= _MAX_MARK_BYTES
                return bytes(found.bytes()) if is_short else b""
        except SlotMissing:
            return None

    def make_mark(self, content: bytes, *, replaces: bool = False) -> bool:
        mode = "overwrite" if replaces else "create"
        try:
            with _reported(MARK):
                obstore.put(self._bucket, MARK, content, mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        return True

    def _listed(self, prefix: str | None = None) -> Iterator[Sequence[ObjectMeta]]:
        with _reported("listing"), suppress(StopAsyncIteration):
            listed = obstore.list(self._bucket, prefix)  # pyright: ignore[reportUnknownMemberType]
            yield _heard(cast("AsyncIterator[Sequence[ObjectMeta]]", listed).__anext__)
            yield from cast("Iterable[Sequence[ObjectMeta]]", listed)

    @contextmanager
    def _asking(self, slot_id: str) -> Generator[None]:
        """What is not found may be a slot, or the whole bucket: a listing tells."""
        try:
            with _reported(slot_id):
                yield
        except FileNotFoundError as error:
            for _ in self._listed(slot_id[:2]):
                break
            raise SlotMissing(f"{slot_id} is not in the bucket") from error


@contextmanager
def _local(directory: Path) -> Generator[None]:
    """What the system refuses of a cold directory is that it is away."""
    try:
        yield
    except ColdAway:
        raise
    except (StoreFailed, StoreFull) as error:
        raise ColdAway(f"{directory} fails: {error}") from error


def _heard(call: Callable[[], Awaitable[T]]) -> T:
    """What an object store answers. Raises TimeoutError where it lets us in and says nothing."""

    async def answered() -> T:
        async with asyncio.timeout(_SILENCE_S):
            return await call()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(answered())


@contextmanager
def _reported(what: str) -> Generator[None]:
    """Turn what an object store raises into our errors, without what it says of credentials.

    Raises FileNotFoundError as it is: it has more than one meaning. FileExistsError says that what
    was to be made is there.
    """
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(what) from error
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        said = re.search(r"<Code>(\w+)</Code>|HTTP error: ([\w ]+)", str(error))
        why = (said[1] or said[2]) if said else type(error).__name__
        raise ColdAway(f"the bucket fails at {what}: {why}") from error
