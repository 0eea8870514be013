"""One module per change of the schema, in order: `v0001_first`, `v0002_…`."""
