"""API keys: kept as digests, compared in constant time, each the name of a tenant.

A key is 32 random bytes, so a plain SHA-256 of it cannot be guessed back.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ADMIN_FILE = "admin.token"


class Principal(NamedTuple):
    """Who asks. Callers of different `tenant` never see what the other's prompts left behind."""

    tenant: str = ""
    is_admin: bool = False


ANYONE = Principal()

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a tenant may be called; names that it owns begin with it."""


def new_key() -> str:
    """A key that nobody can guess."""
    return f"hearth-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """What stands for the key in the configuration."""
    return _PREFIX + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def owned(tenant: str, name: str) -> str:
    """What a name that a tenant gave is known by: two tenants mean two things by one name.

    Without a tenant it is the name itself, unless that looks like one of a tenant.
    """
    return f"@{tenant}/{name}" if tenant or name.startswith("@") else name


def plain(name: str) -> str:
    """The name as its tenant gave it."""
    return name.partition("/")[2] if name.startswith("@") else name


def owner(name: str) -> str:
    """The tenant that gave a name, "" for those without one."""
    return name[1:].partition("/")[0] if name.startswith("@") else ""


def is_digest(text: str) -> bool:
    """Whether this is something that `digest_of` gave."""
    return _DIGEST.fullmatch(text) is not None


Need = Literal["nothing", "API key", "admin key"]


class Needs(NamedTuple):
    """The key that is asked for: by the protocols, by sums over all callers, by administration."""

    use: Need
    sums: Need
    admin: Need


def needs_of(tenants: Collection[str], admin_key: str | None) -> Needs:
    """Every key that is configured is asked for; without any, this machine's programs are let in.

    Sums tell a tenant that is alone nothing but its own, and all others something of each other.
    """
    if not tenants and not admin_key:
        return Needs("nothing", "nothing", "nothing")
    use: Need = "API key" if tenants else "nothing"
    return Needs(use, use if len(tenants) == 1 else "admin key", "admin key")


class Keyring:
    """All keys that open something. `tenants` maps a name to its digest."""

    def __init__(self, tenants: Mapping[str, str], admin_digests: tuple[str, ...]) -> None:
        admins = [(digest, Principal(is_admin=True)) for digest in admin_digests]
        self._known = [(digest, Principal(name)) for name, digest in tenants.items()] + admins

    def find(self, key: str) -> Principal | None:
        """Whose key this is; it takes the same time whichever of them it is, or none."""
        return self.of_digest(digest_of(key))

    def of_digest(self, digest: str) -> Principal | None:
        """The same, for the digest of a key."""
        found = None
        for known, caller in self._known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def write_admin_token(home: Path) -> str:
    """A new key for the operator's own programs on this machine, in a file that only they read."""
    token = new_key()
    write_private(home / _ADMIN_FILE, token)
    return token


def write_private(path: Path, text: str) -> None:
    """Have the file say this and nothing else, to nobody but us, at every moment."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def read_admin_token(home: Path) -> str | None:
    """The key that the server running in `home` wrote; None where there is none to be read."""
    try:
        return (home / _ADMIN_FILE).read_text().strip() or None
    except OSError:
        return None
