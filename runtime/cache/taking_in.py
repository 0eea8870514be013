"""A prompt-cache file of stock mlx-lm becomes slots and a head, by whoever has the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from uuid import uuid4

from runtime.cache.conversations import Exchanged, ImportRequest
from runtime.cache.mlx_lm_exchange import done
from runtime.cache.opened import BlockStore
from runtime.cache.tending import identify
from runtime.config.settings import Settings
from runtime.errors import InterchangeFailed
from runtime.kv_messages import Ended
from runtime.mlx_lm_exchange import NOT_STOCK, Import
from runtime.progress import Watch
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store.errors import StoreError
from store.heads import Published, TurnedAway

_TRIES = 3
"""Others' deletions may remove what was just written, until its head is published."""


def take_in(
    store: BlockStore,
    settings: Settings,
    spec: ModelSpec,
    wanted: ImportRequest,
    watch: Watch,
    received: int = 0,
) -> Exchanged:
    """Have the file as slots and a head. Room for all of it is made before the first byte is
    written. It was asked for when the last deletion had the number `received`.

    Raises:
        InterchangeFailed: it cannot be read, does not belong to the model, or has no room.
        StoreError: the store fails.
    """
    form, key = _checked(settings, spec, wanted), f"import-{uuid4().hex}"
    job = _import_job(settings, spec, wanted, identify(store, spec, form), form)
    job = job.of_store(store.secret, str(store.root))
    num_new = 0
    try:
        for _ in range(_TRIES):
            with done(job, settings.cpu_blas, watch, partial(_reserve, store, key)) as outcome:
                staged = outcome.head
                assert staged is not None
                ended = Ended(
                    head_id=staged.head_id,
                    received=received,
                    path=staged.path,
                    num_bytes=staged.num_bytes,
                )
                try:
                    said = store.publish(key, ended)
                finally:
                    Path(staged.path).unlink(missing_ok=True)
            num_new = max(num_new, staged.num_slots)
            if _is_whole(said):
                store.room.finish(key)
                return Exchanged(wanted.file, spec.id, outcome.num_tokens, num_new)
        raise InterchangeFailed("What was written of it is deleted by others each time.")
    except (InterchangeFailed, StoreError):
        store.room.leave(key, b"", 0.0)
        raise


def _is_whole(said: Published | TurnedAway | None) -> bool:
    """Whether all blocks of the head are there. Raises InterchangeFailed where it is not."""
    if said is None:
        raise InterchangeFailed("The store refused it.")
    if isinstance(said, TurnedAway):
        raise InterchangeFailed("It was deleted while it was taken in.")
    return not said.lacking


def _reserve(store: BlockStore, key: str, num_bytes: int) -> bool:
    """Nothing leaves for what has no room anyway."""
    room = store.room
    return room.could_have(num_bytes) and room.allow(key, num_bytes) >= num_bytes


def _checked(settings: Settings, spec: ModelSpec, wanted: ImportRequest) -> KvForm:
    """The form of this model's KV. Raises InterchangeFailed where the file cannot become that."""
    if spec.is_vision:
        raise InterchangeFailed(
            f"Nothing can be imported: {NOT_STOCK.format(model=spec.id)}.", "model"
        )
    form = settings.kv_form_of(spec.id)
    if form.num_ranks > 1:
        raise InterchangeFailed(
            f"{spec.id} is split over ranks: its KV cannot be exchanged.", "model"
        )
    _check_file(Path(wanted.file))
    return form


def _import_job(
    settings: Settings, spec: ModelSpec, wanted: ImportRequest, model_hash: bytes, form: KvForm
) -> Import:
    """What the process that reads the file is told, but for the store."""
    return Import(
        file=wanted.file,
        spec=spec,
        model_hash=model_hash,
        block_size=settings.block_size,
        kv_bits=form.kv_bits,
        kv_start=form.kv_start,
        prompt=wanted.prompt,
        token_ids=wanted.token_ids,
    )


def _check_file(file: Path) -> None:
    """Refuse what would not be read as mlx-lm writes it, or is waited for without an end."""
    if not file.is_absolute():
        raise InterchangeFailed(f"Give the absolute path of {str(file)!r}.", "file")
    if not file.is_file():
        raise InterchangeFailed(f"{str(file)!r} is no regular file, or cannot be seen.", "file")
    if file.suffix != ".safetensors":
        raise InterchangeFailed(f"The name of {str(file)!r} must end in .safetensors.", "file")
