"""The content of a message: a text, or a list of parts, in the shapes of chat and of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from api.http.files import file_text
from api.http.images import image_of
from api.http.past import STRICT, Turn
from api.http.refusal import refuse
from api.openai.fields import CACHE_TTL_S, Body, CacheBreakpoint
from runtime.errors import UnusableImage
from runtime.prompt.past import line_for
from runtime.types import Breakpoint, Image

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
THOUGHT_PARTS = frozenset({"thinking", "reasoning"})
"""As some servers give thoughts in an answer's content."""
IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})


class ImageUrl(Body):
    """Where a picture is: a `data:` or `https:` address."""

    url: str | None = None
    detail: str | None = None


class ThoughtPart(Body):
    """A piece of thoughts."""

    type: str = "text"
    text: str | None = None


class InlineFile(Body):
    """A file that is sent along."""

    file_data: str | None = None
    filename: str | None = None


class ContentPart(Body):
    """One part of a message's content: text, a refusal, a picture or a file, in answers also
    thoughts. Chat has what is said of a file in `file`.
    """

    SILENT = frozenset({"annotations", "logprobs"})
    INSTEAD: ClassVar[dict[str, object]] = {"type": "text", "text": line_for("part")}

    type: str = "text"
    text: str | None = None
    thinking: str | list[ThoughtPart] | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    detail: str | None = None
    file: InlineFile | None = None
    file_data: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Content = str | list[ContentPart] | None


class ContentText(NamedTuple):
    """What a content says: its texts joined by newlines, the pictures and breakpoints between."""

    text: str
    images: tuple[Image, ...]
    breakpoints: tuple[Breakpoint, ...] = ()
    thoughts: str | None = None


def read(
    content: Content, path: str, turn: Turn = STRICT, *, has_thoughts: bool = False
) -> ContentText:
    """The text and the pictures of a content, and its thoughts where it may have some.

    Raises:
        InvalidRequest: a part is of an unknown type or lacks what it is about, and `turn` is the
            newest input.
    """
    if content is None or isinstance(content, str):
        return ContentText(content or "", ())
    thoughts = [part for part in content if has_thoughts and part.type in THOUGHT_PARTS]
    said = _read_parts(content, path, turn, frozenset(map(id, thoughts)))
    return said._replace(thoughts="\n".join(map(_thought, thoughts)) if thoughts else None)


def _read_parts(
    parts: Sequence[ContentPart], path: str, turn: Turn, but: frozenset[int]
) -> ContentText:
    texts: list[str] = []
    images: list[Image] = []
    points: list[Breakpoint] = []
    length = 0
    for i, part in enumerate(parts):
        at = f"{path}[{i}]"
        if id(part) in but:
            continue
        if part.type in IMAGE_PARTS:
            images.append(_image(part, length, at, turn))
        else:
            text = turn.read(lambda part=part, at=at: _part_text(part, at), line_for(part.type))
            length += len(text) + bool(texts)
            texts.append(text)
        if (point := part.prompt_cache_breakpoint) is not None:
            keep_s = CACHE_TTL_S[point.ttl]
            points.append(Breakpoint(at=length, keep_s=keep_s, num_images=len(images)))
    return ContentText("\n".join(texts), tuple(images), tuple(points))


def _thought(part: ContentPart) -> str:
    if isinstance(part.thinking, list):
        return "".join(one.text or "" for one in part.thinking)
    return part.thinking or part.text or ""


def _image(part: ContentPart, at: int, path: str, turn: Turn) -> Image:
    given = part.image_url
    if not isinstance(given, ImageUrl):
        given = ImageUrl(given, part.detail)

    def image() -> Image:
        if given.url is None:
            raise UnusableImage(path, "has no image_url: give its address or a data: URL.")
        return image_of(given.url, at, path, given.detail)

    return turn.read(image, Image(at=at, field=path))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type == "input_file":
        return file_text(part.file_data, part.filename, path, "file_data")
    if part.type == "file":
        file = part.file or InlineFile()
        return file_text(file.file_data, file.filename, path, "file.file_data")
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in TEXT_PARTS and part.type != "refusal":
        refuse(
            path,
            f"is a part of type {part.type[:64]!r}, which is not supported: send text or images.",
        )
    if text is None:
        refuse(f"{path}.text", "is missing: give the part's text.")
    return text
