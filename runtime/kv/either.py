"""The KV of a worker, in one of two forms: by runs, or by blocks where it is in memory only."""

from __future__ import annotations

from runtime.kv import tiers
from runtime.kv.by_blocks.alone import TiersAlone

Tiers = tiers.Tiers | TiersAlone
