"""A turn stays for as long as a conversation that it is part of, and not a moment longer."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from runtime.prompt.canonical import digest
from runtime.prompt.healing import KnownPrefix, TurnScope
from store.head_file import HeadFile, read_head
from store.heads import Whom as HeadsOf
from store.keyed_names import Asker, Chain, Whom, conversation_key, keyed_hash
from store.turns import Said as KeptBy
from store.turns import Turn, unpacked
from tests.kept_turns import SECRET, KeptHeads

Said = tuple[int, int]
"""A question and its answer, as a client sees them."""
Way = tuple[int, ...]
"""All tokens of a conversation up to the end of a turn."""


def ids_of(file: HeadFile) -> tuple[bytes, ...]:
    """Those of the turns of a head."""
    return tuple(one.id for one in unpacked(file.said, file.token_ids).turns)


def key_of(said: tuple[Said, ...]) -> bytes:
    return digest(said)


@dataclass
class Client:
    """A conversation: who asks, what its client has, and what the model had in its last turn."""

    name: str
    session: str | None
    said: tuple[Said, ...] = ()
    way: Way = ()

    @property
    def talk(self) -> TurnScope:
        beginning = digest(self.said[0][0]) if self.session is None else b""
        return TurnScope(Asker(self.name, self.session), beginning)


class Record(NamedTuple):
    """What the model of the test has of a head: whose it is, and its turns with their keys."""

    talk: TurnScope
    way: Way
    turns: dict[Way, bytes]
    told: Way
    """The tokens of the head."""


class Owners(RuleBasedStateMachine):
    """Conversations that go on, fork, are edited and deleted, beside plain dictionaries."""

    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp())
        self.server = KeptHeads(self.root)
        self.store = self.server.turns()
        self.records: dict[str, Record] = {}
        """By the ids of their heads."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # What is done

    @rule(
        target=clients,
        name=st.sampled_from(["m", "n"]),
        session=st.sampled_from([None, "a", "b"]),
        question=st.integers(0, 2),
        thought=st.integers(0, 2),
    )
    def begin(self, name: str, session: str | None, question: int, thought: int) -> Client:
        client = Client(name, session)
        self.ask(client, question, 0, thought)
        return client

    @rule(
        client=clients,
        question=st.integers(0, 2),
        thought=st.integers(0, 2),
        is_cut=st.booleans(),
    )
    def go_on(self, client: Client, question: int, thought: int, is_cut: bool) -> None:
        self.ask(client, question, 0, thought, is_cut=is_cut)

    @rule(
        target=clients,
        client=clients,
        num_kept=st.integers(1, 3),
        name=st.sampled_from(["m", "n"]),
        session=st.sampled_from([None, "a", "b", "c"]),
        edit=st.booleans(),
        thought=st.integers(0, 2),
    )
    def fork(
        self,
        client: Client,
        num_kept: int,
        name: str,
        session: str | None,
        edit: bool,
        thought: int,
    ) -> Client:
        """Under another id or the same, from the end or from before it, as it was or edited."""
        said = client.said[:num_kept]
        if edit:
            said = (*said[:-1], (said[-1][0], 9))
        copy = Client(name, session, said)
        self.ask(copy, 1, 0, thought)
        return copy

    def ask(
        self, client: Client, question: int, answer: int, thought: int, *, is_cut: bool = False
    ) -> None:
        """One turn, as the composer and the answer have it. Tokens say what they stand for."""
        said, asked = client.said, (question, answer)
        talk = Client(client.name, client.session, (*said, asked)).talk
        links = [key_of(said[: number + 1]) for number in range(len(said))]
        self.store.fetch(links[::-1], talk)
        found = self.store.find(links, talk)
        self.check(found, links, talk)
        num_known, way = (found[0] + 1, found[1][0].turns) if found is not None else (0, ())
        known: Way = tuple(found[1][0].token_ids) if found is not None else ()
        rest = [token for q, a in said[num_known:] for token in (100 + q, 200 + a)]
        own = (*rest, 100 + question, 300 + thought, 200 + answer)
        self.store.adopt(way, talk)
        turn = Turn(
            key=key_of((*said, asked)),
            parent=way[-1].id if way else b"",
            start=len(known),
            token_ids=array("I", own).tobytes(),
        )
        self.store.put(turn, talk)
        client.said, client.way = (*said, asked), (*known, *own)
        # The last token of an answer has no KV; that of a talk whose client cuts it is another one.
        told = (*client.way[:-1], 999) if is_cut else client.way[:-1]
        kept = self.server.keep(talk, told, KeptBy((*way, turn), talk.beginning))
        turns = {client.way[: one.end]: one.key for one in (*way, turn)}
        gone = [i for i, one in self.records.items() if self.is_replaced(one, talk, told)]
        for head_id in gone:
            del self.records[head_id]
        self.records[kept.head.id] = Record(talk, client.way, turns, told)

    def is_replaced(self, one: Record, talk: TurnScope, told: Way) -> bool:
        """A head makes way for the one that goes on from it, or is the same once more."""
        return one.talk.asker == talk.asker and told[: len(one.told)] == one.told

    def turns_of(self, talk: TurnScope | None = None) -> dict[Way, bytes]:
        """Those that an owner has, or anybody."""
        records = [one for one in self.records.values() if talk in (None, one.talk)]
        return {way: key for one in records for way, key in one.turns.items()}

    def check(
        self, found: tuple[int, list[KnownPrefix]] | None, links: list[bytes], talk: TurnScope
    ) -> None:
        """What is found is what some owner still has, the asking one's own first."""
        mine, everybodys = self.turns_of(talk), self.turns_of()
        depth = max((n for n, key in enumerate(links) if key in everybodys.values()), default=None)
        if depth is None:
            assert found is None
            return
        assert found is not None
        number, answers = found
        assert number == depth
        ways: list[Way] = [tuple(one.token_ids) for one in answers]
        assert all(everybodys[way] == links[depth] for way in ways)
        if any(key == links[depth] for key in mine.values()):
            assert ways[0] in mine

    # What is deleted

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def delete_session(self, session: str) -> None:
        self.server.heads.delete(HeadsOf(session=conversation_key(SECRET, session)))
        self.store.forget(Whom(session_id=session), SECRET)
        self.disown(lambda one: one.talk.asker.session_id == session)

    @rule(name=st.sampled_from(["m", "n"]))
    def delete_name(self, name: str) -> None:
        self.server.heads.delete(HeadsOf(asked=keyed_hash(SECRET, "model", name.encode())))
        self.store.forget(Whom(model=name), SECRET)
        self.disown(lambda one: one.talk.asker.model == name)

    @rule(client=clients)
    def delete_chain(self, client: Client) -> None:
        """What was asked without a session id, by the tokens of its head."""
        ids = [i for i, one in self.records.items() if one[:2] == (client.talk, client.way)]
        if client.session is not None or not ids:
            return
        (head_id,) = ids
        heads = self.server.heads
        file = heads.read(head_id)
        token_ids = file.token_ids
        shared = heads.num_shared(head_id, token_ids)
        heads.delete_head(head_id)
        chain = Chain(array("I", token_ids).tobytes(), shared, b"", turns=ids_of(file))
        self.store.forget(Whom(model=client.name, chain=chain), SECRET)
        del self.records[head_id]

    @rule()
    def delete_all(self) -> None:
        self.server.heads.delete(HeadsOf())
        self.store.forget(Whom(), SECRET)
        self.records = {}

    def disown(self, is_meant: Callable[[Record], bool]) -> None:
        self.records = {i: one for i, one in self.records.items() if not is_meant(one)}

    @rule()
    def restart(self) -> None:
        self.store = self.server.turns()

    @invariant()
    def what_is_there_is_what_somebody_owns(self) -> None:
        """On disk and in memory."""
        said = [read_head(path) for path in self.server.files]
        turns = [turn for one in said for turn in unpacked(one.said, one.token_ids).turns]
        kept = {turn.id: turn for turn in turns}
        assert {turn.key for turn in kept.values()} == {*self.turns_of().values()}
        assert len(kept) == len(self.turns_of())
        for turn_id, held in self.store._memory.held.items():
            assert turn_id in kept
            for owner in filter(None, held.owners):
                ways = self.turns_of(owner)
                assert any(len(way) == held.turn.end for way in ways), "it is its owner's"


TestOwners = Owners.TestCase
