"""What launchd and systemd are told."""

from __future__ import annotations

import configparser
import plistlib
from pathlib import Path

import pytest

from api.cli.service import LEAST_STOP_S, unit_of
from runtime.errors import HearthError
from runtime.settings import Settings

HOME = Path("/home/ann")
COMMAND = ("/opt/my python/bin/python", "-m", "api", "serve", "--home", "/data/50%")


def settings(stop_timeout_s: float = 30.0) -> Settings:
    return Settings(home=Path("/data/hearth"), stop_timeout_s=stop_timeout_s)


def test_systemd_waits_longer_than_the_server_needs_to_leave():
    unit = unit_of(settings(200.0), "linux", HOME, COMMAND)
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parsed.read_string(unit.text)
    service = parsed["Service"]
    assert float(service["TimeoutStopSec"]) > 200
    assert service["Restart"] == "on-failure"
    assert service["ExecStart"].startswith('"/opt/my python/bin/python" -m api serve')
    assert service["ExecStart"].endswith("--home /data/50%%")
    assert unit.path == HOME / ".config/systemd/user/hearth.service"


def test_launchd_gives_a_server_with_much_memory_two_minutes_to_leave():
    unit = unit_of(settings(), "darwin", HOME, COMMAND)
    table = plistlib.loads(unit.text.encode())
    assert table["ProgramArguments"] == list(COMMAND)
    assert table["ExitTimeOut"] == LEAST_STOP_S == 120
    assert table["KeepAlive"] == {"SuccessfulExit": False}
    assert table["EnvironmentVariables"]["HEARTH_LOG_FILE"] == "/data/hearth/hearth.log"
    assert unit.path == HOME / "Library/LaunchAgents" / f"{table['Label']}.plist"


def test_elsewhere_there_is_no_service():
    with pytest.raises(HearthError, match="win32"):
        unit_of(settings(), "win32", HOME, COMMAND)
