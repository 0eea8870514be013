"""KV in a worker: what is known, restored, kept and written; README.md draws a block's life.

The engine speaks to `tiers`. `theory`, `blocks`, `prefix_tree` and `eviction` are pure; `layers`
alone knows how mlx-lm keeps caches. No SQL and no HTTP.
"""
