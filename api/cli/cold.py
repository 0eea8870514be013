"""`hearth cold show|take`: whose the cold store is, and how it becomes this home's."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.views import log_errors_only, show
from runtime.cache.opened import cold_at
from runtime.config.settings import Settings
from runtime.errors import HearthError
from store.cold_owner import Claim
from store.errors import StoreError
from store.ownership import secret_of


class ColdView(msgspec.Struct):
    """What `hearth cold --json` prints. `trouble` says why it cannot be used."""

    where: str
    is_ours: bool
    trouble: str | None = None


def cold(settings: Settings, arguments: argparse.Namespace) -> int:
    """Say whether the cold store is this home's, or take it over, whoever had it.

    Raises:
        HearthError: there is none, or it cannot be marked.
    """
    log_errors_only()
    where, root = settings.cold_store, settings.kv_root
    if where is None:
        raise HearthError("No cold_store is set.")
    secret = secret_of(root)
    if arguments.action == "take" and not secret:
        raise HearthError(f"{root} has no store yet: start the server once first.")
    claim = Claim(root, secret, where)
    try:
        store = cold_at(where)
        if arguments.action == "take":
            claim.take(store)
        view = ColdView(str(where), claim.look(store).is_ours)
    except StoreError as error:
        if arguments.action == "take":
            raise HearthError(f"{where} cannot be taken: {error}") from error
        view = ColdView(str(where), is_ours=False, trouble=str(error))
    text = view.trouble or f"{where} is {'this home' if view.is_ours else 'nobody'}'s"
    show(view, text, as_json=arguments.as_json)
    return int(view.trouble is not None)
