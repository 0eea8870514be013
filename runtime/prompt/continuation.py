"""Which message of a prompt is the beginning of its answer."""

from __future__ import annotations

from runtime.types import ChatPrompt, Message


def begun(prompt: ChatPrompt) -> Message | None:
    """The last message, where the answer goes on with it; None where it begins anew.

    A turn that made calls is over, and so is one that nothing precedes.
    """
    if not prompt.messages:  # it only held telemetry
        return None
    *earlier, last = prompt.messages
    is_begun = prompt.continues_last and last.role == "assistant" and bool(earlier)
    return last if is_begun and not last.tool_calls else None
