"""`hearth service`: have launchd or systemd run the server at login, and restart it."""

from __future__ import annotations

import argparse
import math
import os
import plistlib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.cli.views import show
from runtime.config.settings import Settings
from runtime.errors import HearthError, SettingsError
from runtime.machine_limits import OPEN_FILES

LABEL = "dev.hearth.server"
STOP_MARGIN_S = 30.0
LEAST_STOP_S = 120
"""A worker that is killed with much wired memory can strand it, so leaving may take long."""

_RESTART_S = 5
_ROOT = Path(__file__).parents[2]
_PLAIN = re.compile(r"[\w@%+=:,./$~-]+")


class Unit(NamedTuple):
    """What a service manager is given: where the file lies, what is in it, and how to use it."""

    path: Path
    text: str
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    query: tuple[str, ...]


class UnitView(msgspec.Struct):
    """What `show --json` prints: where the file would lie, and what is in it."""

    path: str
    text: str


class ServiceView(msgspec.Struct):
    """What `--json` prints."""

    path: str
    is_installed: bool
    is_running: bool


def service(settings: Settings, arguments: argparse.Namespace) -> int:
    """Install, remove, look at or print the unit of this user.

    Raises:
        HearthError: there is no service manager that we know, or it refuses.
        SettingsError: it was to be installed with settings that are not in the file.
    """
    command = command_line(settings, arguments.config)
    unit = unit_of(settings, sys.platform, Path.home(), command)
    match arguments.action:
        case "show":
            shown = UnitView(str(unit.path), unit.text)
            return show(shown, unit.text, as_json=arguments.as_json)
        case "install":
            _check(settings, arguments)
            _install(unit)
        case "uninstall":
            _uninstall(unit)
        case _:
            pass
    is_running = unit.path.exists() and _succeeds(unit.query)
    found = ServiceView(str(unit.path), unit.path.exists(), is_running)
    state = "running" if is_running else ("not running" if found.is_installed else "not installed")
    show(found, f"{found.path}: {state}", as_json=arguments.as_json)
    return 0 if is_running or arguments.action != "status" else 1


def _check(settings: Settings, arguments: argparse.Namespace) -> None:
    """What a shell says now is not said at login, and other commands would not know of it."""
    if arguments.given:
        file = arguments.config or settings.home / "hearth.toml"
        raise SettingsError(
            f"A service has its settings from {file} alone: write what is to hold there, and leave "
            f"out {', '.join(arguments.given)}."
        )


def _install(unit: Unit) -> None:
    if unit.path.exists():  # neither manager takes up a changed unit of what runs
        for command in unit.stop:
            _succeeds(command)
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    unit.path.write_text(unit.text)
    for command in unit.start:
        _run(command)


def _uninstall(unit: Unit) -> None:
    if not unit.path.exists():
        return
    try:
        for command in unit.stop:
            _run(command)
    finally:
        unit.path.unlink()


def command_line(settings: Settings, config: Path | None) -> tuple[str, ...]:
    """How this program is started so that it finds the same home and the same file."""
    named = ("--config", str(config)) if config is not None else ()
    return (sys.executable, "-m", "hearth", "serve", "--home", str(settings.home), *named)


def unit_of(
    settings: Settings, platform: str, home: Path, command: tuple[str, ...], root: Path = _ROOT
) -> Unit:
    """The unit for this user's service manager, which starts `command` in the directory `root`.

    Raises:
        HearthError: there is none that we know.
    """
    stop_s = max(LEAST_STOP_S, math.ceil(settings.stop_timeout_s + STOP_MARGIN_S))
    if platform == "darwin":
        return _launchd(settings, home, command, root, stop_s)
    if platform == "linux":
        return _systemd(home, command, root, stop_s)
    message = f"There is no service manager that we know on {platform}; run `hearth serve`."
    raise HearthError(message)


def _launchd(
    settings: Settings, home: Path, command: tuple[str, ...], root: Path, stop_s: int
) -> Unit:
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    log = str(settings.home / "hearth.log")
    table = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(root),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": stop_s,
        # Workers inherit it: two Metal processes of different classes make each other time out.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "EnvironmentVariables": {"HEARTH_LOG_FORMAT": "json", "HEARTH_LOG_FILE": log},
        "StandardErrorPath": "/dev/null",
        "StandardOutPath": "/dev/null",
    }
    domain = f"gui/{os.getuid()}"
    return Unit(
        path=path,
        text=plistlib.dumps(table).decode(),
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        query=("launchctl", "print", f"{domain}/{LABEL}"),
    )


def _systemd(home: Path, command: tuple[str, ...], root: Path, stop_s: int) -> Unit:
    path = home / ".config" / "systemd" / "user" / "hearth.service"
    program, *arguments = command
    words = (program, *(word.replace("$", "$$") for word in arguments))
    text = f"""\
[Unit]
Description=Hearth, a local LLM server
After=network.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={" ".join(map(_quoted, words))}
WorkingDirectory={str(root).replace("%", "%%")}
Environment=HEARTH_LOG_FORMAT=json
Restart=on-failure
RestartSec={_RESTART_S}
RestartPreventExitStatus=2
OOMPolicy=continue
TimeoutStopSec={stop_s}
KillMode=mixed
LimitNOFILE={OPEN_FILES}
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""
    user = ("systemctl", "--user")
    return Unit(
        path=path,
        text=text,
        start=((*user, "daemon-reload"), (*user, "enable", "--now", "hearth.service")),
        stop=((*user, "disable", "--now", "hearth.service"),),
        query=(*user, "is-active", "--quiet", "hearth.service"),
    )


def _quoted(word: str) -> str:
    """A word of a command in a unit file, in quotes where it is not plain."""
    doubled = word.replace("%", "%%")
    if _PLAIN.fullmatch(doubled):
        return doubled
    escaped = doubled.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _run(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HearthError(f"{command[0]} cannot be run: {error.strerror}.") from error
    if done.returncode != 0:
        raise HearthError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _succeeds(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
