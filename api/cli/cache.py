"""`hearth cache`: look at what was kept, pin, delete, verify it, exchange it with stock mlx-lm.

mlx runs in a process of its own, which an export or import starts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from api.cli.cache_target import CacheService, opened_cache
from api.cli.errors import Misused
from api.cli.progress import watching
from api.cli.views import ago, aligned, count, fact, log_errors_only, show, size, span
from runtime.cache.conversations import Exchanged, ImportRequest
from runtime.cache.mlx_lm_exchange import done
from runtime.cache.views import ConversationView, ShownView, StatsView
from runtime.config.settings import Settings
from runtime.errors import HearthError, InterchangeFailed, UnknownModel
from runtime.mlx_lm_exchange import Export
from runtime.models.catalog import Catalog
from runtime.progress import Watch

_SHOWN_ID = 12


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Do what the command line says; the exit code. Raises HearthError."""
    log_errors_only()
    if arguments.action == "rm":
        _check_removal(settings, arguments)
    with opened_cache(settings) as desk:
        answer = _act(desk, settings, arguments)
    return show(answer, text(answer), as_json=arguments.as_json)


def _act(desk: CacheService, settings: Settings, arguments: argparse.Namespace) -> object:
    match arguments.action:
        case "ls":
            return desk.conversations(arguments.of_model)
        case "show":
            return desk.show(arguments.conversation)
        case "pin":
            return desk.pin(arguments.conversation, arguments.of_model)
        case "unpin":
            return desk.unpin(arguments.conversation)
        case "rm":
            return _remove(desk, arguments)
        case "stats":
            return desk.stats()
        case "export":
            with watching("export") as watch:
                return _export(desk, settings, arguments, watch)
        case "import":
            with watching("import") as watch:
                return _import(desk, arguments, watch)
        case "gc":
            with watching("gc") as watch:
                return desk.collect_garbage(watch)
        case _:
            with watching("verify") as watch:
                return desk.verify(watch)


def _check_removal(settings: Settings, arguments: argparse.Namespace) -> None:
    """Everything is deleted only when somebody says so twice.

    Raises:
        Misused: it is not clear what is to be deleted, or nobody can be asked.
        HearthError: whoever was asked said no.
    """
    given = (arguments.conversation, arguments.of_model, arguments.everything or None)
    if sum(one is not None for one in given) != 1:
        raise Misused("Say what to delete: a conversation, --model NAME, or --all.")
    if not arguments.everything or arguments.is_sure:
        return
    if not sys.stdin.isatty():
        raise Misused("--all deletes every conversation, and nobody can be asked here: add --yes.")
    sys.stderr.write(f"Delete what is kept of every conversation in {settings.kv_root}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise HearthError("Nothing was deleted.")


def _remove(desk: CacheService, arguments: argparse.Namespace) -> object:
    if arguments.conversation is not None:
        return desk.remove_conversation(arguments.conversation)
    if arguments.of_model is not None:
        return desk.remove_model(arguments.of_model)
    return desk.remove_all()


def text(answer: object) -> str:
    """An answer as people read it."""
    if isinstance(answer, list):
        return _table(cast("list[ConversationView]", answer))
    if isinstance(answer, StatsView):
        return _stats(answer)
    if isinstance(answer, ShownView):
        return _shown(answer)
    return "\n".join(fact(name, value) for name, value in msgspec.to_builtins(answer).items())


def _table(views: Sequence[ConversationView]) -> str:
    head = ("ID", "MODEL", "TOKENS", "TURNS", "OWN", "SHARED", "TIER", "USED", "PINNED", "DURABLE")
    now_s = time.time()
    rows = [
        (
            view.id[:_SHOWN_ID],
            view.model or view.model_hash[:_SHOWN_ID],
            count(view.num_tokens),
            count(view.num_turns) if view.is_named else "-",
            size(view.own_bytes),
            size(view.disk_bytes - view.own_bytes),
            view.tier,
            ago(now_s - view.last_used_s),
            "yes" if view.is_pinned else "no",
            "yes" if view.is_durable else count(view.num_durable),
        )
        for view in views
    ]
    return aligned([head, *rows])


def _shown(shown: ShownView) -> str:
    view, head = shown.conversation, ("SLOT", "TIER", "FROM", "TO")
    leaves = "never" if shown.is_kept or shown.ttl_s is None else f"{span(shown.ttl_s)} after use"
    facts = [
        f"id: {view.id}",
        f"model: {view.model or view.model_hash[:_SHOWN_ID]}",
        f"tokens: {count(view.num_tokens)}, {view.tier}",
        f"on disk: {size(view.own_bytes)} own, {size(view.disk_bytes - view.own_bytes)} shared",
        f"used: {ago(time.time() - view.last_used_s)}; leaves the disk: {leaves}",
        f"pinned: {'yes' if shown.is_kept else 'no'}",
        f"durable: {'yes' if view.is_durable else f'{count(view.num_durable)} tokens of it'}",
    ]
    rows = [(one.id[:_SHOWN_ID], one.tier, str(one.start), str(one.leave)) for one in shown.slots]
    return "\n".join([*facts, "", aligned([head, *rows])] if rows else facts)


def _stats(stats: StatsView) -> str:
    head = ("MODEL", "TIER", "SLOTS", "TOKENS", "SIZE")
    rows = [
        (
            tier.model or tier.model_hash[:_SHOWN_ID],
            tier.tier,
            count(tier.num_slots),
            count(tier.num_tokens),
            size(tier.disk_bytes),
        )
        for tier in stats.tiers
    ]
    facts = [
        f"store: {stats.root}",
        f"conversations: {count(stats.num_conversations)}",
        f"free on disk: {size(stats.free_bytes)}",
        *(fact(name, value) for name, value in stats.counters.items()),
    ]
    return "\n".join([aligned([head, *rows]), "", *facts])


def _export(
    desk: CacheService, settings: Settings, arguments: argparse.Namespace, watch: Watch
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


def _import(desk: CacheService, arguments: argparse.Namespace, watch: Watch) -> Exchanged:
    """Have whoever owns the store read a file into it. Raises HearthError."""
    try:
        wanted = ImportRequest(
            file=str(_absolute(arguments.file)),
            model=arguments.of_model,
            prompt=_prompt(arguments.prompt_file),
            token_ids=_token_ids(arguments.tokens),
        )
    except OSError as error:
        raise InterchangeFailed(f"{error.filename} cannot be read: {error.strerror}.") from error
    return desk.import_(wanted, watch)


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
