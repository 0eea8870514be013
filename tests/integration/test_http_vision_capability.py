"""What is listed of a model's sight: what its files promise, then what was found when it loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import RunningServer, hearth, running
from tests.tiny_tried_vlms import write_tried
from tests.tiny_vlms import write_vlm
from tests.waiting import until

pytest.importorskip("mlx_vlm")

NO_PLACE = "its chat template does not show where an image is"
BEFORE = {
    "known": ("yes", None),
    "tried": ("untried", None),
    "muted": ("untried", None),
    "paligemma": ("no", "its prompts attend to themselves in both directions"),
}
AFTER = BEFORE | {"tried": ("yes", None), "muted": ("no", NO_PLACE)}


def listed(server: RunningServer) -> dict[str, tuple[str, str | None]]:
    """What the lists say, which is the same in all of them."""
    cards = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    names = BEFORE.keys()
    told: list[Any] = json.loads(hearth("models", "--json", HEARTH_PORT=str(server.port)).stdout)
    assert {one["id"]: one["vision"] for one in told if one["id"] in names} == {
        name: cards[name]["vision"] for name in names
    }
    for name in names:
        shown = server.post("/api/show", {"model": name}).json()
        for capabilities in (cards[name]["capabilities"], shown["capabilities"]):
            assert ("vision" in capabilities) == (cards[name]["vision"] != "no"), name
    return {name: (cards[name]["vision"], cards[name].get("vision_reason")) for name in names}


def vision_of(server: RunningServer, name: str) -> str:
    return str(server.get(f"/v1/models/{name}").json()["vision"])


async def test_what_was_found_out_about_sight_is_listed_and_remembered(tmp_path: Path):
    models = tmp_path / "models"
    write_vlm(models / "known", "qwen3_vl")
    for name, kind in (("tried", "pixtral"), ("muted", "idefics3"), ("paligemma", "paligemma")):
        write_tried(models / name, kind)
    template = models / "muted" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>", ""))
    config = f'models_dir = "{models}"\npreload = []\nmax_loaded_models = 1\n'
    with running(tmp_path / "home", config=config) as server:
        assert listed(server) == BEFORE
        for name in ("tried", "muted"):
            assert server.request("POST", f"/admin/models/{name}/load").status_code == 200
        assert listed(server) == AFTER
        text = hearth("models", HEARTH_PORT=str(server.port)).stdout
        assert {"yes", "no"} < set(text.split())
    with running(tmp_path / "home", config=config) as server:
        await until(lambda: vision_of(server, "tried") == "yes", "what the one before found out")
        assert listed(server) == AFTER
        assert server.get("/running").json()["models"] == []
        write_tried(models / "muted", "pixtral")

        def is_seen_anew() -> bool:
            assert server.get("/v1/models/none").status_code == 404, "so the disk is looked at"
            return vision_of(server, "muted") == "untried"

        await until(is_seen_anew, "other files of that name")
