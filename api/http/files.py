"""Files that come with a request: those that are text are read as text."""

from __future__ import annotations

import base64
import binascii
import mimetypes

from api.http.refusal import refuse

_TEXTS = ("json", "xml", "yaml", "javascript", "typescript", "toml", "x-sh", "sql", "csv")
"""What media types of text are called beside `text/…`; also as the end of a longer name."""


def file_text(data: str | None, filename: str | None, path: str, field: str) -> str:
    """The name and the text of a file: `data` is a `data:` URL, or base64 whose type the name says.

    Raises:
        InvalidRequest: it is not sent along, not text, or damaged.
    """
    if not data:
        refuse(path, f"has no {field}: send the file itself, as base64 or a data: URL, or as text.")
    head, is_url, body = data.partition(",") if data.startswith("data:") else ("", "", data)
    kind = head.removeprefix("data:").partition(";")[0] if is_url else ""
    kind = kind or mimetypes.guess_type(filename or "")[0] or "unknown"
    if not _is_text(kind):
        refuse(
            path,
            f"is a file of type {kind[:64]!r}, which is not supported: send its text, with a media "
            "type such as text/plain or as a part of text.",
        )
    try:
        text = base64.b64decode(body, validate=True).decode()
    except (binascii.Error, ValueError):
        refuse(f"{path}.{field}", "is damaged: send the file as base64 of text in UTF-8.")
    return f"{filename}\n{text}" if filename else text


def _is_text(kind: str) -> bool:
    main, _, sub = kind.lower().partition("/")
    return main == "text" or (main == "application" and sub.endswith(_TEXTS))
