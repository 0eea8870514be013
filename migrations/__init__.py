"""Alembic migrations of the SQLite index."""
