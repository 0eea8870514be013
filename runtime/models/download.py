"""Models from the Hugging Face hub into its cache: the only place that downloads anything.

`python -m runtime.models.download REPO` does it for a server: it prints what
`runtime.models.arrivals` reads, and ends when its standard input does, as then nobody waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from runtime.config.settings import repo_of_url
from runtime.errors import HearthError
from runtime.models.arrivals import Arrived, Missed, Word
from runtime.progress import Progress, Watch, unwatched

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_COPIES = ["original/*", "consolidated*"]
"""The same weights once more, in the form of their makers' own programs."""
_PROGRESS_EVERY_S = 0.5


class DownloadFailed(HearthError):
    """The model could not be fetched."""

    code = "download_failed"


def pull(repo: str, watch: Watch = unwatched) -> Path:
    """Fetch weights, configuration and tokenizer of a repository; the directory they are in.

    What is already there is not fetched again. Code is never fetched. Blocks until it is done.

    Raises:
        DownloadFailed: no such repository, or no way to reach the hub.
    """
    # Both cost 0.3 s, which only a download should pay.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415  # pyright: ignore[reportUnknownVariableType]

    try:
        bars = _bars(watch)
        return Path(
            snapshot_download(
                repo, allow_patterns=_PATTERNS, ignore_patterns=_COPIES, tqdm_class=bars
            )
        )
    except errors.HFValidationError as error:
        named = repo_of_url(repo) or "ORGANISATION/NAME"
        raise DownloadFailed(f"{repo!r} is no repository name: {named} is.") from error
    except errors.GatedRepoError as error:
        raise DownloadFailed(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, log in on this "
            "machine (hf auth login, or HF_TOKEN for the server), and try again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadFailed(
            f"{repo} cannot be fetched: there is no such repository, or it is private. Check its "
            "name; for a private one log in on this machine (hf auth login, or HF_TOKEN)."
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise DownloadFailed(
            f"{repo} cannot be fetched: the hub cannot be reached ({_first_line(error)}). "
            "Try again with a network and without HF_HUB_OFFLINE, or copy the model's directory "
            'to this machine and name it: [models.NAME] path = "/the/directory".'
        ) from error
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise DownloadFailed(f"{repo} cannot be fetched: {_first_line(error)}") from error


def _bars(watch: Watch) -> type[tqdm]:
    """What the hub's client draws with: it draws nothing, and tells of bytes."""
    from huggingface_hub.utils import tqdm  # noqa: PLC0415

    class Told(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._is_of_bytes = options.get("unit") == "B"
            options["disable"] = True
            super().__init__(*arguments, **options)  # pyright: ignore[reportUnknownMemberType]

        @override
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._is_of_bytes:
                total = int(self.total or 0)
                watch(Progress(step="download", num_done=min(int(self.n), total), num_total=total))
            return None

    return Told


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class _Printer:
    """Prints how far it is now and then, and the last word in any case."""

    def __init__(self) -> None:
        self._printed_s = 0.0

    def watch(self, progress: Progress) -> None:
        """Print it, unless something was printed just now."""
        if time.monotonic() - self._printed_s >= _PROGRESS_EVERY_S:
            self.say(progress)

    def say(self, word: Word) -> None:
        """Print it."""
        self._printed_s = time.monotonic()
        sys.stdout.write(msgspec.json.encode(word).decode() + "\n")
        sys.stdout.flush()


def _end_with_the_server() -> None:
    sys.stdin.read()
    os._exit(1)


def main(repo: str) -> None:
    """Download for a server."""
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    printer = _Printer()
    try:
        pull(repo, printer.watch)
    except DownloadFailed as error:
        printer.say(Missed(error.message))
    else:
        printer.say(Arrived())


if __name__ == "__main__":
    main(sys.argv[1])
