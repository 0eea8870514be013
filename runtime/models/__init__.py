"""Models on disk: finding, downloading, checking and identifying their files.

`catalog` is the only way from a name to a directory; `identity` says what makes KV reusable.
Nothing is loaded here: no mlx, and no knowledge of workers.
"""
