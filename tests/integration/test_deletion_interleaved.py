"""What a user deletes is gone and stays gone, whatever was under way when it was deleted.

A real server's parts, its workers and its store are asked, and told to delete, in any order; what
was asked goes on meanwhile: it waits for its model, its prompt is read, it is answered, or it is
being written. Beside them is a list of who said what, and when what was deleted.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from api.http.chains import Chains
from api.http.kv_access import KvAccess
from runtime.cache.contents import KvContents
from runtime.cache.history import History
from runtime.cache.service import KvStore
from runtime.cache.tending import inventory_of
from runtime.config.settings import ModelSettings, Settings
from runtime.errors import UnknownConversation
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.supervisor.generation import Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, ChatPrompt, Message, Usage
from store.block_names import pack_ids
from tests.asking import answer, request, script, supervising_with_store
from tests.living_history import living
from tests.tiny_models import CHAT_TEMPLATE, write_model
from tests.waiting import until

BLOCK = 16
MODELS = ("m", "n")
SLOW = """\
{%- for message in messages if 'qvslow' in message.content -%}
    {%- for i in range(3) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- endfor -%}
"""
Phase = Literal["sent", "taken", "spoken", "answered", "kept"]
PHASES: tuple[Phase, ...] = ("sent", "taken", "spoken", "answered", "kept")


class Ask(NamedTuple):
    """A turn of a conversation, a new one if there is none of the number; what follows is done
    when it has got so far. With `forks` it begins another one with the same past.
    """

    talk: int
    phase: Phase
    is_named: bool = False
    is_long: bool = False
    is_slow: bool = False
    forks: bool = False
    model: int = 0


class Delete(NamedTuple):
    """One conversation, all of a model, or everything."""

    what: Literal["one", "model", "all"]
    number: int = 0


class Restart(NamedTuple):
    """When all is answered."""


Step = Ask | Delete | Restart
NUMBERS = st.integers(0, 3)
ASKS = st.builds(
    Ask,
    NUMBERS,
    st.sampled_from(PHASES),
    is_named=st.booleans(),
    is_long=st.booleans(),
    is_slow=st.booleans(),
    forks=st.integers(0, 3).map(lambda one: one == 0),
    model=st.integers(0, 3).map(lambda one: int(one == 0)),
)
DELETIONS = st.builds(Delete, st.sampled_from(["one", "one", "one", "model", "all"]), NUMBERS)
STEPS = st.lists(
    st.integers(0, 15).flatmap(
        lambda one: st.just(Restart()) if not one else ASKS if one % 3 else DELETIONS
    ),
    min_size=3,
    max_size=8,
)


@dataclass(eq=False)
class Turn:
    """One request, and all words that are in it or will be. `may_go` where a deletion leaves open
    whether it is of what was deleted: it branched off, and nothing of that was kept yet.
    """

    words: tuple[str, ...]
    is_deleted: bool = False
    may_go: bool = False
    asked: asyncio.Task[None] | None = None
    usage: Usage | None = None


@dataclass(eq=False)
class Talk:
    """What a client has, and what it asked."""

    name: str | None
    model: str
    messages: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list[Turn])
    source: Talk | None = None

    @property
    def words(self) -> tuple[str, ...]:
        return self.turns[-1].words

    @property
    def is_kept(self) -> bool:
        """A turn of its own was answered, and not deleted since."""
        return any(one.usage is not None and not one.is_deleted for one in self.turns)


class Interleaving:
    """A client of everything, who remembers."""

    numbers = count()

    def __init__(self, home: Path, history: History, supervisor: Supervisor, kv: KvStore) -> None:
        self.root, self.supervisor, self.kv = home / "kv", supervisor, kv
        chosen = Settings(home=home)
        catalog = Catalog(chosen, hub_cache=home / "hub")
        prewarm = Prewarm(chosen, supervisor, kv, lambda _: ())
        stored = Chains(history, chosen, kv.is_deleted)
        self.access = KvAccess(catalog, kv, KvContents(kv, chosen), prewarm, stored)
        self.tokenizer = Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))
        self.talks: list[Talk] = []
        self.probed: set[str] = set()

    # What is done

    async def do(self, step: Step) -> None:
        match step:
            case Ask():
                await self.ask(step)
            case Delete("all"):
                await self.access.remove_all()
                self.deleted(lambda _: True)
            case Delete("model"):
                model = MODELS[step.number % 2]
                await self.access.remove_model(model)
                self.deleted(lambda talk: talk.model == model)
            case Delete():
                if self.talks:
                    await self.delete(self.talks[step.number % len(self.talks)])
            case Restart():
                raise AssertionError("whoever has the server does that")

    async def ask(self, step: Ask) -> None:
        talk = self.talk_of(step)
        if talk.turns and talk.turns[-1].asked is not None and not step.forks:
            await talk.turns[-1].asked  # its client knows the answer before it goes on
        number = next(self.numbers)
        word = "".join(random.Random(number).choices("bcdfghjklmnpqrstvwxz", k=24))
        slow = "qvslow " if step.is_slow else ""
        text = f"{slow}{word} {'the quick brown fox jumps ' * (12 if step.is_long else 1)}"
        prompt = ChatPrompt(messages=(*talk.messages, Message(role="user", text=text)))
        turn = Turn((*(talk.words if talk.turns else self.past(talk)), word))
        said = self.said(48 if step.is_long else 6)
        generation = self.supervisor.submit(
            request(
                prompt,
                model=talk.model,
                max_tokens=len(said),
                sampling=script(said),
                cache=CacheParams(session_id=talk.name),
            )
        )
        talk.turns.append(turn)
        turn.asked = asyncio.create_task(self.heard(talk, turn, prompt, generation))
        match step.phase:
            case "sent":
                pass
            case "taken":
                await generation.accepted()
            case "spoken":
                await until(
                    lambda: generation.num_output_tokens or generation.is_finished,
                    "it says something",
                )
            case "answered":
                await turn.asked
            case "kept":
                await turn.asked
                await self.quiet()

    def talk_of(self, step: Ask) -> Talk:
        there = self.talks[step.talk] if step.talk < len(self.talks) else None
        if there is not None and not step.forks:
            return there
        name = f"talk {next(self.numbers)}" if step.is_named else None
        talk = Talk(name, MODELS[step.model])
        if there is not None and step.forks and there.messages:
            talk = Talk(name, there.model, there.messages, source=there)
        self.talks.append(talk)
        return talk

    def past(self, talk: Talk) -> tuple[str, ...]:
        """The words of what it was given of another one."""
        text = " ".join(message.text for message in talk.messages)
        known = (word for one in self.talks for turn in one.turns for word in turn.words)
        return tuple(dict.fromkeys(word for word in known if word in text))

    def said(self, num_tokens: int) -> list[int]:
        """Tokens that are letters, so that any client gives them back."""
        vocabulary = self.tokenizer.get_vocab()
        plain = sorted(
            number for word, number in vocabulary.items() if word.isalpha() and word.isascii()
        )
        return plain[:num_tokens]

    async def heard(
        self, talk: Talk, turn: Turn, prompt: ChatPrompt, generation: Generation
    ) -> None:
        said = await answer(generation)
        talk.messages = (*prompt.messages, Message(role="assistant", text=said.text))
        turn.usage = said.finished.usage

    async def delete(self, talk: Talk) -> None:
        """By its name, or by its id in the list, if it is there and this one's alone."""
        while (name := talk.name or await self.id_of(talk)) is not None:
            try:
                await self.access.remove_conversation(name)
            except UnknownConversation:
                if talk.name is None:  # it went on, and is listed otherwise
                    continue
                for turn in talk.turns:  # nothing of it was kept yet
                    turn.may_go = True
                return
            break
        else:
            return
        self.deleted(lambda one: one is talk)
        for other in self.talks:
            if talk.name is None and other.name is None and other.model == talk.model:
                shares = bool(other.turns) and other.words[0] == talk.words[0]
                for turn in (
                    other.turns if shares and other is not talk and not other.is_kept else ()
                ):
                    turn.may_go = True

    async def id_of(self, talk: Talk) -> str | None:
        """Of a chain that has what only this conversation said."""
        own = set(talk.words) - {
            w for o in self.talks if o is not talk and o.turns for w in o.words
        }

        def ids() -> list[str]:
            store = self.kv.store
            assert store is not None
            chains = [one for one in inventory_of(store).conversations() if not one.is_named]
            said = {one.id: store.heads.read(one.last.head.id).token_ids for one in chains}
            return [i for i, ids in said.items() if any(self.holds(ids, word) for word in own)]

        found = await asyncio.to_thread(ids)
        return found[0] if len(found) == 1 else None

    def deleted(self, is_meant) -> None:
        for talk in filter(is_meant, self.talks):
            for turn in talk.turns:
                turn.is_deleted = True

    async def settle(self) -> None:
        for talk in self.talks:
            for turn in talk.turns:
                if turn.asked is not None:
                    await turn.asked
        await self.quiet()

    async def quiet(self) -> None:
        """All that is on its way to the disk is there: another one that came later is."""
        for model in (one.spec.id for one in self.supervisor.status() if one.is_loaded):
            last = Talk(f"last {next(self.numbers)}", model)
            self.talks.append(last)
            await self.ask(Ask(len(self.talks) - 1, "answered"))
            [turn] = last.turns
            assert last.name is not None
            await until(
                lambda word=turn.words[0]: self.is_whole(word), f"it is kept: {self.kv.status}"
            )

    # What is there

    def ids_of(self, word: str) -> array[int]:
        """Tokens of a word that are the same whatever is around it."""
        return array("I", self.tokenizer.encode(f" {word} ", add_special_tokens=False).ids[3:-3])

    def holds(self, ids: Sequence[int], word: str) -> bool:
        return self.ids_of(word).tobytes() in pack_ids(ids)

    def files_with(self, word: str) -> list[Path]:
        needle = self.ids_of(word).tobytes()
        while True:
            with suppress(FileNotFoundError):  # what was renamed meanwhile is looked for again
                paths = [path for path in self.root.rglob("*") if path.is_file()]
                return [path for path in paths if needle in path.read_bytes()]

    def is_whole(self, word: str) -> bool:
        """It is in a head, and all queued before it was written as well."""
        heads = self.root / "heads"
        return any("tmp" not in one.name and heads in one.parents for one in self.files_with(word))

    # What must be so

    async def check(self) -> None:
        turns = [(talk, turn) for talk in self.talks for turn in talk.turns]
        for _, turn in turns:
            for word in turn.words:
                holders = [one for _, one in turns if word in one.words]
                if all(one.is_deleted and not one.may_go for one in holders):
                    left = await asyncio.to_thread(self.files_with, word)
                    assert not left, f"{word} was deleted: {left}"
        for talk in sorted(self.talks, key=lambda one: one.model):
            if talk.turns and talk.turns[-1].usage is not None:
                await self.probe(talk)

    async def probe(self, talk: Talk) -> None:
        """What is found of it: all that it said since it was deleted, nothing of what went."""
        [*past, _] = talk.messages
        last = talk.turns[-1]
        assert last.usage is not None
        sharing = [
            one
            for other in self.talks
            for one in other.turns
            if other.model == talk.model and set(one.words) & set(last.words)
        ]
        probing = request(
            ChatPrompt(messages=tuple(past)),
            model=talk.model,
            max_tokens=1,
            cache=CacheParams(session_id=talk.name, ttl_s=0.0),
        )
        usage = (await answer(self.supervisor.submit(probing))).finished.usage
        is_first = not self.probed & set(last.words)  # what was looked at is in memory since
        self.probed |= set(last.words)
        if is_first and all(one.is_deleted and not one.may_go for one in sharing):
            assert usage.num_cached_tokens < BLOCK, f"{talk.name} was deleted"
        elif not last.is_deleted and not last.may_go:
            num_before = last.usage.num_prompt_tokens
            assert usage.num_cached_tokens >= num_before - 2 * BLOCK, f"{talk.name} was not deleted"


class Server:
    """One that goes on from example to example, unless one restarts it or fails."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._here: Interleaving | None = None

    def run(self, steps: list[Step]) -> None:
        try:
            self.runner.run(self._run(steps))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._here = None
        self.runner.run(self._stack.aclose())

    async def _run(self, steps: list[Step]) -> None:
        here = await self._opened()
        here.talks = []
        await here.access.remove_all()
        for step in steps:
            if isinstance(step, Restart):
                await here.settle()
                await self._stack.aclose()
                self._here, talks = None, here.talks
                here = await self._opened()
                here.talks = talks
            else:
                await here.do(step)
        await here.settle()
        await here.check()

    async def _opened(self) -> Interleaving:
        if self._here is None:
            self._here = await self._stack.enter_async_context(opened(self.home))
        return self._here


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[Interleaving]:
    models = {name: ModelSettings(context=8_192) for name in MODELS}
    async with supervising_with_store(home, models=models, kv_disk=True, block_size=BLOCK) as found:
        await found[1].settled()
        async with living(home) as history:
            yield Interleaving(home, history, *found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    home = tmp_path_factory.mktemp("interleaved")
    for seed, name in enumerate(MODELS):
        folder = home / "models" / name
        write_model(folder, seed=seed)
        (folder / "chat_template.jinja").write_text(SLOW + CHAT_TEMPLATE)
    one = Server(home)
    yield one
    one.close()
    one.runner.close()


@pytest.mark.timeout(600)
@settings(
    max_examples=settings().max_examples // 5,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(STEPS)
@example([Ask(0, "kept"), Ask(0, "sent", is_slow=True), Delete("one")])
@example([Ask(0, "kept"), Ask(0, "spoken", is_long=True), Delete("one")])
@example([Ask(0, "kept"), Ask(0, "answered", is_long=True), Delete("one")])
@example([Ask(0, "kept"), Ask(1, "spoken", is_long=True, model=1), Ask(0, "sent"), Delete("one")])
def test_what_is_deleted_is_gone_whatever_is_under_way(server: Server, steps: list[Step]):
    server.run(steps)
