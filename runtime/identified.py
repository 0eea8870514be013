"""A model's hash, with what was read for it remembered in the index: weights are read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from runtime import identity
from runtime.identity import Look, NotIdentified
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store.records import Records
from store.types import FileStamp, ModelRow

_log = structlog.stdlib.get_logger("hearth.store")


class Identity:
    """What is known of one model, from before a worker begins to read its files.

    Calls block, and raise StoreError when the store fails.
    """

    def __init__(
        self, records: Records, clock: Callable[[], float], spec: ModelSpec, form: KvForm
    ) -> None:
        """Look at the files, once what was written to them just now can be told from more.

        Raises OSError, NotIdentified.
        """
        self.files: Look = _settled(Path(spec.path))
        self.spec = spec
        self._form = form
        self._records = records
        self._clock = clock
        self._memo = _Memo(records, clock)

    def known(self) -> bytes | None:
        """The model hash, where every file is remembered as it is; None: they must be read."""
        digests = [one for one in identity.known_digests(self.files, self._memo) if one is not None]
        return self._hash(digests) if len(digests) == len(self.files.weights) else None

    def read(self, should_stop: Callable[[], bool] = lambda: False) -> bytes:
        """The model hash, of every byte.

        Raises:
            OSError: something cannot be read.
            NotIdentified: a file has changed since it was looked at.
            Stopped: `should_stop` said so.
        """
        return self._hash(identity.read_digests(self.files, self._memo, should_stop=should_stop))

    def _hash(self, digests: list[bytes]) -> bytes:
        spec = self.spec
        package = "mlx-vlm" if spec.is_vision else "mlx-lm"
        model = identity.model_hash(self.files, digests, form=self._form, package=package)
        now_s, label, nbytes = self._clock(), spec.engine, spec.nbytes
        row = ModelRow(hash=model, label=label, weights_bytes=nbytes, last_used_s=now_s)
        self._records.put_model(row).result()
        return model


def _settled(model: Path) -> Look:
    found = identity.look(model)
    wait_s = found.settles_in_s(time.time())
    if wait_s > 0:
        time.sleep(wait_s)
        found = identity.look(model)
        if found.settles_in_s(time.time()) > 0:
            raise NotIdentified(f"{model} is being written to")
    return found


def identify(
    records: Records, clock: Callable[[], float], spec: ModelSpec, form: KvForm
) -> bytes | None:
    """The model hash of a model as it is now; None when it cannot be known, as the log says.

    Reads every byte that is not remembered. Raises StoreError when the store fails.
    """
    try:
        return Identity(records, clock, spec, form).read()
    except (OSError, NotIdentified) as error:
        _log.warning("model_not_identified", model=spec.id, why=str(error))
        return None


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
