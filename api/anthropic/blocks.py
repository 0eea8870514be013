"""Content blocks as clients send them. A type that is not here is skipped and reported."""

from __future__ import annotations

import msgspec

from api.anthropic.schemas import Body, CacheControl, Content, empty_object
from api.body import decoded_at
from api.images import image_of
from api.refusal import refuse
from runtime.types import Image


class AnyBlock(Body):
    type: str


class TextBlock(Body):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    thinking: str | None = None
    signature: str | None = None


class ToolUseBlock(Body):
    id: str
    name: str
    input: msgspec.Raw = msgspec.field(default_factory=empty_object)
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class Source(Body):
    """Where a picture or document is: `base64`, `url`, `text`, `content` or `file`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Content | None = None


class ImageBlock(Body):
    source: Source
    cache_control: CacheControl | None = None


class DocumentBlock(Body):
    source: Source
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(Body):
    content: list[TextBlock]
    source: str | None = None
    title: str | None = None
    cache_control: CacheControl | None = None


class ToolReferenceBlock(Body):
    tool_name: str
    cache_control: CacheControl | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
)

KINDS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
}


def block_at(raw: msgspec.Raw, path: str) -> Block | str:
    """The block, or the name of its type when that is not known.

    Raises:
        InvalidRequest: it is no block, or lacks what its type needs; `param` is the field's path.
    """
    kind = decoded_at(raw, AnyBlock, path).type
    block_type = KINDS.get(kind)
    return kind if block_type is None else decoded_at(raw, block_type, path)


def picture_at(block: ImageBlock, at: int, path: str) -> Image:
    """The picture in a block; `at` is its place in the text.

    Raises:
        InvalidRequest: it is in a place that cannot be read, or damaged.
    """
    source = block.source
    if source.type not in ("base64", "url"):
        refuse(
            f"{path}.source",
            f"is of type {source.type[:64]!r}: send the image itself (base64) or its url.",
        )
    if source.type == "url":
        url = source.url
    else:
        url = f"data:{source.media_type};base64,{source.data}" if source.data else None
    if not url:
        missing = "url" if source.type == "url" else "data"
        refuse(f"{path}.source.{missing}", "is missing: it is required.")
    return image_of(url, at, path)


def document_content(block: DocumentBlock, path: str) -> Content:
    """What a document says: a text, or blocks of text and pictures.

    Raises:
        InvalidRequest: it is neither.
    """
    source = block.source
    content = source.content if source.type == "content" else source.data
    if source.type not in ("text", "content") or content is None:
        refuse(
            path,
            f"is a document of type {(source.media_type or source.type)[:64]!r}, which is not "
            "supported: send its text, as a text block or as a source of type 'text' or 'content'.",
        )
    return content


def search_result_text(block: SearchResultBlock) -> str:
    """A search result as text."""
    texts = (text.text for text in block.content)
    return "\n".join(part for part in (block.title, block.source, *texts) if part)
