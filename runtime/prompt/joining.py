"""Messages that become one, however many they are: what is said in them is copied once."""

from __future__ import annotations

import msgspec

from runtime.types import Breakpoint, Image, Message, Role, ToolCall


class JoinedMessages:
    """A message that others are added to; it keeps the role of the first one."""

    def __init__(self, first: Message) -> None:
        self._first = first
        self._texts: list[str] = []
        self._length = 0
        self._images: list[Image] = []
        self._reasonings: list[str] = []
        self._calls: list[ToolCall] = []
        self._points: list[Breakpoint] = []
        self._num_messages = 0
        self.add(first, "")

    @property
    def role(self) -> Role:
        return self._first.role

    @property
    def has_text(self) -> bool:
        return self._length > 0

    def add(self, one: Message, joint: str, *, even_empty: bool = False) -> None:
        """One more, with `joint` between its text and what was said before it.

        Where one of them has no text there is none, except with `even_empty`.
        """
        if (self.has_text and one.text) or even_empty:
            self._say(joint)
        num_images, num_calls, begun = len(self._images), len(self._calls), self._length
        self._points += (
            msgspec.structs.replace(
                point,
                at=point.at + begun,
                num_images=point.num_images + num_images,
                num_calls=point.num_calls + num_calls,
            )
            for point in one.breakpoints
        )
        self._images += (
            msgspec.structs.replace(image, at=image.at + self._length) for image in one.images
        )
        self._say(one.text)
        self._calls += one.tool_calls
        self._reasonings += [one.reasoning] if one.reasoning else []
        self._num_messages += 1

    def message(self) -> Message:
        """All of them as one; what else the first one says stays."""
        if self._num_messages == 1:
            return self._first
        return msgspec.structs.replace(
            self._first,
            text="".join(self._texts),
            images=tuple(self._images),
            reasoning="\n".join(self._reasonings) or None,
            tool_calls=tuple(self._calls),
            breakpoints=tuple(self._points),
        )

    def _say(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)
