"""What is done to a conversation before the model reads it.

Workers put prompts together; all changes go through `rewriting`, which tells of them. Pure: no mlx,
threads, files or SQL, and no protocol.
"""
