"""The signature of a thinking block: the thoughts themselves, so that they come back whole.

Clients return it untouched even where the thoughts were not shown or were shortened. It proves
nothing, and needs not: whoever could forge it writes the prompt anyway.
"""

from __future__ import annotations

import base64
import zlib

from api.http.expansion import Expansion

_PREFIX = "hearth1."
MAX_BYTES = 1 << 22


def sign(reasoning: str) -> str:
    """The signature of these thoughts."""
    packed = zlib.compress(reasoning.encode(errors="replace"))
    return _PREFIX + base64.b64encode(packed).decode()


def reasoning_in(signature: str, expansion: Expansion, path: str) -> str | None:
    """The thoughts that were signed; None when the signature is not ours or damaged.

    Raises:
        InvalidRequest: they are more than the request may still come to; `path` is where it stands.
    """
    if not signature.startswith(_PREFIX):
        return None
    return expansion.unpacked(signature.removeprefix(_PREFIX), path, MAX_BYTES)
