"""Kept turns that a request goes on from under other tools than it has: none, or spelled anew.

Belongs to the intake thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.prompt.healing import KnownPrefix
from runtime.types import GenerateRequest
from runtime.worker.input.turns import TurnStore
from store.turns import Turn

READ = frozenset({"generate", "prefill", "explain"})
"""Work for which the model reads a prompt; who only counts is told of what was sent."""
_MAX_TOOLS = 4
"""So many sets of tools are tried."""
_ANSWER_SHARE = 8
"""Some clients always allow 32,000 tokens: no more than this share of a context counts."""
_SUMMARY_SHARE, _SUMMARY_TOKENS = 16, 4096

Found = tuple[int, KnownPrefix]
"""Which message is the last turn of ours, and all tokens up to its end."""


class KeptTurn(NamedTuple):
    """Message `number` of a request is this turn, which was asked with `tools`, packed."""

    number: int
    turn: Turn
    tools: bytes


def kept_turns(turns: TurnStore, bare: Sequence[bytes], found: Found | None) -> list[KeptTurn]:
    """The last turns of a conversation that go further than what is known of it, one per set of
    tools. `bare` are its digests whatever its tools are.
    """
    first = found[0] + 1 if found is not None else 0
    kept: dict[bytes, KeptTurn] = {}
    for number in range(len(bare) - 2, first - 1, -1):
        for turn, tools in turns.with_tools(bare[number]):
            kept.setdefault(tools, KeptTurn(number, turn, tools))
        if len(kept) >= _MAX_TOOLS:
            break
    return list(kept.values())[:_MAX_TOOLS]


def leaves_room(num_tokens: int, context: int, request: GenerateRequest) -> bool:
    """What the client wants for the answer is left for it, or else enough for a summary.

    Clients compact when nine tenths are used, so more than a sixteenth would never be there. An
    answer's usual length, of the server's settings, is nothing that the client wants.
    """
    most = context if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None or request.is_default_max:
        room = min(most, context // _SUMMARY_SHARE, _SUMMARY_TOKENS)
    else:
        room = min(most, context // _ANSWER_SHARE)
    is_allowed = num_tokens <= (request.max_prompt_tokens or context)
    return is_allowed and context - num_tokens >= room
