"""What was answered and lost before it was on disk: the next request is told so, and only then."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conversation import Conversation, Reply, wait_until_saved
from tests.crash.server_store import kill
from tests.running_server import RunningServer, running
from tests.waiting import until

CONFIG = 'default_model = "hearth-tiny"\nprewarm_share = 0\n'
FULL = CONFIG + 'cache_max_bytes = "1MB"\n'
"""No slot has room on disk: whatever is answered is in memory only, and stays to be written."""

ONE_WRITE = CONFIG + "kv_daily_write_bytes = 1\n"


def said_again(server: RunningServer, conversation: Conversation, **fields: Any) -> Reply:
    """The same question as before."""
    del conversation.messages[-2:]
    return conversation.ask(server, **fields)


def noted(home: Path) -> int:
    """How many rows say of anything that it is not on disk, or was not."""
    with closing(sqlite3.connect(f"file:{home}/kv/index.db?mode=ro", uri=True)) as index:
        return index.execute("SELECT count(*) FROM unpublished").fetchone()[0]


def view_of(server: RunningServer, session_id: str) -> dict[str, Any]:
    query = {"conversation": session_id}
    answer = server.request("GET", "/admin/cache/conversation", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["conversation"]


@pytest.mark.parametrize("num_sentences", [1, 40], ids=["within a block", "blocks"])
async def test_what_was_not_on_disk_when_its_process_was_killed_is_missed_for_that(
    tmp_path: Path, num_sentences: int
):
    conversation = Conversation(num_sentences)
    with running(tmp_path, config=FULL) as server:
        assert conversation.ask(server).reason == "first_seen"
        os.kill(server.worker_pid(), signal.SIGKILL)
        await until(lambda: server.figure("hearth_worker_crashes_total"), "its end was noticed")
        assert said_again(server, conversation).reason == "not_yet_durable"
        assert said_again(server, conversation).tier == "hot"
        kill(server)
    with running(tmp_path, config=CONFIG) as server:
        again = said_again(server, conversation)
        assert (again.reason, again.num_cached_tokens) == ("not_yet_durable", 0)
        other = Conversation(num_sentences)
        other.messages[1]["content"] = "Another story."
        assert other.ask(server).reason in ("first_seen", "diverged")
        wait_until_saved(server, again.num_prompt_tokens)
        await until(lambda: not noted(tmp_path), "nothing is missing on disk")
        kill(server)
    with running(tmp_path, config=CONFIG) as server:
        again = said_again(server, conversation)
        assert (again.reason, again.tier) == (None, "warm")
        assert not noted(tmp_path)


async def test_a_conversation_is_durable_to_where_it_says_and_the_rest_is_missed_after_a_kill(
    tmp_path: Path,
):
    conversation = Conversation(num_sentences=40)
    with running(tmp_path, config=ONE_WRITE) as server:
        first = conversation.ask(server, session_id="s")
        await until(lambda: "daily_writes_used_up" in server.stderr, "nothing more is written")
        wait_until_saved(server, first.num_prompt_tokens - 1)
        second = conversation.ask(server, "And the river?", session_id="s")
        view = view_of(server, "s")
        assert not view["is_durable"]
        assert first.num_prompt_tokens - 1 <= view["num_durable"] < second.num_prompt_tokens
        assert view["num_tokens"] > second.num_prompt_tokens
        kill(server)
    with running(tmp_path, config=CONFIG) as server:
        assert view_of(server, "s")["num_durable"] == view["num_durable"]
        third = conversation.ask(server, "And the boats?", session_id="s")
        assert third.reason == "not_yet_durable"
        assert view["num_durable"] - 1 <= third.num_cached_tokens <= view["num_durable"]
        await until(lambda: view_of(server, "s")["is_durable"], "all of it is on disk")
        assert view_of(server, "s")["num_tokens"] > third.num_prompt_tokens
        assert not noted(tmp_path)


def test_what_is_deleted_is_not_even_known_to_have_been_lost(tmp_path: Path):
    mine, other = Conversation(num_sentences=40), Conversation(num_sentences=20)
    with running(tmp_path, config=FULL) as server:
        mine.ask(server, session_id="mine")
        kill(server)
    with running(tmp_path, config=FULL) as server:
        said_again(server, mine, session_id="mine")
        other.ask(server, session_id="other")
        assert noted(tmp_path) > 0
        query = {"conversation": "mine"}
        gone = server.request("DELETE", "/admin/cache/conversations", params=query)
        assert gone.status_code == 200, gone.text
        kill(server)
    with running(tmp_path, config=FULL) as server:
        assert said_again(server, other).reason == "not_yet_durable"
        assert said_again(server, mine).reason in ("first_seen", "diverged")
        kill(server)
    with running(tmp_path, config=FULL) as server:
        gone = server.request(
            "DELETE", "/admin/cache/conversations", params={"conversation": "other"}
        )
        assert gone.status_code == 200, gone.text
        server.request("DELETE", "/admin/cache/all")
        assert noted(tmp_path) == 0
        assert said_again(server, mine).reason in ("first_seen", "diverged")
