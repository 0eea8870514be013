"""What is done to a conversation before the model reads it.

The server learns prefixes with it, and workers put prompts together; all changes go through
`rewriting`, which tells of them. Pure: no mlx, threads, files or SQL, and no protocol.
"""
