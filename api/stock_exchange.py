"""`hearth cache export` and `import`: prompt-cache files of stock mlx-lm. mlx runs elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from api.cache_desk import CacheDesk
from api.cli.connection import Misused
from runtime.catalog import Catalog
from runtime.errors import InterchangeFailed, UnknownModel
from runtime.identity import NoMemo, NotIdentified, look, model_hash, read_digests
from runtime.progress import Watch
from runtime.settings import Settings
from runtime.stock_jobs import NOT_STOCK, Export, Import
from runtime.stock_process import done
from store.ownership import SECRET


class Exchanged(msgspec.Struct, frozen=True):
    """What went to a file or came from it; slots that were here already are not new."""

    file: str
    model: str
    num_tokens: int
    num_new_slots: int = 0


def export(
    desk: CacheDesk, settings: Settings, arguments: argparse.Namespace, watch: Watch
) -> Exchanged:
    """Write a conversation to a file. Raises HearthError."""
    if (arguments.conversation is None) == (arguments.slot is None):
        raise Misused("Say what to export: a conversation, or --slot ID.")
    chain = desk.chain(arguments.conversation or arguments.slot)
    try:
        model_path = Catalog(settings).resolve(chain.model).path
    except UnknownModel:
        model_path = chain.model
    file = _absolute(arguments.file)
    job = Export(str(file), chain.paths, chain.leaves, chain.model, model_path)
    with done(job, settings.cpu_blas, watch) as outcome:
        return Exchanged(str(file), chain.model, outcome.num_tokens)


def import_(
    desk: CacheDesk, settings: Settings, arguments: argparse.Namespace, watch: Watch
) -> Exchanged:
    """Read a file into the store. Raises HearthError."""
    spec = Catalog(settings).resolve(arguments.of_model)
    if spec.is_vision:
        raise InterchangeFailed(f"Nothing can be imported: {NOT_STOCK.format(model=spec.id)}.")
    form = settings.kv_form_of(spec.id)
    if form.num_ranks > 1:
        raise InterchangeFailed(f"{spec.id} is split over ranks: its KV cannot be exchanged.")
    root = settings.kv_root
    try:
        files = look(Path(spec.path))
        job = Import(
            file=str(_absolute(arguments.file)),
            spec=spec,
            model_hash=model_hash(files, read_digests(files, NoMemo()), form=form),
            secret=(root / SECRET).read_bytes(),
            root=str(root),
            block_size=settings.block_size,
            kv_bits=form.kv_bits,
            prompt=_prompt(arguments.prompt_file),
            token_ids=_token_ids(arguments.tokens),
        )
    except OSError as error:
        raise InterchangeFailed(f"{error.filename} cannot be read: {error.strerror}.") from error
    except NotIdentified as error:
        raise InterchangeFailed(f"{spec.id} cannot be known by its weights: {error}.") from error
    with done(job, settings.cpu_blas, watch) as outcome:
        published = desk.publish(outcome.slots)
        if published.num_refused:
            raise InterchangeFailed(f"The store refused {published.num_refused} of its slots.")
        return Exchanged(job.file, spec.id, outcome.num_tokens, published.num_saved)


def _absolute(file: Path) -> Path:
    """The conversion runs in the same directory; save_prompt_cache wants this suffix."""
    path = file if file.suffix == ".safetensors" else Path(f"{file}.safetensors")
    return path.absolute()


def _prompt(file: Path | None) -> str | None:
    return file.read_text("utf-8") if file is not None else None


def _token_ids(file: Path | None) -> tuple[int, ...] | None:
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[int, ...])
    except msgspec.MsgspecError as error:
        raise InterchangeFailed(f"{file} is no JSON list of token ids: {error}.") from error
