"""`hearth config show|check`."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.views import aligned, show
from runtime.config.settings import Settings, check_places
from runtime.errors import SettingsError, UnknownModel

_SECRET = frozenset({"api_keys", "admin_key"})


class CheckView(msgspec.Struct):
    """What `hearth config check --json` prints of settings that can be used.

    `left_out` says why models and aliases are of no use, `not_prewarmed` why prompts are not.
    `misnamed` are those that the settings name.
    """

    num_models: int
    left_out: dict[str, str]
    not_prewarmed: dict[str, str]
    misnamed: tuple[str, ...] = ()


def config(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the settings that are in force, or whether a server would take them."""
    if arguments.action == "check":
        from api.cli.views import log_errors_only  # noqa: PLC0415 - as below

        log_errors_only()
        found = check(settings)
        is_whole = not found.misnamed and not found.not_prewarmed
        can = "can be used" if is_whole else "start a server, but name what cannot be used"
        text = f"the settings {can}; models that can be named: {found.num_models}"
        told = {"left out": found.left_out, "not prewarmed": found.not_prewarmed}
        lines = [
            f"{how}: {name}: {why}" for how, some in told.items() for name, why in some.items()
        ]
        show(found, "\n".join([text, *lines]), as_json=arguments.as_json)
        return 0 if is_whole else 1
    plain: dict[str, object] = msgspec.to_builtins(settings, builtin_types=(), enc_hook=str)
    shown = {key: "…" if key in _SECRET and value else value for key, value in plain.items()}
    rows = [(key, msgspec.json.encode(value).decode()) for key, value in shown.items()]
    return show(shown, aligned([("KEY", "VALUE"), *rows]), as_json=arguments.as_json)


def check(settings: Settings) -> CheckView:
    """What `build_house` would find, without building anything: models, and prompts for them.

    Raises:
        SettingsError: a server would not start with them.
    """
    from api.http.guard import rules_of  # noqa: PLC0415 - it brings the web framework
    from api.prewarm import PinnedPrompts  # noqa: PLC0415
    from runtime.keys import digest_of  # noqa: PLC0415
    from runtime.models.catalog import Catalog  # noqa: PLC0415 - showing the settings needs neither

    rules_of(settings, digest_of(""))
    check_places(settings)
    catalog = Catalog(settings)
    wanted = [*(settings.preload or ()), *filter(None, [settings.default_model])]
    for name in wanted:
        try:
            catalog.resolve(name)
        except UnknownModel as error:
            if catalog.may_come(name):
                continue
            raise SettingsError(error.message) from error
    prompts = PinnedPrompts(settings, catalog)
    return CheckView(
        num_models=len(catalog.models()),
        left_out=dict(catalog.left_out),
        not_prewarmed=prompts.problems(),
        misnamed=catalog.misnamed,
    )
