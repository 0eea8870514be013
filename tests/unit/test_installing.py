"""What is shown while packages are installed, by a stand-in for uv that writes as uv does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.running_server import ROOT

SAID = """\
[ "$1" = cache ] && { echo /nowhere; exit; }
cat >&2 <<'END'
Resolved 3 packages in 10ms
Prepared 2 packages in 1.2s
warning: Failed to hardlink files; falling back to full copy.
Uninstalled 1 package in 3ms
Installed 3 packages in 10ms
 - click==8.5.0
 + click==8.5.1
 + mlx==0.32.4
 ~ hearth==0.1 (from file:///here)
error: Failed to fetch: `mlx`
  Caused by: no network
END
exit 2
"""


UNTRUSTED = """\
[ "$1" = cache ] && { echo /nowhere; exit; }
cat >&2 <<'END'
error: Failed to fetch: https://example.org/simple/alembic/
  cause: invalid peer certificate: UnknownIssuer

hint: Consider enabling use of system TLS certificates with the `--system-certs` command-line flag
END
exit 2
"""


def installed(uv: Path, said: str) -> subprocess.CompletedProcess[str]:
    uv.write_text(f"#!/bin/sh\n{said}")
    uv.chmod(0o700)
    return subprocess.run(
        [sys.executable, str(ROOT / "ops" / "installing.py"), "installing", str(uv), "pip", "sync"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_packages_are_not_listed_and_what_goes_wrong_is_told(tmp_path: Path):
    done = installed(tmp_path / "uv", SAID)
    assert done.returncode == 2
    *lines, last = done.stderr.splitlines()
    assert lines == [
        "Hearth: installing…",
        "warning: Failed to hardlink files; falling back to full copy.",
        "error: Failed to fetch: `mlx`",
        "  Caused by: no network",
    ]
    assert last.startswith("Hearth: installing: failed after ")


def test_a_flag_of_uv_is_told_as_what_can_be_typed_before_make(tmp_path: Path):
    """Whoever runs make gives uv no flags."""
    done = installed(tmp_path / "uv", UNTRUSTED)
    assert done.returncode == 2
    assert "--system-certs" not in done.stderr
    assert "UnknownIssuer" in done.stderr
    assert "UV_SYSTEM_CERTS=1 make" in done.stderr
    assert "SSL_CERT_FILE" in done.stderr
