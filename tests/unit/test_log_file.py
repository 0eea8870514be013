"""The log file that makes room for itself."""

from __future__ import annotations

import stat
from pathlib import Path

from api.observe.log_output import NUM_OLD, RotatingFile


def test_a_log_file_stays_small_keeps_the_last_lines_and_is_ours_alone(tmp_path: Path):
    path = tmp_path / "logs" / "hearth.log"
    log = RotatingFile(path, max_bytes=1000)
    for number in range(1000):
        log.write(f"line {number:04d} of what happened\n")
    files = sorted(path.parent.iterdir())
    assert len(files) == NUM_OLD + 1
    assert all(file.stat().st_size <= 1000 for file in files)
    assert path.read_text().splitlines()[-1] == "line 0999 of what happened"
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
