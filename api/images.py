"""Pictures in messages, whatever protocol they came in."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from runtime.errors import InvalidRequest
from runtime.types import Image, Message, ModelSpec


def image_of(url: str, at: int, field: str) -> Image:
    """The picture at a `data:`, `http:` or `https:` address; `at` is its place in the text.

    Raises:
        InvalidRequest: the address is of another kind, or its data is damaged.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("http", "https"):
        return Image(at=at, field=field, url=url)
    if scheme != "data":
        raise InvalidRequest(
            f"{field} is an image at {url[:32]!r}: send a data: URL or an http(s) address.", field
        )
    kind, _, data = rest.partition(",")
    if not kind.endswith(";base64"):
        raise InvalidRequest(f"{field} must hold its image in base64.", field)
    try:
        return Image(at=at, field=field, data=base64.b64decode(data, validate=True))
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid base64: {error}.", field) from error


def refuse_unseen(messages: Iterable[Message], spec: ModelSpec) -> None:
    """Refuse pictures for a model that reads text only.

    Raises:
        InvalidRequest: there is a picture; `param` names the first one.
    """
    for message in messages:
        for image in message.images:
            raise InvalidRequest(
                f"{image.field} is an image, and {spec.id} reads text only: leave it out.",
                image.field,
            )
