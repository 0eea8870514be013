"""How much one request may hold, whoever's protocol it speaks. Bytes are bounded before this."""

from __future__ import annotations

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, GenerateRequest

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024
"""What is done for each of them looks at others: hundreds of thousands took minutes to read."""


def check_size(request: GenerateRequest) -> None:
    """Raises InvalidRequest when a prompt has more parts than any conversation has."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return
    for name, parts, most in (
        ("messages", prompt.messages, MAX_MESSAGES),
        ("tools", prompt.tools, MAX_TOOLS),
    ):
        if len(parts) > most:
            why = f"{name} has {len(parts)} entries, at most {most} are served."
            raise InvalidRequest(why, name)
