"""Pages that are made from the code: `python -m ops.docs` writes them, a test says when to."""
