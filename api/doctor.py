"""`hearth doctor`: what is wrong with this machine's setup, with one remedy for each finding."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from api.cli.views import show
from api.serve import listen
from runtime.blas import INSTALL_HINT, find_blas
from runtime.settings import Settings

_IMPORT_TIMEOUT_S = 120


class Finding(NamedTuple):
    """One thing that was looked at. Without a remedy it is as it should be."""

    subject: str
    fact: str
    remedy: str | None = None


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at everything that serving needs, in the order in which it is needed."""
    yield _python()
    yield _mlx()
    yield _blas(settings.cpu_blas)
    yield _port(settings.host, settings.port)
    yield _home(settings.home)


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 when one of them has a remedy."""
    findings = list(examine(settings))
    lines: list[str] = []
    for finding in findings:
        mark = "ok  " if finding.remedy is None else "FIX "
        lines.append(f"{mark} {finding.subject}: {finding.fact}")
        if finding.remedy is not None:
            lines.append(f"     {finding.remedy}")
    show([one._asdict() for one in findings], "\n".join(lines), as_json=arguments.as_json)
    return int(any(finding.remedy is not None for finding in findings))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", f"{version} ({sys.executable})")


def _mlx() -> Finding:
    """Imported in a process of its own: that of the server never imports it."""
    code = "import mlx.core as mx, mlx_lm; print(mx.__version__, mx.default_device())"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("mlx", "importing it does not end", "reinstall it: make clean setup")
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        return Finding("mlx", f"cannot be imported: {reason[0]}", "reinstall it: make clean setup")
    return Finding("mlx", result.stdout.strip())


def _blas(setting: str) -> Finding:
    if sys.platform != "linux" or setting == "off":
        return Finding("BLAS", "not looked for" if setting == "off" else "comes with the system")
    try:
        library = find_blas(setting)
    except FileNotFoundError:
        return Finding("BLAS", f"{setting} does not exist", "correct cpu_blas or set it to auto")
    if library is None:
        fact = "no OpenBLAS found; on Linux CPUs models run about 50 times slower without it"
        return Finding("BLAS", fact, INSTALL_HINT)
    return Finding("BLAS", f"{library} is loaded into the workers")


def _port(host: str, port: int) -> Finding:
    try:
        listen(host, port).close()
    except OSError as error:
        return Finding(
            "Port",
            f"{host} port {port} cannot be listened on: {error.strerror}",
            f"stop what uses it (lsof -i :{port}) or choose another with --port",
        )
    return Finding("Port", f"{host} port {port} is free")


def _home(home: Path) -> Finding:
    nearest = next(path for path in (home, *home.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding(
            "Home",
            f"{nearest} cannot be written: {error.strerror}",
            "make it writable or choose another with --home",
        )
    return Finding("Home", str(home))
