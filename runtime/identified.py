"""A model's hash, with what was read for it remembered in the index: weights are read once."""

from __future__ import annotations

from pathlib import Path

import structlog

from runtime import identity
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store.clock import Clock
from store.records import Records
from store.types import FileStamp, ModelRow

_log = structlog.stdlib.get_logger("hearth.store")


def identify(records: Records, clock: Clock, spec: ModelSpec, form: KvForm) -> bytes | None:
    """The model hash of a model that is about to be loaded; None when it cannot be read.

    Raises StoreError when the store fails.
    """
    package = "mlx-vlm" if spec.is_vision else "mlx-lm"
    try:
        model = identity.model_hash(
            Path(spec.path), form=form, package=package, memo=_Memo(records, clock)
        )
    except OSError as error:
        _log.warning("model_not_identified", model=spec.id, why=str(error))
        return None
    row = ModelRow(hash=model, label=spec.id, weights_bytes=spec.nbytes, last_used_s=clock().wall_s)
    records.put_model(row).result()
    return model


class _Memo:
    """Digests of weights files, in the index."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock

    def get(self, stamp: FileStamp) -> bytes | None:
        return self._records.digest(stamp)

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        self._records.put_digest(stamp, digest, self._clock().wall_s)
