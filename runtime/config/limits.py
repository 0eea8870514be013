"""What one request may cost, by the kind of route it is sent to: `[limits.KIND]`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from runtime.config.tables import QUANTITY
from runtime.config.units import SIZE, TIME, TOKENS
from runtime.types import Struct

Positive = Annotated[int, Meta(gt=0, le=2**48)]
Bytes = Annotated[int, Meta(gt=0, le=2**48, extra={QUANTITY: SIZE})]
Tokens = Annotated[int, Meta(gt=0, le=2**48, extra={QUANTITY: TOKENS})]
Seconds = Annotated[float, Meta(gt=0, le=365 * 86_400, extra={QUANTITY: TIME})]
Depth = Annotated[int, Meta(ge=1, le=512)]

_MIB = 1 << 20

RouteKind = Literal["generate", "embed", "prewarm", "history", "admin", "read"]


class RouteLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Of every kind. What is None is bounded by the setting for all routes alone, if there is one.

    `body_bytes` count before images, `depth` is how deeply JSON may be nested, `parts` how many
    lists, objects, field names and texts it may have. `time_s` is the longest until the answer
    begins.
    """

    body_bytes: Bytes | None = None
    depth: Depth = 128
    parts: Positive = 100_000
    time_s: Seconds | None = None


class PromptLimits(RouteLimits, frozen=True, forbid_unknown_fields=True):
    """Of routes that are sent prompts; of `prompt_tokens` None is the model's context."""

    prompt_tokens: Tokens | None = None


class GenerateLimits(PromptLimits, frozen=True, forbid_unknown_fields=True):
    """Of routes that answer prompts: `time_s` is for the whole answer, which ends there.

    `output_tokens` is the longest answer, whatever a request asks for.
    """

    output_tokens: Tokens | None = None


class EmbedLimits(PromptLimits, frozen=True, forbid_unknown_fields=True):
    """Of embeddings, `/tokenize` and `/detokenize`."""

    body_bytes: Bytes | None = 32 * _MIB
    depth: Depth = 32


class PrewarmLimits(PromptLimits, frozen=True, forbid_unknown_fields=True):
    """Of `/v1/prewarm`, which answers before the prompt is warm."""

    time_s: Seconds | None = 60.0


class HistoryLimits(RouteLimits, frozen=True, forbid_unknown_fields=True):
    """Of agents and stored responses, apart from generating."""

    body_bytes: Bytes | None = 16 * _MIB
    time_s: Seconds | None = 60.0


class AdminLimits(RouteLimits, frozen=True, forbid_unknown_fields=True):
    """Of `/admin`, where loading and verifying take as long as they take."""

    body_bytes: Bytes | None = 16 * _MIB
    depth: Depth = 16


class ReadLimits(RouteLimits, frozen=True, forbid_unknown_fields=True):
    """Of everything else: lists of models, health, metrics, the page."""

    body_bytes: Bytes | None = 65_536
    depth: Depth = 16
    time_s: Seconds | None = 30.0


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[limits]`: a table for each kind of route."""

    generate: GenerateLimits = GenerateLimits()
    embed: EmbedLimits = EmbedLimits()
    prewarm: PrewarmLimits = PrewarmLimits()
    history: HistoryLimits = HistoryLimits()
    admin: AdminLimits = AdminLimits()
    read: ReadLimits = ReadLimits()

    def of(self, kind: RouteKind) -> RouteLimits:
        """Those of routes of that kind."""
        by_kind: dict[RouteKind, RouteLimits] = {
            "generate": self.generate,
            "embed": self.embed,
            "prewarm": self.prewarm,
            "history": self.history,
            "admin": self.admin,
            "read": self.read,
        }
        return by_kind[kind]
