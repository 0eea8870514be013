"""The KV of a worker, in one of two forms: by runs, or by blocks."""

from __future__ import annotations

from runtime.kv import tiers
from runtime.kv.by_blocks import tiers as by_blocks

Tiers = tiers.Tiers | by_blocks.Tiers
