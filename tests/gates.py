"""Gates: processes that wait where they import a module, until the test lets them go on.

What a program does before and after it imports something can be told apart by that, however slow
the machine is. Python's own audit events say when; nothing of the program is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import until

_SITE = """
import json, os, pathlib, sys, time

folder = pathlib.Path(__file__).parent
brought, parent = set(sys.modules), os.getppid()

def wait(event, args):
    if event != "import" or not (folder / args[0]).exists():
        return
    reached = folder / f"{args[0]}.reached"
    if not reached.exists():
        modules = reached.with_suffix(f".{os.getpid()}")
        imported = {name for name, module in sys.modules.items() if module is not None}
        modules.write_text(json.dumps(sorted(imported - brought)))
        modules.rename(reached)
    while (folder / args[0]).exists() and os.getppid() == parent:
        time.sleep(0.01)

sys.addaudithook(wait)
"""


class Gates:
    """Shut gates at these modules, for processes that are started with `variables`."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)
        for module in modules:
            (folder / module).touch()
        paths = (str(folder), os.environ.get("PYTHONPATH", ""))
        self.variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    async def reached(self, module: str) -> list[str]:
        """Wait until somebody stands there; the modules that its program had imported before."""
        file = self._folder / f"{module}.reached"
        await until(file.exists, f"somebody imports {module}")
        return json.loads(file.read_text())

    def open(self, module: str) -> None:
        """Let everybody through from now on."""
        (self._folder / module).unlink()
