"""Clients that come from npm, installed once into a cache folder outside the project."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

NODE_VERSION = "24.21.0"
INSTALL_S = 600.0
CACHE = Path.home() / ".cache" / "hearth-tests" / "npm"


@dataclass(frozen=True)
class Project:
    """A folder with installed packages and the Node that they need."""

    folder: Path
    node: Path

    def run(
        self, *arguments: str | Path, home: Path, timeout_s: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Node with a home of its own and no other variables than these."""
        return subprocess.run(
            [self.node, *arguments],
            cwd=home,
            env=self.environment(home) | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def environment(self, home: Path) -> dict[str, str]:
        return {"HOME": str(home), "PATH": f"{self.node.parent}:/usr/bin:/bin", "TERM": "dumb"}


def installed(name: str, *packages: str) -> Project:
    """The project of this name with these packages, each as `name@version`.

    Skips the test where there is no npm, or where the packages cannot be had.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is missing: install Node.js to run the clients that need it")
    folder = CACHE / name
    system = {"darwin": "darwin", "linux": "linux"}.get(sys.platform, "")
    machine = {"aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "x64")
    runtime = f"node-{system}-{machine}"
    wanted = [*packages, f"{runtime}@{NODE_VERSION}"]
    done = folder / "installed.txt"
    if not done.exists() or done.read_text() != "\n".join(wanted):
        _install(npm, folder, wanted)
        done.write_text("\n".join(wanted))
    return Project(folder, folder / "node_modules" / runtime / "bin" / "node")


def _install(npm: str, folder: Path, packages: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true}')
    quiet: Mapping[str, str] = {"npm_config_audit": "false", "npm_config_fund": "false"}
    # Their scripts only look for newer Nodes and platforms; the packages work without.
    command = [npm, "install", "--ignore-scripts", "--loglevel=error", *packages]
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{', '.join(packages)} did not install within {INSTALL_S:g} s")
    if ended.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {ended.stderr[-300:]}")
