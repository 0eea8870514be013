"""What is deleted is gone, and no other conversation computes a token more for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from runtime.cache.contents import KvContents
from runtime.cache.service import KvStore
from runtime.cache.views import ConversationView
from runtime.config.settings import ModelSettings
from runtime.supervisor.generation import Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, ChatPrompt, Message, Thinking, Usage
from tests.asking import answer, request, script, supervising_with_store, worker_of
from tests.kept_turns import turns_below
from tests.tiny_models import CHAT_TEMPLATE, write_model
from tests.waiting import until

BLOCK = 32
SLOW = """\
{%- for message in messages if message.content.startswith('qvslow') -%}
    {%- for i in range(25) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- endfor -%}
"""
WORDS = "the quick brown fox jumps over the lazy dog while rain falls on the hearth " * 20


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "m"
    write_model(model)
    (model / "chat_template.jinja").write_text(SLOW + CHAT_TEMPLATE)
    return tmp_path


class Talk:
    """A client that drops thoughts, as most do."""

    def __init__(
        self,
        topic: str,
        session: str | None,
        messages: tuple[Message, ...] = (),
        *,
        model: str = "m",
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> None:
        self.topic, self.session, self.messages = topic, session, messages
        self.model, self.tenant, self.ttl_s = model, tenant, ttl_s

    def forked(self, session: str | None, *, model: str = "m", ttl_s: float | None = None) -> Talk:
        return Talk(self.topic, session, self.messages, model=model, ttl_s=ttl_s)

    def asked(self, question: str) -> ChatPrompt:
        user = Message(role="user", text=f"{self.topic} {question} {WORDS}")
        return ChatPrompt(messages=(*self.messages, user), thinking=Thinking(is_enabled=True))

    def took(self, prompt: ChatPrompt, text: str) -> None:
        self.messages = (*prompt.messages, Message(role="assistant", text=text))


class Home:
    """One model's conversations, and how they are deleted."""

    def __init__(self, home: Path, supervisor: Supervisor, kv: KvStore) -> None:
        self.root, self.supervisor, self.kv = home / "kv", supervisor, kv
        self.contents = KvContents(kv, kv.settings)
        self.tokenizer = Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))

    def submit(self, talk: Talk, prompt: ChatPrompt, thought: str = "let me see") -> Generation:
        words = f"{thought}</think>while rain falls<|im_end|>"
        return self.supervisor.submit(
            request(
                prompt,
                model=talk.model,
                sampling=script(self.tokenizer.encode(words, add_special_tokens=False).ids),
                cache=CacheParams(session_id=talk.session, tenant=talk.tenant, ttl_s=talk.ttl_s),
            )
        )

    async def say(self, talk: Talk, question: str = "go on") -> Usage:
        prompt = talk.asked(question)
        said = await answer(self.submit(talk, prompt))
        assert said.reasoning == "let me see"
        talk.took(prompt, said.text)
        usage = said.finished.usage
        if talk.ttl_s == 0:
            return usage
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens - 1
        num_kept = num_tokens - num_tokens % BLOCK  # the rest is when its model rests
        await until(lambda: self._is_kept(talk.model, num_kept), "it is on disk")
        return usage

    def _is_kept(self, model: str, num_tokens: int) -> bool:
        """So much was asked by this name, and has a head."""
        return any(one.model == model and one.num_tokens >= num_tokens for one in self.kept())

    def kept(self) -> list[ConversationView]:
        if self.kv.store is None:
            return []
        inventory = self.kv.inventory(on_disk=True)
        return [inventory.view(one) for one in inventory.conversations()]

    async def delete(self, name: str) -> None:
        await self.contents.remove(await self.contents.named(name))

    @contextmanager
    def worker_held(self) -> Generator[None]:
        """Its worker reads nothing meanwhile."""
        pid = worker_of(self.supervisor).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @property
    def turns(self) -> int:
        """All that heads on disk have."""
        return len(turns_below(self.root))


@asynccontextmanager
async def at_home(home: Path) -> AsyncGenerator[Home]:
    models = {"m": ModelSettings(context=16_384)}
    async with supervising_with_store(home, models=models, kv_disk=True, block_size=BLOCK) as found:
        yield Home(home, *found)


def check_reused(before: Usage, after: Usage) -> None:
    """All that was in the conversation before is there again, thoughts included."""
    num_before = before.num_prompt_tokens + before.num_output_tokens
    assert after.num_cached_tokens >= num_before - 2
    assert [one.rule for one in after.prompt_changes] == ["healed_turn"]


async def test_an_unnamed_conversation_is_deleted_alone(home: Path):
    async with at_home(home) as here:
        one, other = Talk("stone", None), Talk("kettle", None)
        for talk in (one, other):
            await here.say(talk)
            last = await here.say(talk)
        mine = min(here.kept(), key=lambda view: view.last_used_s)
        await until(lambda: here.turns == 4, "all turns are on disk")
        await here.delete(mine.id)
        assert here.turns == 2
        check_reused(last, await here.say(other))


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_session_that_goes_on_under_a_new_id_keeps_its_past(home: Path, is_restarted: bool):
    source = Talk("stone", "source")
    async with at_home(home) as here:
        await here.say(source)
        await here.say(source)
        fork = source.forked("fork")
        last = await here.say(fork)
        await here.say(source, "elsewhere")
        await until(lambda: here.turns == 4, "all turns are on disk")
        if not is_restarted:
            await here.delete("source")
            assert here.turns == 3
            check_reused(last, await here.say(fork))
            await here.delete("fork")
            assert here.turns == 0
    if is_restarted:
        async with at_home(home) as here:
            await until(lambda: here.kv.store is not None, "the store is open")
            await here.delete("source")
            assert here.turns == 3
            check_reused(last, await here.say(fork))


async def test_a_fork_that_was_not_asked_yet_keeps_what_it_has_of_its_source(home: Path):
    async with at_home(home) as here:
        source = Talk("stone", "source")
        await here.say(source)
        last = await here.say(source)
        end = last.num_prompt_tokens + last.num_output_tokens
        fork = source.forked("fork")
        await here.say(source, "further")
        await until(lambda: here.turns == 3, "all turns are on disk")
        await here.contents.branch("source", "fork", {"m": end})
        await here.delete("source")
        assert here.turns == 2
        after = await here.say(fork)
        assert [one.num_places for one in after.prompt_changes] == [2]
        assert after.num_cached_tokens >= last.num_prompt_tokens - 8


async def test_answers_that_look_the_same_are_both_found(home: Path):
    """Two sessions are asked the same and answered the same, after other thoughts."""
    async with at_home(home) as here:
        talks = [Talk("stone", name) for name in ("one", "two")]
        wholes: list[Usage] = []
        for talk, thought in zip(talks, ("let me see", "the quick brown fox"), strict=True):
            prompt = talk.asked("go on")
            said = await answer(here.submit(talk, prompt, thought))
            assert said.reasoning == thought
            talk.took(prompt, said.text)
            wholes.append(said.finished.usage)
        added: set[int] = set()
        for talk, before in zip(talks, wholes, strict=True):
            after = await here.say(talk)
            check_reused(before, after)
            added.add(after.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens)
        assert len(added) == 1, "each goes on from its own thoughts"


@pytest.mark.parametrize("names", [("gone", "stays"), (None, None), (None, "stays")])
async def test_what_is_still_being_read_when_its_conversation_is_deleted_is_not_kept(
    home: Path, names: tuple[str | None, str | None]
):
    async with at_home(home) as here:
        gone, stays = Talk("qvslow", names[0]), Talk("kettle", names[1])
        await here.say(gone)
        (mine,) = here.kept()
        last = [await here.say(stays) for _ in range(2)][-1]
        await until(lambda: len(here.kept()) == 2, "what was there of the first turn is replaced")
        before = [one.id for one in here.kept() if one.id != mine.id]
        with here.worker_held():  # it finds both in its pipe, so it is told while it reads
            asked = here.submit(gone, gone.asked("go on"))
            await until(lambda: worker_of(here.supervisor).num_running, "its worker has it")
            deletion = asyncio.create_task(here.delete(mine.id))
            await until(lambda: here.kv.receive().number, "it has a number")
        await deletion
        usage = (await answer(asked)).finished.usage
        assert (usage.cache.reason, usage.cache.num_durable) == ("deleted", 0)
        assert [one.id for one in here.kept()] == before
        check_reused(last, await here.say(stays))
        await until(lambda: len(here.kept()) == 1, "it has one entry")
        # Who asks after that begins anew.
        assert (await here.say(Talk("qvslow", names[0]))).num_cached_tokens < BLOCK
        await until(lambda: here.turns == 4, "three of the one that stays, one that is new")
