"""Whatever upstream does with a model's files, only installed code runs in a worker.

`runtime.models.folder` sees to it that nothing asks for other code. This holds where that fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType

_CODE = (".py", ".pyc")
_WATCHED = frozenset({"exec", "import", "open", "pickle.find_class"})


class ForeignCode(ImportError):
    """Code was to be run that is not part of the installation."""


def run_only_installed_code() -> None:
    """From now on, and for as long as this process lives, other files of code cannot be run.

    Installed is what lies in the places that Python searches now, and in packages imported so far.
    Classes that a pickle names are not looked up either: that would run what it says.
    """
    places = {place for place in sys.path if place}
    for module in tuple(sys.modules.values()):
        places |= {str(place) for place in vars(module).get("__path__") or ()}
    sys.addaudithook(_guard(tuple(f"{os.path.abspath(one)}{os.sep}" for one in sorted(places))))  # noqa: PTH100


def _guard(places: tuple[str, ...]) -> Callable[[str, tuple[object, ...]], None]:
    def check(event: str, args: tuple[object, ...]) -> None:
        if event not in _WATCHED:
            return
        if event == "pickle.find_class":
            raise ForeignCode("a pickle names code, and none is read")
        file = _file(event, args)
        if file and not os.path.abspath(file).startswith(places):  # noqa: PTH100
            raise ForeignCode(f"{file} is not part of this installation")

    return check


def _file(event: str, args: tuple[object, ...]) -> str:
    """The file of code that an event of Python's is about, if it is about one."""
    if event == "exec":
        name = args[0].co_filename if isinstance(args[0], CodeType) else ""
        return "" if name.startswith("<") else name
    given = args[1] if event == "import" else args[0]
    name = str(given) if isinstance(given, str | Path) else ""
    if isinstance(given, bytes):
        name = os.fsdecode(given)
    return name if event == "import" or name.endswith(_CODE) else ""
