"""KV survives what servers and workers go through: nobody pays twice for the same tokens."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conversation import CANARY, CODE, Conversation, Reply, wait_until_saved
from tests.running_server import RunningServer, running
from tests.waiting import until

KV_BYTES_PER_TOKEN = 5120
TAIL_TOKENS = 80
"""What may be computed again: the last question and the template around it."""

COMES_BACK = 'default_model = "hearth-tiny"\n'
CONFIG = COMES_BACK + "prewarm_share = 0\nmax_loaded_models = 1\n"
"""Nothing comes back into memory unasked, so that each answer shows the way from the disk."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def conversation(home: Path) -> Conversation:
    """8k tokens that a server has answered and saved, before it was killed."""
    return begun(home, num_sentences=300, num_tokens=8000)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Conversation]:
    """The same of 1k tokens, and its home."""
    home = tmp_path_factory.mktemp("short")
    return home, begun(home, num_sentences=40, num_tokens=1000)


def begun(home: Path, num_sentences: int, num_tokens: int) -> Conversation:
    conversation = Conversation(num_sentences)
    with running(home, config=CONFIG) as server:
        first = conversation.ask(server)
        assert first.num_prompt_tokens >= num_tokens
        assert (first.tier, first.num_cached_tokens) == ("none", 0)
        assert CODE in first.text
        wait_until_saved(server, first.num_prompt_tokens)
        kill(server)
    return conversation


def kill(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def check(reply: Reply, tier: str) -> None:
    assert reply.tier == tier
    assert reply.num_missing_tokens <= TAIL_TOKENS
    assert CODE in reply.text


def test_a_short_conversation_goes_on_after_its_server_was_killed(short: tuple[Path, Conversation]):
    check_it_goes_on(*short)


def test_a_conversation_goes_on_after_its_server_was_killed(home: Path, conversation: Conversation):
    check_it_goes_on(home, conversation)


def check_it_goes_on(home: Path, conversation: Conversation) -> None:
    with running(home, config=CONFIG) as server:
        check(conversation.ask(server), "warm")
        reply = conversation.ask(server)
        check(reply, "hot")
        assert server.get("/health/ready").json()["cache"] == "ok"


def test_and_after_it_was_stopped_and_its_worker_was_killed(home: Path, conversation: Conversation):
    with running(home, config=CONFIG) as server:
        reply = conversation.ask(server)
        check(reply, "warm")
        wait_until_saved(server, reply.num_prompt_tokens)
        os.kill(server.worker_pid(), signal.SIGKILL)
        while server.figure("hearth_worker_crashes_total") == 0:
            pass
        check(conversation.ask(server), "warm")
        assert "Traceback" not in server.stderr


async def test_what_is_said_to_be_durable_is_there_after_a_kill(tmp_path: Path):
    conversation = Conversation(num_sentences=40)

    def num_durable(server: RunningServer) -> int:
        query = {"conversation": "s"}
        answer = server.request("GET", "/admin/cache/conversation", params=query)
        return answer.json()["conversation"]["num_durable"] if answer.status_code == 200 else 0

    with running(tmp_path, config=CONFIG) as server:
        conversation.ask(server, session_id="s")
        await until(lambda: num_durable(server) > 0, "something is on disk")
        conversation.ask(server, "And the river?", session_id="s")
        told = num_durable(server)
        kill(server)
    with running(tmp_path, config=CONFIG) as server:
        assert num_durable(server) >= told > 0
        again = conversation.ask(server, "And the boats?", session_id="s")
        assert again.num_cached_tokens >= told - 1


async def test_what_was_used_last_is_back_in_memory_before_it_is_asked_for(
    home: Path, conversation: Conversation
):
    with running(home, config=COMES_BACK) as server:
        num_bytes = 8000 * KV_BYTES_PER_TOKEN
        await until(lambda: server.figure("hearth_kv_hot_bytes") > num_bytes, "it is back")
        check(conversation.ask(server), "hot")


def test_and_after_another_model_was_loaded_meanwhile(
    home: Path, conversation: Conversation, models_dir: Path
):
    with running(home, "--models-dir", str(models_dir), config=CONFIG) as server:
        check(conversation.ask(server), "warm")
        other = Conversation(num_sentences=20)
        assert other.ask(server, model="tiny", max_tokens=4).tier == "none"
        check(conversation.ask(server), "warm")
        assert other.ask(server, model="tiny", max_tokens=4).tier == "warm"


def test_nothing_of_a_short_conversation_is_said_where_it_is_kept(short: tuple[Path, Conversation]):
    check_it_is_private(short[0], num_slots=4)


def test_everything_is_private_and_says_nothing_of_the_prompt(
    home: Path, conversation: Conversation
):
    check_it_is_private(home, num_slots=20)


def check_it_is_private(home: Path, num_slots: int) -> None:
    store = home / "kv"
    paths = [store, *store.rglob("*")]
    assert len([*(store / "slots").rglob("*.safetensors")]) >= num_slots
    assert [*(store / "heads").rglob("*.safetensors")]
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert CANARY not in path.name
    for path in (*store.glob("index.db*"), home / "stderr.txt"):
        content = path.read_bytes()
        assert CANARY.encode() not in content
        assert CODE.encode() not in content


@pytest.mark.soak
def test_weights_replaced_in_place_never_match(tmp_path: Path, models_dir: Path):
    model = tmp_path / "models" / "tiny"
    shutil.copytree(models_dir / "tiny", model)
    conversation = Conversation(num_sentences=40)
    config = f'models_dir = "{model.parent}"\ndefault_model = "tiny"\nprewarm_share = 0\n'
    with running(tmp_path, config=config) as server:
        conversation.ask(server, max_tokens=4)
    with running(tmp_path, config=config) as server:
        assert conversation.ask(server, max_tokens=4).tier == "warm"
    other_weights(model)
    with running(tmp_path, config=config) as server:
        reply = conversation.ask(server, max_tokens=4)
        assert (reply.tier, reply.num_cached_tokens) == ("none", 0)


def other_weights(model: Path) -> None:
    """Change one byte of the weights, keeping size and times."""
    file = model / "model.safetensors"
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    copy = file.with_name("copy")
    copy.write_bytes(data)
    copy.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def slots_in(store: Path) -> set[str]:
    return {path.name for path in (store / "slots").rglob("*.safetensors")}


async def test_two_servers_on_one_store_both_answer(home: Path, conversation: Conversation):
    with running(home, config=CONFIG) as owner:
        check(conversation.ask(owner), "warm")
        second_home = home / "second"
        with running(second_home, "--kv-dir", str(home / "kv"), config=CONFIG) as second:

            def is_locked_out() -> bool:
                ready = second.get("/health/ready").json()
                return (ready["cache"], ready["cache_reason"]) == ("degraded", "locked")

            await until(is_locked_out, "the store is found to be another's")
            short = Conversation(num_sentences=5)
            assert short.ask(second).tier == "none"
            assert short.ask(second).tier == "hot"
            check(conversation.ask(owner), "hot")


def test_a_ttl_of_zero_leaves_nothing_on_disk(tmp_path: Path):
    with running(tmp_path, config=CONFIG + "kv_ttl_s = 0\n") as server:
        conversation = Conversation(num_sentences=30)
        conversation.ask(server)
        assert conversation.ask(server).tier == "hot"
    assert slots_in(tmp_path / "kv") == set()


async def test_what_was_written_is_scrubbed_and_metrics_say_so(tmp_path: Path):
    with running(tmp_path, config=CONFIG) as server:
        reply = Conversation(num_sentences=30).ask(server)
        assert server.figure("hearth_cache_requests_total", tier="none") == 1
        assert server.figure("hearth_cache_misses_total", reason="first_seen") == 1
        scrubbed, computed = "hearth_kv_scrubbed_bytes_total", "hearth_kv_computed_tokens_total"
        # Soon after the start; five minutes later where the machine was too busy for it then.
        await until(lambda: server.figure(scrubbed) > 0, "what is new has been read again", 330)
        num_computed = reply.num_prompt_tokens - 1
        await until(lambda: server.figure(computed) == num_computed, "all of it is counted")


async def test_jobs_end_what_nobody_uses_and_metrics_say_so(tmp_path: Path):
    config, evicted = CONFIG + "kv_ttl_s = 0.5\n", "hearth_kv_evictions_total"
    with running(tmp_path, config=config) as server:
        Conversation(num_sentences=30).ask(server)
        num_expired = server.figure(evicted, reason="expired")  # already, on a busy machine

    def is_over(server: RunningServer) -> bool:
        return num_expired + server.figure(evicted, reason="expired") > 0

    with running(tmp_path, "--preload", "", config=config) as server:
        await until(lambda: is_over(server), "its time is over")
    assert slots_in(tmp_path / "kv") == set()
