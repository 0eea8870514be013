"""The content of a message: a text, or a list of parts, in the shapes of chat and of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from api.http.images import image_of
from api.http.refusal import refuse
from api.openai.fields import CACHE_TTL_S, Body, CacheBreakpoint
from runtime.types import Breakpoint, Image

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})


class ImageUrl(Body):
    """Where a picture is: a `data:` or `https:` address."""

    url: str | None = None
    detail: str | None = None


class ContentPart(Body):
    """One part of a message's content: text, a refusal or a picture."""

    SILENT = frozenset({"annotations", "logprobs"})

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    detail: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Content = str | list[ContentPart] | None


class ContentText(NamedTuple):
    """What a content says: its texts joined by newlines, the pictures and breakpoints between."""

    text: str
    images: tuple[Image, ...]
    breakpoints: tuple[Breakpoint, ...] = ()


def read(content: Content, path: str) -> ContentText:
    """The text and the pictures of a content.

    Raises:
        InvalidRequest: a part is of an unknown type or lacks what it is about.
    """
    if content is None or isinstance(content, str):
        return ContentText(content or "", ())
    return _read_parts(content, path)


def _read_parts(parts: Sequence[ContentPart], path: str) -> ContentText:
    texts: list[str] = []
    images: list[Image] = []
    points: list[Breakpoint] = []
    length = 0
    for i, part in enumerate(parts):
        if part.type in IMAGE_PARTS:
            images.append(_image(part, length, f"{path}[{i}]"))
        else:
            text = _part_text(part, f"{path}[{i}]")
            length += len(text) + bool(texts)
            texts.append(text)
        if (point := part.prompt_cache_breakpoint) is not None:
            keep_s = CACHE_TTL_S[point.ttl]
            points.append(Breakpoint(at=length, keep_s=keep_s, num_images=len(images)))
    return ContentText("\n".join(texts), tuple(images), tuple(points))


def _image(part: ContentPart, at: int, path: str) -> Image:
    given = part.image_url
    if not isinstance(given, ImageUrl):
        given = ImageUrl(given, part.detail)
    if given.url is None:
        refuse(path, "has no image_url: give the picture's address or a data: URL.")
    return image_of(given.url, at, path, given.detail)


def _part_text(part: ContentPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in TEXT_PARTS and part.type != "refusal":
        refuse(
            path,
            f"is a part of type {part.type[:64]!r}, which is not supported: send text or images.",
        )
    if text is None:
        refuse(f"{path}.text", "is missing: give the part's text.")
    return text
