"""One module per change of the schema, in order: `v0001_agents`, `v0002_…`."""
