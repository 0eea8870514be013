"""KV in memory: what sequences share, how layer caches are cut and put together, and the tiers."""
