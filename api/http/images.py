"""Pictures in messages, whatever protocol they came in. Nothing is decoded here but base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from api.http.refusal import refuse
from runtime.config.settings import Settings
from runtime.errors import UnusableImage
from runtime.models.vision_files import BLIND_TYPES
from runtime.prompt.past import with_images
from runtime.types import MAX_IMAGE_BYTES, Image, Message, ModelSpec

MAX_REMOTE = 4
_STEP = 1 << 20
"""Characters that are decoded at once; a multiple of four."""
LOW_DETAIL_SIDE = 512
"""What OpenAI makes of an image whose detail is low."""

_DETAILS = {"auto": None, "high": None, "original": None, "low": LOW_DETAIL_SIDE}
_BEGINNINGS = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/webp": b"RIFF",
    "image/gif": b"GIF8",
    "image/bmp": b"BM",
}
"""Whatever an image is said to be, it is what its bytes are."""
_UNTOLD = frozenset({"", "application/octet-stream"})


def image_of(url: str, at: int, field: str, detail: str | None = None) -> Image:
    """The picture at a `data:` or `https:` address; `at` is its place in the text.

    Raises:
        UnusableImage: the address is of another kind, or its data is damaged or no image.
        InvalidRequest: its detail is unknown.
    """
    max_side = _max_side(detail, field)
    scheme, _, rest = url.strip().partition(":")
    kind = scheme.lower()
    if kind == "https":
        return Image(at=at, field=field, url=url, max_side=max_side)
    if kind != "data":
        shown = f"{kind}:" if kind in ("http", "file", "ftp") else "unknown"
        raise UnusableImage(
            field, f"is an image at an address of the kind {shown}; send a data: URL."
        )
    return Image(at=at, field=field, data=_data_of(rest, field), max_side=max_side)


def shown_images(
    messages: Sequence[Message], spec: ModelSpec, settings: Settings, ignored: list[str]
) -> tuple[Message, ...]:
    """The messages; images that this model cannot see, or that this server will not have, are lost,
    and why is added to `ignored`.

    Raises:
        UnusableImage: one is in the newest input.
    """
    remote = 0

    def show(image: Image) -> Image:
        nonlocal remote
        if not spec.sees:
            why = BLIND_TYPES.get(spec.model_type)
            is_blind = f"cannot be shown one: {why}" if why else "reads text only: leave it out"
            raise UnusableImage(image.field, f"is an image, and {spec.id} {is_blind}.")
        if image.url is not None:
            remote += 1
            _check_remote(image, remote, settings)
        return image

    shown = with_images(messages, show, ignored)
    is_input = bool(shown) and shown[-1].role in ("system", "user")
    newest = shown[-1].images if is_input else ()
    if len(newest) > settings.max_new_images:
        most = f"at most {settings.max_new_images} are read at a time (max_new_images)"
        field = newest[settings.max_new_images].field
        raise UnusableImage(field, f"is one image too many since the last answer: {most}.")
    return shown


def _check_remote(image: Image, number: int, settings: Settings) -> None:
    if not settings.allow_remote_images:
        raise UnusableImage(
            image.field,
            "is an image elsewhere, and this server fetches none (allow_remote_images): send the "
            "image itself, in base64.",
        )
    if number > MAX_REMOTE:
        raise UnusableImage(
            image.field,
            f"is one image elsewhere too many: at most {MAX_REMOTE} are fetched for a request. "
            "Send the images themselves, in base64.",
        )


def _max_side(detail: str | None, field: str) -> int | None:
    if detail is None:
        return None
    if detail not in _DETAILS:
        refuse(f"{field}.detail", f"must be one of {', '.join(_DETAILS)}.")
    return _DETAILS[detail]


def _decoded(encoded: str) -> bytes:
    """What is encoded, in steps between which other threads get their turn.

    Raises ValueError.
    """
    if "=" in encoded[:-2]:
        raise ValueError("there is more behind its end")
    return b"".join(
        base64.b64decode(encoded[begin : begin + _STEP], validate=True)
        for begin in range(0, len(encoded), _STEP)
    )


def _data_of(rest: str, field: str) -> bytes:
    """The bytes in a `data:` URL, without its scheme."""
    kind, comma, encoded = rest.partition(",")
    media_type, *options = (part.strip() for part in kind.lower().split(";"))
    if not comma or options[-1:] != ["base64"]:
        raise UnusableImage(field, "must hold its image in base64: data:image/png;base64,…")
    encoded = "".join(encoded.split())  # some encoders break lines, and some do not pad
    encoded += "=" * (-len(encoded) % 4)
    if len(encoded) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise UnusableImage(
            field, f"has more than {MAX_IMAGE_BYTES} bytes, which is the most. Shrink it."
        )
    try:
        data = _decoded(encoded)
    except ValueError as error:
        raise UnusableImage(field, f"is not valid base64: {error}.") from error
    if not data:
        raise UnusableImage(field, "is empty: send the bytes of an image.")
    is_known = data.startswith(tuple(_BEGINNINGS.values()))
    if not is_known and media_type not in _UNTOLD and not media_type.startswith("image/"):
        known = ", ".join(_BEGINNINGS)
        raise UnusableImage(
            field, f"is of the media type {media_type[:64]!r}: send one of {known}."
        )
    return data
