"""The history's schema: a database of its own, with versions of its own."""
