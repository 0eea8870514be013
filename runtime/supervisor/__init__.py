"""Worker processes: which model runs where, who waits for it, what happens when one ends.

`supervisor` is what others ask. What decides (`swap_policy`, `placement`, `lifecycle`, `failures`)
is pure; `model` and `process` act. Knows no protocol, no SQL and no mlx.
"""
