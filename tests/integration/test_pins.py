"""What clients pin stays within their share, and the disk within its cap, whoever asks for what."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache import maintenance
from runtime.cache.maintenance import (
    StoreLimits,
    keep_within_caps,
    most_pinned,
    pinned_by,
    pinned_bytes,
)
from runtime.cache.store_opening import open_store
from runtime.keys import owned
from store import slots
from store.disk import disk_bytes
from store.types import SlotRow
from tests.running_server import RunningServer, running
from tests.slot_samples import publish_sample
from tests.waiting import until

CAP_BYTES = 4_000_000
TENANTS = ("", "a", "b")

asked = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.booleans(), st.sampled_from((3000, 20_000))),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=10)
@given(asks=asked, most=st.one_of(st.none(), st.integers(1, CAP_BYTES)))
def test_disk_and_pins_are_within_their_caps_whatever_is_pinned(
    asks: list[tuple[str, bool, int]], most: int | None
):
    limits = StoreLimits(CAP_BYTES, 0, 1e9, most, len(TENANTS))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "kv", None)
        list(maintenance.tidy(store, limits))
        try:
            for number, (tenant, is_pinned, num_tokens) in enumerate(asks, 1):
                path = publish_sample(store.root, number, num_tokens=num_tokens)
                row = SlotRow(slots.read_header(path), disk_bytes(path), store.clock.now_s())
                store.index.insert([row]).result()
                if is_pinned:
                    source = owned(tenant, f"prewarm-{number:03x}")
                    store.index.pin(row.header.model, row.header.end_hash, source).result()
                list(keep_within_caps(store, limits))
                assert maintenance.usage_of(store).fast_bytes <= CAP_BYTES
                for one in TENANTS:
                    pinned = pinned_bytes(store, pinned_by(store, one))
                    assert pinned <= most_pinned(store, limits)
        finally:
            store.close()


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


def bytes_on_disk(home: Path) -> int:
    return sum(disk_bytes(path) for path in (home / "kv").rglob("*") if path.is_file())
