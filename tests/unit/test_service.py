"""What launchd and systemd are told."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from api.cli.service import LEAST_STOP_S, unit_of
from runtime.config.settings import Settings
from runtime.errors import HearthError

HOME = Path("/home/ann")
COMMAND = ("/opt/my python/bin/python", "-m", "hearth", "serve", "--home", "/data/50%")


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
    assert service["RestartPreventExitStatus"] == "2", "settings do not mend themselves"
    assert service["OOMPolicy"] == "continue", "a worker that is killed is not the server"
    assert service["KillMode"] == "mixed", "workers are told by the server, and killed with it"
    assert service["ExecStart"].startswith('"/opt/my python/bin/python" -m hearth serve')
    assert service["ExecStart"].endswith("--home /data/50%%")
    assert unit.path == HOME / ".config/systemd/user/hearth.service"


def test_launchd_gives_a_server_with_much_memory_two_minutes_to_leave():
    unit = unit_of(settings(), "darwin", HOME, COMMAND)
    table = plistlib.loads(unit.text.encode())
    assert table["ProgramArguments"] == list(COMMAND)
    assert table["ExitTimeOut"] == LEAST_STOP_S == 120
    assert table["KeepAlive"] == {"SuccessfulExit": False}
    assert table["ProcessType"] == "Interactive", "the same for the workers, who inherit it"
    assert table["EnvironmentVariables"]["HEARTH_LOG_FILE"] == "/data/hearth/hearth.log"
    assert unit.path == HOME / "Library/LaunchAgents" / f"{table['Label']}.plist"


def test_what_systemd_would_read_as_its_own_signs_is_told_as_it_is():
    command = ("/opt/o'brien/python", "serve", "--home", '/data/$HOME "and" 5% \\ more')
    text = unit_of(settings(), "linux", HOME, command, Path("/srv/my 5% hearth")).text
    assert 'ExecStart="/opt/o\'brien/python" serve --home "/data/$$HOME ' in text
    assert ' \\"and\\" 5%% \\\\ more"\n' in text
    assert "WorkingDirectory=/srv/my 5%% hearth\n" in text, "it takes no quotes there"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("name", ["home", "my home", "o'brien's $HOME at 5%"])
def test_systemd_finds_nothing_to_complain_of(tmp_path: Path, name: str):
    place = tmp_path / name
    place.mkdir()
    command = (sys.executable, "-m", "hearth", "serve", "--home", str(place))
    file = tmp_path / "hearth.service"
    file.write_text(unit_of(settings(), "linux", tmp_path, command, place).text)
    for name in ("basic", "shutdown"):  # what this machine's own units are is not our affair
        (tmp_path / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_UNIT_PATH": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_elsewhere_there_is_no_service():
    with pytest.raises(HearthError, match="win32"):
        unit_of(settings(), "win32", HOME, COMMAND)
