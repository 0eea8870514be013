"""What of a conversation may be refused, and what stands where something cannot be read.

A client sends all that was said again with every request: what is refused there ends the
conversation for good. So only the last message may be refused, and no tool's result, which is
nobody's input. All else that cannot be read or shown becomes a line of text in its place, which
never depends on what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from runtime.errors import UnusableImage
from runtime.types import ChatPrompt, Image, Message

UNSEEN_IMAGES = "unseen_images"
"""The rule by which it is told that images became lines of text."""


def is_newest(number: int, count: int, *, is_result: bool) -> bool:
    """Whether what stands at that place of so many is the newest input, which may be refused."""
    return number == count - 1 and not is_result


def may_be_refused(number: int, messages: Sequence[Message]) -> bool:
    """The same of a message."""
    return is_newest(number, len(messages), is_result=messages[number].role == "tool")


def line_for(kind: str) -> str:
    """What the model reads in place of something of this kind."""
    return f"[{kind[:64]}: it cannot be shown here]"


UNSEEN = line_for("image")


def with_images(
    messages: Sequence[Message], show: Callable[[Image], Image], ignored: list[str]
) -> tuple[Message, ...]:
    """The messages with what `show` makes of each image. One that it cannot show is lost, and why
    is added to `ignored`.

    Raises:
        UnusableImage: that one is in the newest input.
    """
    if not any(message.images for message in messages):
        return tuple(messages)
    made = list(messages)
    for number, message in enumerate(messages):
        images: list[Image] = []
        for image in message.images:
            try:
                images.append(image if image.is_lost else show(image))
            except UnusableImage as error:
                if may_be_refused(number, messages):
                    raise
                ignored.append(error.message)
                images.append(image.lost())
        made[number] = msgspec.structs.replace(message, images=tuple(images))
    return tuple(made)


def without_lost_images(prompt: ChatPrompt) -> tuple[ChatPrompt, int]:
    """The prompt with a line of text for each image that has neither bytes nor an address any
    more, and how many these are.
    """
    num_lost = sum(image.is_lost for message in prompt.messages for image in message.images)
    if not num_lost:
        return prompt, 0
    messages = tuple(map(_with_lines, prompt.messages))
    return msgspec.structs.replace(prompt, messages=messages), num_lost


def _with_lines(message: Message) -> Message:
    if not any(image.is_lost for image in message.images):
        return message
    text = message.text
    pieces: list[str] = []
    grown = [0]
    """By how much the text before each image, and behind all of them, has grown."""
    kept: list[Image] = []
    done = 0
    for image in message.images:
        at = max(image.at, done)
        pieces.append(text[done:at])
        done = at
        added = 0
        if image.is_lost:
            before = next((piece[-1] for piece in reversed(pieces) if piece), "\n")
            line = ("" if before == "\n" else "\n") + UNSEEN
            line += "" if text[at : at + 1] in ("", "\n") else "\n"
            pieces.append(line)
            added = len(line)
        else:
            kept.append(msgspec.structs.replace(image, at=at + grown[-1]))
        grown.append(grown[-1] + added)
    points = tuple(
        msgspec.structs.replace(
            point,
            at=point.at + grown[min(point.num_images, len(message.images))],
            num_images=_num_kept(message.images[: point.num_images]),
        )
        for point in message.breakpoints
    )
    whole = "".join([*pieces, text[done:]])
    return msgspec.structs.replace(message, text=whole, images=tuple(kept), breakpoints=points)


def _num_kept(images: Sequence[Image]) -> int:
    return sum(not image.is_lost for image in images)
