"""The command line: `hearth`, or `python -m hearth`.

The packages `api`, `runtime`, `store` and `migrations` have names that other projects use too. So
a wheel has them in `hearth/app`, which is put first on the path of this process (and of workers, by
`runtime.supervisor.spawned`); a checkout has them beside this package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn


def application_folder() -> Path:
    """The directory that holds `api`, `runtime`, `store` and `migrations`."""
    here = Path(__file__).resolve().parent
    installed = here / "app"
    return installed if installed.is_dir() else here.parent


def run() -> NoReturn:
    """Run the command line with our packages before all others of their names."""
    folder = str(application_folder())
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    from api.__main__ import run as run_command  # noqa: PLC0415 - it is found only from here on

    run_command()


if __name__ == "__main__":
    run()
