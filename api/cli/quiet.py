"""Commands that work on the store themselves, and what they would log meanwhile."""

from __future__ import annotations

import logging
import sys

import structlog


def log_errors_only() -> None:
    """Have what works on the store log to stderr, and errors only: stdout is for the answer."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
