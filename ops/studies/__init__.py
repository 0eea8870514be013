"""Finished studies: each answered a question once; README.md says what it found."""
