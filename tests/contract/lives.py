"""Two lives of one store: a process that writes, and another that goes on from what it left."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Life = Callable[[Path, str], dict[str, Any]]


def live(before: Life, after: Life) -> None:
    """Live the life that the command line names, in a folder for each family that it names.

    What comes of each, or its error, is written to `before.json` or `after.json`.
    """
    life, root, *families = sys.argv[1:]
    run = {"before": before, "after": after}[life]
    results: dict[str, Any] = {}
    for family in families:
        folder = Path(root) / family
        folder.mkdir(exist_ok=True)
        try:
            results[family] = run(folder, family)
        except Exception:
            results[family] = {"error": traceback.format_exc()}
    (Path(root) / f"{life}.json").write_text(json.dumps(results))
