"""Changes of the schema over time, as Alembic versions; no file of settings is needed."""
