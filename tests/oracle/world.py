"""A home, its server, and the lists of what was said there: asked, listed, deleted, looked for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.oracle.ledger import Ledger, Talk
from tests.oracle.talking import (
    NUM_SAID,
    SETTINGS,
    Answer,
    Sightings,
    Vocabulary,
    check_same,
    files_in,
    flip,
    whole,
    windows,
)
from tests.running_server import RunningServer, running
from tests.waiting import until

ADMIN = "the-admin-key"


class World:
    """Everything but the timing is decided by `seed`. Where there is a `plain` server, it says what
    each answer must be.
    """

    config = ""
    has_keys = False
    max_tokens = 400
    """Talks that are longer say no more."""

    def __init__(self, folder: Path, plain: RunningServer | None, seed: int) -> None:
        self.home, self.models, self.plain = folder / "home", folder / "models", plain
        self.vocabulary = Vocabulary(self.models / "m")
        self.chance = random.Random(seed)
        self.numbers = count(1)
        self.ledger, self.sightings = Ledger(), Sightings()
        self.told: list[str] = [f"{seed=}"]
        self.server: RunningServer

    @contextmanager
    def served(self, more: str = "") -> Generator[RunningServer]:
        """A server of this home whose store is open; it may be killed meanwhile."""
        config = f'models_dir = "{self.models}"\ndefault_model = "m"\n{SETTINGS}{more}{self.config}'
        with running(self.home, config=config) as self.server:
            self.server.wait_for_the_store()
            yield self.server
            if self.server.process.poll() is None:
                assert "Traceback" not in self.server.stderr, self.server.stderr

    @contextmanager
    def noted(self) -> Generator[None]:
        """What fails says what was done before."""
        try:
            yield
        except BaseException as error:
            error.add_note("\n".join(self.told[-80:]))
            raise

    # What conversations do

    def begun(
        self,
        tenant: str = "",
        model: str = "m",
        ids: tuple[int, ...] | list[int] = (),
        source: Talk | None = None,
        *,
        is_named: bool | None = None,
    ) -> Talk:
        """One that begins with these tokens of another one, and has said nothing yet."""
        name = f"talk-{next(self.numbers)}"
        if is_named is None:
            is_named = self.chance.random() < 0.5
        talk = Talk(name, tenant, model, name if is_named else None, [*ids])
        if source is not None:
            talk.is_harmed = any(one.is_harmed for one in self.family(talk))
            at = 0  # pieces lie in the order in which they were said
            for piece in source.pieces:
                at = _place(source.ids, piece, at)
                talk.pieces += [piece[: len(ids) - at]] if at < len(ids) else []
        return talk

    def prompt_of(self, talk: Talk, num_new: int | None = None) -> list[int]:
        """What it asks next: all before, and some new tokens."""
        num_new = num_new or self._length_for(talk)
        return [*talk.ids, *self.vocabulary.fresh(self.chance, num_new)]

    def say(self, talk: Talk, num_new: int | None = None) -> Answer | None:
        """A turn: its answer is right, and of its prompt is reused what must and may be."""
        if len(talk.ids) > self.max_tokens:
            return None
        prompt = self.prompt_of(talk, num_new)
        piece = tuple(prompt[len(talk.ids) :])
        due = self.ledger.due(prompt, talk.tenant, talk.model)
        allowed = self.ledger.allowed(prompt, talk.tenant, talk.model)
        talk.tries.append(piece)
        key = f"{talk.tenant}-key" if talk.tenant else ""
        fields = {"model": talk.model, "session_id": talk.session}
        try:
            answer = self.vocabulary.ask(self.server, prompt, key, **fields)
        except httpx.TransportError:
            talk.num_sure = min(talk.num_sure, len(talk.ids) - 1)
            raise
        self.answered()
        self.told.append(
            f"{talk.name} of {talk.tenant} to {talk.model}, {talk.session=}: {due=} {allowed=} "
            f"{answer.num_cached} of {len(prompt)}, {answer.num_durable} durable, {answer.reason}"
        )
        self.ledger.check(answer, due, allowed)
        if self.plain is not None:
            check_same(answer, self.vocabulary.ask(self.plain, prompt, model=talk.model))
        talk.tries.remove(piece)
        self.ledger.said(talk, prompt, answer)
        return answer

    def answered(self) -> None:
        """Something to do as soon as an answer has come."""

    def _length_for(self, talk: Talk) -> int:
        """So that no two talks without a session are alike in their number of tokens."""
        taken = {len(one.ids) for one in self.ledger.talks if one.session is None}
        taken |= {one["num_tokens"] for one in self.unnamed()}
        while True:
            num = self.chance.randint(6, 60)
            length = len(talk.ids) + num + NUM_SAID
            if not taken & {length - 1, length, length + 1}:
                return num

    # How they are listed and deleted

    def admin(self, method: str, what: str = "", **query: Any) -> Any:
        headers = {"x-api-key": ADMIN} if self.has_keys else {}
        path = f"/admin/cache/{what}".rstrip("/")
        return self.server.request(method, path, params=query, headers=headers)

    def name_of(self, talk: Talk) -> str:
        """What an operator calls a talk that has a session id."""
        return f"@{talk.tenant}/{talk.session}" if talk.tenant else str(talk.session)

    def entry(self, talk: Talk) -> Any:
        """Its line in the list of conversations, if it has one."""
        if talk.session is not None:
            answer = self.admin("GET", "conversation", conversation=self.name_of(talk))
            return answer.json()["conversation"] if answer.status_code == 200 else None
        lengths = (len(talk.ids), len(talk.ids) - 1)
        mine = [one for one in self.unnamed() if one["num_tokens"] in lengths]
        return mine[0] if len(mine) == 1 else None

    def unnamed(self) -> list[Any]:
        """The lines of conversations without a session id."""
        views = self.admin("GET").json()["conversations"]
        return [one for one in views if not one["is_named"]]

    def wait_until_listed(self, talk: Talk) -> Any:
        """Its line once what it said is on disk, but for what is in no whole block."""

        def is_kept() -> bool:
            entry = self.entry(talk)
            return entry is not None and entry["num_durable"] >= whole(len(talk.ids) - 1)

        asyncio.run(until(is_kept, f"{talk.name} is on disk"))
        return self.entry(talk)

    def hear(self, talk: Talk) -> None:
        """How far it is on disk as its own."""
        entry = self.entry(talk)
        if entry is not None and not talk.is_harmed:
            self.told.append(f"{talk.name} has {entry['num_durable']} tokens on disk")
            self.ledger.heard(talk, entry["num_durable"])

    def delete(self, talk: Talk) -> None:
        """By its session id, or by its line in the list; nothing of it is left afterwards."""
        self.remove(talk)
        self.look_at_files()
        assert self.entry(talk) is None

    def remove(self, talk: Talk) -> None:
        """The server says that it is deleted."""
        if talk.session is not None:
            name = self.name_of(talk)
        else:
            name = self.wait_until_listed(talk)["id"]
        answer = self.remove_named(name)
        assert answer.status_code == 200, answer.text
        self.told.append(f"{talk.name} is deleted: {answer.text}")
        self.ledger.deleted(talk)

    def remove_named(self, name: str) -> Any:
        return self.admin("DELETE", "conversations", conversation=name)

    # Files

    def look_at_files(self) -> None:
        """Nothing that was deleted is in any file."""
        left = self.sightings.holding(self.home, self.ledger.gone())
        assert not left, f"deleted, and in files: {left}"

    def damage(self) -> bool:
        """One bit of a file: only who said something that is in it may miss anything."""
        paths = files_in(self.home / "kv")
        self.chance.shuffle(paths)
        for path in paths:
            there = self.sightings.of(path)
            whose = [
                talk
                for talk in self.ledger.talks
                if any(not windows(piece).isdisjoint(there) for piece in talk.pieces)
            ]
            with suppress(FileNotFoundError):
                at = self.chance.randrange(max(path.stat().st_size, 1))
                if whose:
                    flip(path, at, self.chance.randrange(8))
                    self.told.append(f"byte {at} of {path}, of {[one.name for one in whose]}")
                    for one in [one for talk in whose for one in self.family(talk)]:
                        one.is_harmed = True
                    return True
        return False

    def family(self, talk: Talk) -> list[Talk]:
        """All talks that begin as this one does, so that they may share files."""
        return [
            one
            for one in self.ledger.talks
            if one.is_beside(talk.tenant, talk.model) and one.ids[0] == talk.ids[0]
        ]


def _place(ids: list[int], piece: tuple[int, ...], start: int) -> int:
    size = len(piece)
    return next(at for at in range(start, len(ids)) if tuple(ids[at : at + size]) == piece)
