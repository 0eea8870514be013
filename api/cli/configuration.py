"""`hearth config show|check` and `hearth db check|upgrade`."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.views import aligned, show
from runtime.catalog import Catalog
from runtime.errors import HearthError, SettingsError, UnknownModel
from runtime.settings import Settings
from runtime.store_opening import open_store
from store.errors import StoreError, StoreLocked
from store.tables import SCHEMA_VERSION

_SECRET = frozenset({"api_keys", "admin_key"})


class CheckView(msgspec.Struct):
    """What `hearth config check --json` prints of settings that can be used."""

    num_models: int


class DatabaseView(msgspec.Struct):
    """What `hearth db --json` prints."""

    root: str
    schema_version: int
    is_intact: bool


def config(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the settings that are in force, or whether a server would take them."""
    if arguments.action == "check":
        found = CheckView(num_models=check(settings))
        text = f"the settings can be used; {found.num_models} models can be named"
        return show(found, text, as_json=arguments.as_json)
    plain: dict[str, object] = msgspec.to_builtins(settings, builtin_types=(), enc_hook=str)
    shown = {key: "…" if key in _SECRET and value else value for key, value in plain.items()}
    rows = [(key, msgspec.json.encode(value).decode()) for key, value in shown.items()]
    return show(shown, aligned([("KEY", "VALUE"), *rows]), as_json=arguments.as_json)


def check(settings: Settings) -> int:
    """What `build_house` would find, without building anything: how many models can be named.

    Raises:
        SettingsError: a server would not start with them.
    """
    from api.guard import rules_of  # noqa: PLC0415 - it brings the web framework
    from runtime.keys import digest_of  # noqa: PLC0415

    rules_of(settings, digest_of(""))
    catalog = Catalog(settings)
    wanted = [*(settings.preload or ()), *filter(None, [settings.default_model])]
    for name in wanted:
        try:
            catalog.resolve(name)
        except UnknownModel as error:
            raise SettingsError(error.message) from error
    return len(catalog.models())


def database(settings: Settings, arguments: argparse.Namespace) -> int:
    """Open the store's database, which brings it up to date, and look whether it is whole.

    Raises:
        HearthError: a server has it open, it is of a newer version, or it cannot be repaired.
    """
    root = settings.kv_root
    if not root.is_dir():
        raise HearthError(f"There is no store at {root}; it is made when the server first runs.")
    try:
        store = open_store(root, settings.cold_store)
    except StoreLocked as error:
        message = "A server has the store open; it brought it up to date when it started."
        raise HearthError(message) from error
    except StoreError as error:
        raise HearthError(f"The store at {root} cannot be opened: {error}") from error
    try:
        found = DatabaseView(str(root), SCHEMA_VERSION, store.database.check())
    finally:
        store.close()
    state = "whole" if found.is_intact else "DAMAGED: it is made anew from the slots at next start"
    text = f"{found.root}: schema {found.schema_version}, {state}"
    show(found, text, as_json=arguments.as_json)
    return 0 if found.is_intact else 1
