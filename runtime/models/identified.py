"""A model's hash, with what was read for it remembered in the index: weights are read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from runtime.models import identity
from runtime.models.identity import ModelFiles, NotIdentified
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store.records import Records
from store.types import FileStamp, ModelRow

_log = structlog.stdlib.get_logger("hearth.store")


class Identity:
    """The hash of a model whose files were looked at. Calls block.

    They raise StoreError when the store fails.
    """

    def __init__(
        self,
        records: Records,
        clock: Callable[[], float],
        spec: ModelSpec,
        form: KvForm,
        files: ModelFiles,
    ) -> None:
        self._spec = spec
        self._form = form
        self._files = files
        self._records = records
        self._clock = clock
        self._memo = _Memo(records, clock)

    def known(self) -> bytes | None:
        """The model hash, where every file is remembered as it is; None: they must be read."""
        found = identity.known_digests(self._files, self._memo)
        digests = [digest for digest in found if digest is not None]
        return self._hash(digests) if len(digests) == len(found) else None

    def read(self, should_stop: Callable[[], bool] = lambda: False) -> bytes:
        """The model hash, of every byte.

        Raises:
            OSError: something cannot be read.
            NotIdentified: a file has changed since it was looked at.
            Stopped: `should_stop` said so.
        """
        digests = identity.read_digests(self._files, self._memo, should_stop=should_stop)
        return self._hash(digests)

    def _hash(self, digests: list[bytes]) -> bytes:
        spec = self._spec
        package = "mlx-vlm" if spec.is_vision else "mlx-lm"
        return identity.model_hash(self._files, digests, form=self._form, package=package)


def look(spec: ModelSpec) -> ModelFiles | None:
    """A model's files, once what was written to them just now can be told from more; it blocks.

    None where they cannot be known for certain, as the log says.
    """
    try:
        found = identity.look(Path(spec.path))
        if (wait_s := found.settles_in_s(time.time())) > 0:
            time.sleep(wait_s)
            found = identity.look(Path(spec.path))
        if found.settles_in_s(time.time()) > 0:
            raise NotIdentified(f"{spec.path} is being written to")
    except (OSError, NotIdentified) as error:
        say_unknown(spec, error)
        return None
    return found


def say_unknown(spec: ModelSpec, why: Exception) -> None:
    """Its KV stays in memory, for a reason."""
    _log.warning("model_not_identified", model=spec.engine, why=str(why))


def introduce(records: Records, clock: Callable[[], float], spec: ModelSpec, model: bytes) -> None:
    """Remember a model by its hash. Raises StoreError."""
    now_s = clock()
    row = ModelRow(hash=model, label=spec.engine, weights_bytes=spec.nbytes, last_used_s=now_s)
    records.put_model(row).result()


def identify(
    records: Records, clock: Callable[[], float], spec: ModelSpec, form: KvForm
) -> bytes | None:
    """The model hash of a model as it is now; None when it cannot be known, as the log says.

    Reads every byte that is not remembered. Raises StoreError when the store fails.
    """
    files = look(spec)
    if files is None:
        return None
    try:
        model = Identity(records, clock, spec, form, files).read()
    except (OSError, NotIdentified) as error:
        say_unknown(spec, error)
        return None
    introduce(records, clock, spec, model)
    return model


class _Memo:
    """Digests of weights files, in the index."""

    def __init__(self, records: Records, clock: Callable[[], float]) -> None:
        self._records = records
        self._clock = clock

    def get(self, stamp: FileStamp) -> bytes | None:
        digest = self._records.digest(stamp)
        if digest is not None:
            self.put(stamp, digest)  # what is used is not forgotten
        return digest

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        self._records.put_digest(stamp, digest, self._clock())

    def has_other(self, stamp: FileStamp) -> bool:
        return self._records.has_other_digest(stamp)
