"""What is found out before anything is built: whose the home is, and which models there are.

Nothing is imported here that takes long: the ready line waits for this, and for nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from api.observe.log_output import configure_logging
from runtime.config.home import Home
from runtime.config.settings import Settings, check_places
from runtime.errors import SettingsError, UnknownModel
from runtime.machine_limits import limits_here, too_low
from runtime.models.arrivals import Arrivals
from runtime.models.catalog import Catalog

_log = structlog.get_logger("hearth.machine")


class Preflight(NamedTuple):
    """The home is this process's own until it ends."""

    home: Home
    catalog: Catalog


def preflight(settings: Settings) -> Preflight:
    """Own the home, begin to log, and look for models.

    Raises:
        HomeTaken: another server owns the home.
        SettingsError: the settings name a model or a `models_dir` that does not exist.
    """
    check_places(settings)
    home = Home.take(settings.home)  # before anything is written, the log included
    try:
        configure_logging(settings.log_level, settings.log_format, settings.log_file)
    except OSError as error:
        why = f"log_file {settings.log_file} cannot be written: {error.strerror}."
        raise SettingsError(why) from error
    for one in too_low(limits_here()):
        _log.warning("a limit of this account is too low", what=one.fact, remedy=one.remedy)
    catalog = Catalog(settings, Arrivals() if settings.allow_download else None)
    named = [("preload", name) for name in settings.preload or ()]
    if settings.default_model is not None:
        named.append(("default_model", settings.default_model))
    for key, name in named:
        try:
            catalog.resolve(name)
        except UnknownModel as error:
            if catalog.may_come(name):
                continue
            raise SettingsError(f"{key} cannot be used: {error.message}") from error
    return Preflight(home, catalog)
