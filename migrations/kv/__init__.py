"""The schema of the index of blocks and heads: a database of its own, with versions of its own."""
