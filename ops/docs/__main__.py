"""`python -m ops.docs`: write the pages that are made from the code."""

from __future__ import annotations

import argparse

from ops.docs.pages import made

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m ops.docs", description=__doc__).parse_args()
    for path, text in made().items():
        path.write_text(text, "utf-8")
        print(path)
