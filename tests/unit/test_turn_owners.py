"""A turn stays for as long as a conversation that it is part of, and not a moment longer."""

from __future__ import annotations

import shutil
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from runtime.prompt.canonical import digest
from runtime.prompt.healing import TurnScope
from runtime.worker.input.turns import TurnStore
from store import turns as files
from store.keyed_names import Asker, Whom, conversation_key, model_key
from store.turns import Folders, Turn, TurnTokens, turns_root

SECRET = b"secret"
MODEL = b"\1" * 32
Said = tuple[int, int]
"""A question and its answer, as a client sees them."""
Way = tuple[int, ...]
"""All tokens of a conversation up to the end of a turn."""


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


@dataclass
class Owned:
    """What the model of the test has of one owner: its turns by their ways, with their keys."""

    turns: dict[Way, bytes] = field(default_factory=dict[Way, bytes])
    parents: dict[Way, Way] = field(default_factory=dict[Way, Way])

    def is_leaf(self, way: Way) -> bool:
        """It has this turn, and nothing of it goes on from there."""
        return way in self.turns and way not in self.parents.values()


class Owners(RuleBasedStateMachine):
    """Conversations that go on, fork, are edited and deleted, beside plain dictionaries."""

    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp())
        self.store = TurnStore()
        self.owned: dict[TurnScope, Owned] = {}
        self.open()

    def open(self) -> None:
        self.store = TurnStore()
        self.store.attach(turns_root(self.root, MODEL), SECRET)

    def written(self) -> None:
        self.store.close()
        self.store.run()

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

    @rule(client=clients, question=st.integers(0, 2), thought=st.integers(0, 2))
    def go_on(self, client: Client, question: int, thought: int) -> None:
        self.ask(client, question, 0, thought)

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

    def ask(self, client: Client, question: int, answer: int, thought: int) -> None:
        """One turn, as the composer and the answer have it. Tokens say what they stand for."""
        said, asked = client.said, (question, answer)
        talk = Client(client.name, client.session, (*said, asked)).talk
        links = [key_of(said[: number + 1]) for number in range(len(said))]
        found = self.store.find(links, talk)
        self.check(found, links, talk)
        num_known, way = (found[0] + 1, found[1][0].turns) if found is not None else (0, ())
        known: Way = tuple(found[1][0].token_ids) if found is not None else ()
        rest = [token for q, a in said[num_known:] for token in (100 + q, 200 + a)]
        own = (*rest, 100 + question, 300 + thought, 200 + answer)
        self.store.adopt(way, talk, is_durable=True)
        turn = Turn(
            key=key_of((*said, asked)),
            parent=way[-1].id if way else b"",
            start=len(known),
            token_ids=array("I", own).tobytes(),
        )
        self.store.put(turn, talk, is_durable=True)
        client.said, client.way = (*said, asked), (*known, *own)
        mine = self.owned.setdefault(talk, Owned())
        for one in way:
            end: Way = known[: one.end]
            mine.turns[end], mine.parents[end] = one.key, known[: one.start]
        mine.turns[client.way], mine.parents[client.way] = turn.key, known

    def check(self, found: object, links: list[bytes], talk: TurnScope) -> None:
        """What is found is what some owner still has, the asking one's own first."""
        mine = self.owned.get(talk, Owned())
        everybodys = {way: key for one in self.owned.values() for way, key in one.turns.items()}
        depth = max((n for n, key in enumerate(links) if key in everybodys.values()), default=None)
        if depth is None:
            assert found is None
            return
        number, answers = found  # pyright: ignore[reportGeneralTypeIssues]
        assert number == depth
        ways: list[Way] = [tuple(one.token_ids) for one in answers]
        assert all(everybodys[way] == links[depth] for way in ways)
        if any(key == links[depth] for key in mine.turns.values()):
            assert ways[0] in mine.turns
        if sum(key == links[depth] for key in everybodys.values()) <= len(ways):
            assert len(set(ways)) == sum(key == links[depth] for key in everybodys.values())

    # What is deleted

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def delete_session(self, session: str) -> None:
        self.store.forget(Whom(session_id=session), SECRET)
        key = conversation_key(SECRET, session).hex()
        files.drop_folders(self.root, Folders(conversation=key))
        self.disown(lambda talk: talk.asker.session_id == session)

    @rule(name=st.sampled_from(["m", "n"]))
    def delete_name(self, name: str) -> None:
        self.store.forget(Whom(model=name), SECRET)
        files.drop_folders(self.root, Folders(name=model_key(SECRET, name)))
        self.disown(lambda talk: talk.asker.model == name)

    @rule(client=clients)
    def delete_chain(self, client: Client) -> None:
        """What was asked without a session id, by where its KV ends."""
        mine = self.owned.get(client.talk)
        if client.session is not None or mine is None or not mine.is_leaf(client.way):
            return
        self.written()
        chain = TurnTokens(array("I", client.way[:-1]))
        files.drop_chain(self.root, MODEL, model_key(SECRET, client.name), chain)
        way = client.way
        while mine.is_leaf(way):
            del mine.turns[way]
            way = mine.parents.pop(way)

    @rule()
    def delete_all(self) -> None:
        self.store.forget(Whom(), SECRET)
        files.drop_turns(self.root)
        self.disown(lambda _: True)

    def disown(self, is_meant) -> None:
        self.owned = {talk: one for talk, one in self.owned.items() if not is_meant(talk)}

    @rule()
    def restart(self) -> None:
        self.written()
        self.open()

    @invariant()
    def what_is_there_is_what_somebody_owns(self) -> None:
        """On disk and in memory, with everything written and with what is still to be."""
        self.written()
        kept = {turn.id for path in self.root.rglob("*.turn") if (turn := files.read_turn(path))}
        ids: set[bytes] = set()
        for one in self.owned.values():
            names: dict[Way, bytes] = {(): b""}
            for way in sorted(one.turns, key=len):
                above = one.parents[way]
                own = array("I", way[len(above) :]).tobytes()
                names[way] = Turn(one.turns[way], names[above], len(above), own).id
            ids |= set(names.values()) - {b""}
        assert kept == ids


TestOwners = Owners.TestCase
