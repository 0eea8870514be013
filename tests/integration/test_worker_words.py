"""A worker that prints what it was asked, and dies of it: nobody finds the words afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.running_server import CHAT, running, streaming
from tests.waiting import until

CANARY = "zebraharbour7351"
TALKER = """
import os, sys, threading

def talk(home):
    while not os.path.exists(f"{home}/die"):
        print("worker printed {canary}", "{canary}", sep="\\n", flush=True)
        threading.Event().wait(0.05)
    os.remove(f"{home}/die")
    try:
        raise RuntimeError("a library quotes {canary}")
    finally:
        threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), None]))
        os.abort()

if "runtime.worker" in sys.orig_argv:
    threading.Thread(target=talk, args=(os.environ["TALKER_HOME"],), daemon=True).start()
"""
"""What Python imports in each of its processes, as an operator's own `sitecustomize` would be."""


async def test_no_word_of_a_worker_is_kept_when_it_prints_and_crashes_with_a_prompt(
    tmp_path: Path, models_dir: Path
):
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    (site / "sitecustomize.py").write_text(TALKER.replace("{canary}", CANARY))
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\nlog_level = "debug"\n'
    variables = {"PYTHONPATH": str(site), "TALKER_HOME": str(home)}
    body = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3000}
    with running(home, config=config, **variables) as server:
        async with streaming(server, CHAT, body | {"ignore_eos": True}) as stream:
            for _ in range(3):
                await stream.next_event()
            (home / "die").touch()
            events = await stream.rest()
        assert events[-1] == "[DONE]"  # another worker went on with it

        def listed() -> list[Any]:
            return server.get("/admin/crashes").json()["crashes"]

        await until(listed, "the record")
        detail = server.get(f"/admin/crashes/{listed()[0]['id']}")
        record = detail.json()
        assert "RuntimeError" in record["stderr"]
        assert any("lines withheld" in line for line in record["stderr"])
        assert any("sitecustomize.py" in line for line in [*record["stderr"], *record["stacks"]])
        said = [detail.text, server.stderr]
        said += [server.get(path).text for path in ("/metrics", "/running", "/health/ready")]
        said += [file.read_text() for file in (home / "crashes").iterdir()]
        assert not [text for text in said if CANARY in text]
