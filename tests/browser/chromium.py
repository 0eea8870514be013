"""The browser that tests drive, where there is one that may be started."""

import os
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")

needs_chromium = pytest.mark.skipif(
    not os.access(CHROMIUM, os.X_OK),
    reason=f"no browser at {CHROMIUM}: install Debian's package chromium",
)
