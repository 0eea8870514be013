"""A prompt-cache file of stock mlx-lm becomes slots of the store, by whoever has the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from uuid import uuid4

from runtime.cache.contents import Exchanged, ImportRequest
from runtime.cache.inventory import Inventory
from runtime.cache.mlx_lm_exchange import done
from runtime.config.settings import Settings
from runtime.errors import InterchangeFailed
from runtime.mlx_lm_exchange import NOT_STOCK, Import
from runtime.progress import Watch
from runtime.ranks import KvForm
from runtime.types import ModelSpec
from store import upkeep


def take_in(
    inventory: Inventory, settings: Settings, spec: ModelSpec, wanted: ImportRequest, watch: Watch
) -> Exchanged:
    """Have the file as slots. Room for all of it is reserved before the first byte is written.

    Raises:
        InterchangeFailed: it cannot be read, does not belong to the model, or has no room.
        StoreError: the store fails.
    """
    form = checked(settings, spec, wanted)
    store, key = inventory.store, f"import-{uuid4().hex}"
    job = import_job(settings, spec, wanted, inventory.identify(spec, form), form)
    job = job.of_store(store.secret, str(store.root))
    try:
        with done(job, settings.cpu_blas, watch, partial(store.disk.reserve, key)) as outcome:
            published = store.publish(outcome.slots)
    finally:
        upkeep.sweep_temp(store.root)
        store.disk.release(key)
    if published.error is not None:
        raise published.error
    if published.refused:
        raise InterchangeFailed(f"The store refused {len(published.refused)} of its slots.")
    return Exchanged(wanted.file, spec.id, outcome.num_tokens, len(published.saved))


def checked(settings: Settings, spec: ModelSpec, wanted: ImportRequest) -> KvForm:
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


def import_job(
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
