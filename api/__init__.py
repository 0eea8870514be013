"""Protocols: what clients speak, turned into the runtime's own types and back."""
