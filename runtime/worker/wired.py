"""The one place that replaces an upstream function: who may wire memory.

mlx-lm's BatchGenerator raises the wired limit to the whole recommended working set; a controlled
report ties that to kernel panics on macOS (https://github.com/ml-explore/mlx/issues/3186).
"""

from __future__ import annotations

import importlib
from typing import Any, Literal


def set_wired(policy: Literal["off", "on"]) -> None:
    """With "off", no generator of this process touches the wired limit; "on" leaves upstream be.

    Call it before the first generator is made.
    """
    if policy == "off":
        # The package re-exports a function under the module's name.
        module: Any = importlib.import_module("mlx_lm.generate")
        module.maybe_set_recommended_wired_limit = _leave_limit


def _leave_limit() -> None:
    return None
