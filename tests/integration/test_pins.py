"""What clients pin stays within their share, and the disk within its cap: what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.disk import disk_bytes
from tests.running_server import RunningServer, running
from tests.waiting import until

CONFIG = """
default_model = "hearth-tiny"
cache_max_bytes = "20MB"
prewarm_learned = 0
"""


def announced(server: RunningServer, number: int, num_sentences: int = 75) -> Any:
    text = f"Prompt {number}. " + "On this day the boats stayed in the harbour. " * num_sentences
    return server.post("/v1/prewarm", {"system": text, "pinned": True, "load": True})


async def test_who_has_pinned_his_share_is_told_and_evicts_nobody(tmp_path: Path):
    with running(tmp_path, config=CONFIG) as server:
        refused: list[dict[str, Any]] = []
        for number in range(5):
            response = announced(server, number)
            if response.status_code != 202:
                refused.append(response.json()["error"] | {"status": response.status_code})
                continue
            path = f"/v1/prewarm/{response.json()['id']}"
            await until(lambda path=path: is_over(server, path), "it is warm")
            await until(lambda: is_durable(server), "all of what is pinned is on disk")
        found = {(one["status"], one["code"], one["param"]) for one in refused}
        assert found == {(403, "pins_full", "pinned")}
        assert 1 <= len(refused) <= 4
        await until(lambda: bytes_on_disk(tmp_path) <= 20_000_000, "the cap holds")
        assert server.get("/health/ready").json()["cache"] == "ok"


async def test_what_turns_out_too_large_is_warm_and_says_why_it_is_not_pinned(tmp_path: Path):
    with running(tmp_path, config=CONFIG) as server:
        path = f"/v1/prewarm/{announced(server, 1, 120).json()['id']}"
        await until(lambda: "error" in server.get(path).json(), "it is refused")
        view = server.get(path).json()
        assert not view.get("pinned")
        assert "pinned_max_bytes" in view["error"]
        await until(lambda: is_over(server, path), "it is warm")
        assert server.get(path).json()["status"] == "completed"


def is_over(server: RunningServer, path: str) -> bool:
    return server.get(path).json()["status"] in ("completed", "failed")


def is_durable(server: RunningServer) -> bool:
    views = server.request("GET", "/admin/cache").json()["conversations"]
    return bool(views) and all(view["is_durable"] for view in views)


def bytes_on_disk(home: Path) -> int:
    return sum(disk_bytes(path) for path in (home / "kv").rglob("*") if path.is_file())
