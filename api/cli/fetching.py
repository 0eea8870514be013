"""`hearth pull`: download a model into the Hugging Face cache."""

from __future__ import annotations

import argparse

import msgspec

from api.cli.progress import watching
from api.cli.views import show
from runtime import downloads
from runtime.settings import Settings


class Pulled(msgspec.Struct):
    """What `--json` prints: the directory that the model is in now."""

    repo: str
    path: str


def pull(_: Settings, arguments: argparse.Namespace) -> int:
    """Fetch what is not there yet. Raises DownloadFailed."""
    with watching(f"pull {arguments.repo}") as watch:
        path = downloads.pull(arguments.repo, watch)
    found = Pulled(arguments.repo, str(path))
    return show(found, found.path, as_json=arguments.as_json)
