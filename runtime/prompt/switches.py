"""Switches of what is done to prompts, for all models and for each."""

from __future__ import annotations

from msgspec.structs import astuple

from runtime.types import Struct


class PromptSwitches(Struct, frozen=True, forbid_unknown_fields=True):
    """`[prompt_rules]`: what may be done to prompts so that they stay cacheable; all is on.

    `billing_header` strips Claude Code's telemetry from its system prompt. `tools_first` writes
    tools before the system text where the template allows. `healed_turn` puts the tokens of
    generated turns back.
    """

    billing_header: bool | None = None
    tools_first: bool | None = None
    healed_turn: bool | None = None


def switched_off(own: PromptSwitches, shared: PromptSwitches) -> tuple[str, ...]:
    """What is off for a model: by its own word, or else by that for all."""
    given = zip(own.__struct_fields__, astuple(own), astuple(shared), strict=True)
    return tuple(
        name for name, ours, theirs in given if (ours if ours is not None else theirs) is False
    )
