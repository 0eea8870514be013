"""The event loop does not wait for the interpreter where other threads compute."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.running_server import started
from tests.tiny_models import write_model
from tests.waiting import until

_NOTES = """
import os, sys, threading

notes = os.open(
    os.path.join(os.environ["NOTES"], str(os.getpid())), os.O_CREAT | os.O_APPEND | os.O_WRONLY
)

def note(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc/"):
        whose = "loop" if threading.current_thread() is threading.main_thread() else "thread"
        line = f"{sys.getswitchinterval()} {whose} {arguments[0]}\\n"
        os.write(notes, line.encode())

sys.addaudithook(note)
"""


def test_the_loop_gets_the_interpreter_soon_and_seldom_gives_it_away(tmp_path: Path) -> None:
    """Each file that it opens is several such waits, and a worker is looked at each second."""
    notes, home = tmp_path / "notes", tmp_path / "home"
    notes.mkdir()
    (tmp_path / "sitecustomize.py").write_text(_NOTES)
    write_model(home / "models" / "tiny")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    config = 'default_model = "tiny"'
    with started(home, config=config, is_fresh=True, PYTHONPATH=path, NOTES=str(notes)) as server:
        server.wait_until_ready()
        looked_at = f"/proc/{server.worker_pid()}/statm"

        def looks() -> list[list[str]]:
            lines = (notes / str(server.process.pid)).read_text().splitlines()
            return [line.split() for line in lines if line.endswith(looked_at)]

        asyncio.run(until(lambda: len(looks()) >= 2, "its worker is looked at twice"))
        server.stop()
        assert {whose for _, whose, _ in looks()} == {"thread"}
        assert all(float(switch_s) <= 0.001 for switch_s, _, _ in looks())
