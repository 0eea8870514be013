"""The event loop does not wait for the interpreter where other threads compute."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.running_server import started
from tests.tiny_models import write_model

_NOTES = """
import atexit, json, os, sys, threading

opened = []

def note(event, arguments):
    if event == "open" and threading.current_thread() is threading.main_thread():
        opened.append(str(arguments[0]))

def tell():
    with open(os.path.join(os.environ["NOTES"], str(os.getpid())), "w") as file:
        json.dump({"switch_s": sys.getswitchinterval(), "opened": opened}, file)

sys.addaudithook(note)
atexit.register(tell)
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
        worker = server.worker_pid()
        time.sleep(2.5)  # it is looked at twice
        server.stop()
        told = json.loads((notes / str(server.process.pid)).read_text())
    assert told["switch_s"] <= 0.001
    assert f"/proc/{worker}/statm" not in told["opened"]
