"""Litestar without the plugins that it adds for libraries which no handler of ours speaks."""

from __future__ import annotations

from litestar import Litestar
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from typing_extensions import override


class Application(Litestar):
    """Pydantic, which comes with the Hugging Face hub, would take a tenth of the start."""

    @staticmethod
    @override
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]
