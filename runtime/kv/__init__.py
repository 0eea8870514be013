"""KV of one model in a worker: what is found, restored, kept and written; see README.md.

The engine speaks to `tiers`. `block_memory` and `deletions` are pure; `layers` alone knows how
mlx-lm keeps caches. No SQL and no HTTP.
"""
