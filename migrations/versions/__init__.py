"""One module per change of the schema, in order: `v0001_blocks`, `v0002_…`."""
