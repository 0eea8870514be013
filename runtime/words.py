"""What some fields of the value types may say; `runtime.types` has all of them too."""

from __future__ import annotations

from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
Priority = Literal["interactive", "default", "background"]
Work = Literal["generate", "count", "prefill", "tokenize", "detokenize", "embed", "explain"]
CacheMode = Literal["full", "prefix", "off"]
CacheTier = Literal["none", "hot", "warm", "cold"]
MissReason = Literal[
    "first_seen",
    "not_yet_durable",
    "diverged",
    "expired",
    "evicted",
    "damaged",
    "deleted",
    "no_checkpoint",
    "slower_than_prefill",
    "away",
    "unsupported",
    "scored",
    "off",
]
