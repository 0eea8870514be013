"""The server's side of KV by blocks: heads, and which blocks stay."""
