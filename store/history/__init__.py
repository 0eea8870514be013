"""Text that cannot be computed again: agents and responses, in their own database.

Functions of a connection, without a policy but the quota. Who may read what, and how long it is
kept, is decided above.
"""
