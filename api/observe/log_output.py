"""Where the log goes, and how its lines look; nothing is imported that takes long."""

from __future__ import annotations

import io
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, TextIO, cast

import structlog
from typing_extensions import override

from api.observe.redact import redact

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]

LOG_FILE_BYTES = 20_000_000
NUM_OLD = 5


class RotatingFile(io.TextIOBase):
    """A log file that makes room for itself: at most `NUM_OLD` older ones are kept beside it."""

    def __init__(self, path: Path, max_bytes: int = LOG_FILE_BYTES) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8"
        )
        self._handler.namer = self._closed_to_others
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        path.chmod(0o600)

    @override
    def write(self, text: str, /) -> int:
        if line := text.rstrip("\n"):
            self._handler.emit(logging.makeLogRecord({"msg": line}))
        return len(text)

    @staticmethod
    def _closed_to_others(name: str) -> str:
        os.umask(os.umask(0) | 0o077)
        return name


def configure_logging(level: Level, log_format: Format, file: Path | None = None) -> None:
    """Send everything to stderr, or to a file that rotates, in one form: our lines and libraries'.

    Raises:
        OSError: the file cannot be written.
    """
    out: TextIO = cast("TextIO", RotatingFile(file)) if file is not None else sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    if log_format == "json":
        finish: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()]
    else:
        finish = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, *finish],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
