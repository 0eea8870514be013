"""A real server that is killed again and again, and a dictionary of what each conversation must
still have.

Conversations speak, branch, are deleted and damaged; the dictionary knows the tokens of each, how
many of them were told durable, and which of those were damaged since.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from array import array
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer

from runtime.cache.opened import HEADS, INDEX, SLOTS
from runtime.cache.tending import inventory_of
from runtime.cache.verification import files_of, verify
from store.block_names import HashChain
from store.errors import StoreError
from store.head_file import HEAD, read_head
from store.keyed_names import conversation_key
from store.kv_file import open_file
from store.slots import SLOT
from tests.agents import AGENTS, Agent
from tests.crash.damage import tokens_of
from tests.crash.server_store import check_store, kill, store_at
from tests.disk_observer import bytes_at_once
from tests.duel import Compared, unmistakable
from tests.random_asks import Ask
from tests.running_server import COMPLETIONS, RunningServer, hearth, running, started
from tests.tiny_models import write_model
from tests.waiting import PATIENCE_S, until

BLOCK = 16
MAX_TOKENS = 700
NUM_SAID = 6
NUM_ALIKE = 100
"""Tokens that siblings begin with."""
OPENING = [1, 2, 3, 4]
"""What every prompt begins with, as with a template."""
WINDOW = 9
"""So many tokens in a row are never the same by chance."""
TOLERANCE = 1e-4
SLICE_S = 0.3
INDEX_SHARE = 5
"""What the index and the room for its growth take at the most, in sizes of it."""
"""A server is killed within so many seconds of what it is killed in."""
ODDS = {
    "turns": 5,
    "delete": 3,
    "delete its turn": 2,
    "chores": 2,
    "start": 1,
    "capped": 1,
}
"""How often a server is killed in the midst of what."""


@dataclass
class Talk:
    """A conversation. `pieces` are what only it, and what branches from it, said: position, tokens.

    The first `num_durable` of its tokens were told durable, but for the `lost` blocks. It
    `is_awake` while all of it is in memory, and `is_going` when a deletion was not answered. Beyond
    `num_sure` tokens the server may know it by another turn: one that was broken off by a kill.
    """

    name: str
    session: str
    ids: list[int]
    pieces: list[tuple[int, list[int]]]
    num_durable: int = 0
    lost: set[int] = field(default_factory=set[int])
    is_awake: bool = False
    is_going: bool = False
    was_damaged: bool = False
    num_sure: int = sys.maxsize

    @property
    def num_due(self) -> int:
        """How many tokens must be reused: a block is lost whole, and what is left of the last."""
        num = len(self.ids) if self.is_awake else min(self.num_durable, len(self.ids))
        return num - BLOCK * (len({one for one in self.lost if one * BLOCK < num}) + 1)


@dataclass
class Spoken(Talk):
    """An agent, whose history the server has; `asked` are its messages that were answered."""

    asked: list[str] = field(default_factory=list[str])
    pending: str | None = None


def sizes_in(root: Path) -> dict[str, int]:
    """By the name of each file of a store, its bytes."""
    return {one.name: one.stat().st_size for one in root.rglob("*") if one.is_file()}


class KillLoop:
    """One home, whose server is killed. Everything is decided by `seed`, but for the timing."""

    def __init__(self, home: Path, plain: RunningServer, seed: int, *, settings: str = "") -> None:
        self.home, self.plain, self.settings = home, plain, settings
        self.root = home / "kv"
        self.chance = random.Random(seed)
        self.seed = seed
        self.tokenizer = Tokenizer.from_file(str(models_of(home) / "tiny" / "tokenizer.json"))
        self.known = unmistakable(self.tokenizer)
        numbers = range(self.tokenizer.get_vocab_size())
        self.unclear = {str(one): -100 for one in set(numbers) - set(self.known.values())}
        self.alike = [*OPENING, *self.fresh(NUM_ALIKE)]
        self.system = self.words(12)
        self.talks: dict[str, Talk] = {}
        self.deleted: set[bytes] = set()
        self.whose: dict[bytes, str] = {}
        """Of what is deleted, by its windows, who said it."""
        self.deleted_keys: set[str] = set()
        self.traceless: dict[str, bytes] = {}
        self.harmed: set[str] = set()
        """Files that were damaged, some of which may be whole again."""
        self.compared = Compared()
        self.cursor: list[str] = []
        self.num_named = 0
        self.is_capped = False
        self.alone = threading.Lock()

    # The loop

    def run(self, num_kills: int) -> None:
        """Raises AssertionError with the seed and with all that was done."""
        try:
            for number in range(num_kills):
                self.cursor.append(f"server {number}")
                self.round()
            with self.served() as server:
                self.answer_all(server)
                server.stop()
            self.look_at_files()
            self.check()
        except BaseException as error:
            told = "\n".join(self.cursor[-60:])
            error.add_note(f"HEARTH_TEST_SEED={self.seed}, after {num_kills=}\n{told}")
            raise

    def answer_all(self, server: RunningServer) -> None:
        """Each once more."""
        for talk in list(self.talks.values()):
            (self.delete if talk.is_going else self.answer)(server, talk)

    def round(self) -> None:
        """A server starts, is looked at, and is killed in the midst of something."""
        kind = self.chance.choices(list(ODDS), list(ODDS.values()))[0]
        if kind == "start":
            self.kill_at_start()
        elif kind == "capped" and (self.root / INDEX).exists():
            self.kill_while_capped()
        else:
            with self.served() as server:
                self.live(server)
                self.kill_in(server, kind if kind != "capped" else "turns")
        self.after_kill()

    def live(self, server: RunningServer) -> None:
        """What was said is reused; some is deleted, damaged, begun."""
        for talk in [one for one in self.talks.values() if one.is_going]:
            self.delete(server, talk)
        while len(self.talks) < 7:
            self.begin(server)
        talks = self.some(2)
        if self.chance.random() < 0.3:
            self.delete(server, self.some(1)[0])
        for talk in talks:
            if talk.name in self.talks:
                self.answer(server, talk)
        if self.chance.random() < 0.4:
            self.damage()
        if self.chance.random() < 0.7:
            self.hear_what_is_durable(server)

    def hear_what_is_durable(self, server: RunningServer) -> None:
        """Also what was on its way when it was answered.

        How far the end of a conversation is does not tell of what was damaged before it, nor of
        which turn it is the end, where one was answered that nobody saw.
        """
        told = self.told(server)
        for talk in self.talks.values():
            if not talk.was_damaged:
                num = told.get(self.key_of(talk).hex(), 0)
                num = min(num, len(talk.ids), talk.num_sure)
                talk.num_durable = max(talk.num_durable, num)

    def told(self, server: RunningServer) -> dict[str, int]:
        """How far each conversation is on disk, by what stands for it."""
        views = server.get("/admin/cache").json()["conversations"]
        return {one["id"]: one["num_durable"] for one in views}

    def kill_in(self, server: RunningServer, kind: str) -> None:
        deeds: list[Callable[[], Any]] = []
        match kind:
            case "turns":
                deeds = [
                    self.answering(server, one) for one in self.some(self.chance.choice((1, 2, 3)))
                ]
            case "delete":
                goes, stays = self.some(2)
                deeds = [self.deleting(server, goes), self.answering(server, stays)]
            case "delete its turn":
                [talk] = self.some(1)
                deeds = [lambda: self.delete_its_turn(server, talk)]
            case _:
                [talk] = self.some(1)
                deeds = [
                    lambda: server.request("POST", "/admin/cache/gc"),
                    lambda: server.request("POST", "/admin/cache/verify"),
                    self.answering(server, talk),
                ]
        self.cursor.append(f"killed in {kind}")
        self.killed(server, deeds)

    def killed(self, server: RunningServer, deeds: Iterable[Callable[[], Any]]) -> None:
        """Kill the server while these are done, each in a thread; errors but its end count."""
        errors: list[BaseException] = []

        def do(deed: Callable[[], Any]) -> None:
            try:
                deed()
            except httpx.TransportError:
                pass
            except BaseException as error:
                errors.append(error)

        worker = psutil.Process(server.worker_pid())
        killer = threading.Timer(self.chance.uniform(0, SLICE_S), kill, [server])
        threads = [threading.Thread(target=do, args=(deed,)) for deed in deeds]
        for thread in (killer, *threads):
            thread.start()
        for thread in (*threads, killer):
            thread.join()
        worker.wait(PATIENCE_S)
        assert "Traceback" not in server.stderr, server.stderr
        for error in errors:
            raise error

    def kill_at_start(self) -> None:
        self.cursor.append("killed at its start")
        with started(self.home, config=self.config()) as server:
            killer = threading.Timer(self.chance.uniform(0, 4 * SLICE_S), kill, [server])
            killer.start()
            killer.join()
            assert "Traceback" not in server.stderr, server.stderr

    def kill_while_capped(self) -> None:
        """There is less room than before: what goes is known from the files that stay.

        Those that came meanwhile have no head for certain.
        """
        self.look_at_files()
        before = {path.stem for path in self.files()}
        cap = int(self.num_bytes() * 0.7) + INDEX_SHARE * (self.root / INDEX).stat().st_size
        self.cursor.append(f"killed while capped to {cap} bytes")
        with self.served(f"cache_max_bytes = {cap}\n") as server:
            asyncio.run(until(lambda: bytes_at_once(self.root) <= cap, "it keeps to its cap"))
            self.is_capped = True
            for talk in self.some(2):
                self.answer(server, talk)
            deeds = [self.answering(server, one) for one in self.some(2)]
            self.killed(server, deeds)
        self.is_capped = False
        num = bytes_at_once(self.root)
        assert num <= cap, f"{num} bytes: {sizes_in(self.root)}"
        there = before & {one.stem for one in self.files() if is_whole(one)}
        for talk in self.talks.values():
            talk.num_durable, talk.was_damaged = len(talk.ids), True
            names = self.names_of(talk)
            talk.lost = {at for at, one in enumerate(names) if not one & there}
            talk.lost.add(len(names))

    def after_kill(self) -> None:
        """Nobody runs: deletions and damage without a server, and what must be so."""
        for talk in self.talks.values():
            talk.is_awake = False
        self.look_at_files()
        if self.talks and self.chance.random() < 0.3:
            self.damage()
        if self.talks and self.chance.random() < 0.1:
            [talk] = self.some(1)
            self.delete_by_command(talk)
        if self.chance.random() < 0.3:
            self.check()

    # What conversations do

    def begin(self, server: RunningServer) -> None:
        """Alone, like its siblings, like an agent with siblings, or as another one began."""
        self.num_named += 1
        name = f"talk-{self.num_named}"
        kind = self.chance.choice(("alone", "sibling", "branch", "agent", "agent"))
        if kind == "agent":
            fields = {"id": name, "system": self.system, "max_tokens": 1}
            agent = Agent.made(server, **fields)
            talk: Talk = Spoken(name, agent.view()["session"], [], [])
        elif kind == "branch" and (source := self.some(1)) and not isinstance(source[0], Spoken):
            cut = self.chance.randint(0, len(source[0].ids))
            pieces = [(at, ids[: cut - at]) for at, ids in source[0].pieces if at < cut]
            talk = Talk(name, name, source[0].ids[:cut] or OPENING, pieces)
            talk.was_damaged = source[0].was_damaged
            kind = f"as {source[0].name}, to {cut}"
        else:
            talk = Talk(name, name, list(self.alike if kind == "sibling" else OPENING), [])
        self.cursor.append(f"{name} begins: {kind}")
        self.talks[name] = talk
        self.answer(server, talk)

    def answering(self, server: RunningServer, talk: Talk) -> Callable[[], Any]:
        def deed() -> None:
            try:
                self.answer(server, talk)
            except httpx.TransportError:
                talk.num_sure = len(talk.ids)
                raise

        return deed

    def answer(self, server: RunningServer, talk: Talk) -> None:
        """A turn, of which all that must be reused is, and which says what it must."""
        if len(talk.ids) > MAX_TOKENS and not isinstance(talk, Spoken):
            talk.ids = talk.ids[: MAX_TOKENS // 2]
        due = talk.num_due
        if isinstance(talk, Spoken):
            due = min(due, self.catch_up(server, talk))
        usage, cache = self.ask(server, talk)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        with self.alone:
            of = f"{cached} of {usage['prompt_tokens']}"
            self.cursor.append(f"{talk.name}: {of}, {due} due, {cache['durable_tokens']} durable")
        told = (talk.name, talk.num_durable, sorted(talk.lost), usage, cache, server.stderr)
        assert cached >= due or self.is_capped, told
        with self.alone:
            talk.is_awake, talk.num_durable = True, 0
        # What is on disk as another's, and not as its own yet, goes with the other one.
        its_own = self.told(server).get(self.key_of(talk).hex(), 0)
        with self.alone:
            talk.num_durable, talk.lost = min(cache["durable_tokens"], its_own), set()
            self.take_up(talk)

    def ask(self, server: RunningServer, talk: Talk) -> tuple[Any, Any]:
        """What an answer says of its use, and of the cache."""
        path, body = self.body(talk)
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        if isinstance(talk, Spoken):
            self.adopt(talk)
            history = Agent(server, talk.name).turns()
            told = (talk.name, len(talk.ids), answer["usage"], talk.asked, history)
            assert len(talk.ids) == answer["usage"]["prompt_tokens"] + 1, told
            return answer["usage"], answer["hearth"]["cache"]
        if self.chance.random() < 0.5 or not talk.is_awake:
            plain = self.plain.post(path, body | {"cache_mode": "off"})
            self.compared.compare(Ask(path, body), response, plain, TOLERANCE)
        said = [self.known[one] for one in answer["choices"][0]["logprobs"]["tokens"]]
        talk.ids = [*body["prompt"], *said]
        return answer["usage"], answer["hearth"]["cache"]

    def body(self, talk: Talk) -> tuple[str, dict[str, Any]]:
        """Where its next turn is asked, and how; what is new in it is remembered."""
        if isinstance(talk, Spoken):
            talk.pending = text = self.words(self.chance.randint(1, 8))
            piece = self.tokenizer.encode(f" so {text} so").ids[3:-3]
            more: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            more |= {"logit_bias": {str(self.tokenizer.token_to_id("A")): 100}, "max_tokens": 1}
            path = f"{AGENTS}/{talk.name}/generate"
        else:
            piece = self.fresh(self.chance.randint(5, 110))
            more = {"prompt": [*talk.ids, *piece], "session_id": talk.session, "logprobs": 3}
            more |= {"logit_bias": self.unclear, "max_tokens": NUM_SAID}
            path = COMPLETIONS
        with self.alone:
            talk.pieces.append((len(talk.ids), piece))
        return path, {"temperature": 0} | more

    def adopt(self, talk: Spoken) -> None:
        """What was asked last was answered: its tokens are those of the template."""
        assert talk.pending is not None
        talk.asked.append(talk.pending)
        talk.pending = None
        text = f"<|im_start|>system\n{self.system}<|im_end|>\n"
        for asked in talk.asked:
            text += f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        talk.ids = self.tokenizer.encode(text.removesuffix("<|im_end|>\n")).ids

    def catch_up(self, server: RunningServer, talk: Spoken) -> int:
        """The server may have answered what nobody saw; how many tokens were known before."""
        num_known = len(talk.ids)
        if talk.pending is not None:
            turns = Agent(server, talk.name).turns()
            assert len(talk.asked) <= len(turns) <= len(talk.asked) + 1
            if len(turns) > len(talk.asked):
                self.adopt(talk)
        return num_known

    # How they are deleted

    def deleting(self, server: RunningServer, talk: Talk) -> Callable[[], Any]:
        return lambda: self.delete(server, talk)

    def delete(self, server: RunningServer, talk: Talk) -> None:
        """By one of the ways there are. An agent may be gone after a deletion nobody answered."""
        was_going, talk.is_going = talk.is_going, True
        route = self.chance.choice(("admin", "admin", "command"))
        if isinstance(talk, Spoken):
            answer = server.request("DELETE", f"{AGENTS}/{talk.name}")
            assert answer.status_code == 200 or (was_going and answer.status_code == 404)
            route = "agent"
        elif route == "admin":
            query = {"conversation": talk.session}
            answer = server.request("DELETE", "/admin/cache/conversations", params=query)
            assert answer.status_code in (200, 404), answer.text
            if answer.status_code == 200 and answer.json()["is_cut"]:
                self.traceless[talk.name] = self.key_of(talk)
        else:
            where = {"HEARTH_HOME": str(self.home), "HEARTH_PORT": str(server.port)}
            outcome = hearth("cache", "rm", talk.session, **where)
            if outcome.returncode and "No conversation" not in outcome.stderr:
                assert server.process.poll() is not None, outcome.stderr
                return
        self.bury(talk, route)

    def delete_its_turn(self, server: RunningServer, talk: Talk) -> None:
        """While it is answered. An agent goes also when the kill comes before its deletion is asked
        for: its history may have got an answer that nobody here knows.
        """
        path, body = self.body(talk)
        talk.is_going, talk.num_sure = isinstance(talk, Spoken), len(talk.ids)
        with server.stream("POST", path, json=body | {"max_tokens": 60, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            self.delete(server, talk)
            for _ in lines:
                pass

    def delete_by_command(self, talk: Talk) -> None:
        """Without a server."""
        if isinstance(talk, Spoken):
            return
        outcome = hearth("cache", "rm", talk.session, HEARTH_HOME=str(self.home))
        assert not outcome.returncode or "No conversation" in outcome.stderr, outcome.stderr
        self.bury(talk, "command without a server")

    def bury(self, talk: Talk, route: str) -> None:
        """It was answered: from now on nothing is left of what nobody else said."""
        with self.alone:
            self.cursor.append(f"{talk.name} is deleted: {route}")
            self.talks.pop(talk.name, None)
            others = [ids for one in self.talks.values() for _, ids in one.pieces]
            mine = [ids for _, ids in talk.pieces]
            gone = windows(mine) - windows(others)
            self.deleted |= gone
            self.whose |= dict.fromkeys(gone, talk.name)
            self.deleted_keys.add(self.key_of(talk).hex())

    # What happens to them

    def damage(self) -> None:
        """One bit of a slot or a head, but for those that say what kind of file it is."""
        paths = [path for path in self.files() if self.chance.random() < 0.5 and is_whole(path)]
        if not paths:
            return
        path = self.chance.choice(paths)
        with suppress(FileNotFoundError, StoreError):
            session = read_head(path).head.owner.session if path.stem in self.heads() else b""
            with path.open("r+b") as file:
                at = self.chance.randrange(60, path.stat().st_size)
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << self.chance.randrange(8)]), at)
            self.cursor.append(f"byte {at} of {path.stem} is lost")
            self.harmed.add(path.stem)
            for talk in self.talks.values():
                if session == self.key_of(talk):  # nobody else has what only its head goes through
                    talk.num_durable, talk.was_damaged, talk.is_awake = 0, True, False
                self.lose(talk, {path.stem})

    def lose(self, talk: Talk, names: set[str]) -> None:
        """Whoever said the tokens of these blocks may have to compute them."""
        lost = {at for at, one in enumerate(self.names_of(talk)) if one & names}
        talk.lost |= lost
        talk.was_damaged |= bool(lost)

    def take_up(self, talk: Talk) -> None:
        """What is damaged and still there is not durable, whatever is said."""
        there = [path for path in self.files() if path.stem in self.harmed]
        self.lose(talk, {path.stem for path in there if not is_whole(path)})

    # What must be so

    def look_at_files(self) -> None:
        """Nothing that was deleted is in any file, be it a slot or not."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        for path in paths:
            with suppress(FileNotFoundError):
                found = self.found_in(path)
                assert not found, f"{path} has what was deleted: {found}"

    def found_in(self, path: Path) -> str:
        if tokens := tokens_of(path) if path.suffix == ".safetensors" else []:
            shared = windows([tokens]) & self.deleted
            whose = sorted({self.whose[one] for one in shared})
            return f"{len(shared)} of {len(tokens)} tokens, of {whose}" if shared else ""
        data = path.read_bytes()
        names = [name for name, key in self.traceless.items() if key in data]
        size = 4 * WINDOW
        its = {data[at : at + size] for at in range(min(len(data), 60_000) - size)}
        shared = its & self.deleted
        return f"{names} {len(shared)} windows" if names or shared else ""

    def check(self) -> None:
        """The store is in order once damage was looked for, and each byte is somebody's."""
        store = store_at(self.root, block_size=BLOCK)
        try:
            for file in files_of(store):
                verify(store, file)
            there = {one.id for one in inventory_of(store).conversations()}
            assert not there & self.deleted_keys, "what was deleted is in the index"
        finally:
            store.close()
        check_store(self.root, block_size=BLOCK)
        self.look_at_files()

    # How it is done

    def config(self, more: str = "") -> str:
        return config_of(models_of(self.home)) + more + self.settings

    @contextmanager
    def served(self, more: str = "") -> Generator[RunningServer]:
        with running(self.home, config=self.config(more)) as server:
            server.wait_for_the_store()
            yield server

    def some(self, num: int) -> list[Talk]:
        """Different ones, of which nobody knows that they go."""
        there = [one for one in self.talks.values() if not one.is_going]
        return self.chance.sample(there, min(num, len(there)))

    def key_of(self, talk: Talk) -> bytes:
        """What stands for it in the store."""
        return conversation_key((self.root / "secret").read_bytes(), talk.session)

    def fresh(self, num: int) -> list[int]:
        return self.chance.choices(range(10, self.tokenizer.get_vocab_size()), k=num)

    def words(self, num: int) -> str:
        return " ".join(f"{self.chance.getrandbits(32):08x}" for _ in range(num))

    def names_of(self, talk: Talk) -> list[set[str]]:
        """The name of each of its whole blocks, for each model hash there is."""
        secret, models = (self.root / "secret").read_bytes(), (self.root / SLOTS).glob("*")
        chains = [HashChain(secret, bytes.fromhex(one.name), block_size=BLOCK) for one in models]
        named = [one.block_hashes(talk.ids, root=one.root_of("")) for one in chains]
        return [{one.hex() for one in names} for names in zip(*named, strict=True)]

    def heads(self) -> dict[str, Path]:
        """The files of heads, by their ids."""
        return {path.stem: path for path in (self.root / HEADS).glob("*/*/[!.]*.safetensors")}

    def files(self) -> list[Path]:
        slots = (self.root / SLOTS).glob("*/[!.]*.safetensors")
        return sorted([*slots, *self.heads().values()])

    def num_bytes(self) -> int:
        num = 0
        for path in self.files():
            with suppress(FileNotFoundError):  # it may go just now
                num += path.stat().st_blocks * 512
        return num


PLAIN = "kv_disk = false\nhot_bytes = 1\nprewarm = false\n"


def config_of(models: Path) -> str:
    lines = (f'models_dir = "{models}"', 'default_model = "tiny"', f"block_size = {BLOCK}", "")
    return "\n".join(lines)


def models_of(home: Path) -> Path:
    return home.parent / "models"


@contextmanager
def looped(folder: Path, seed: int, *, settings: str = "") -> Generator[KillLoop]:
    """A loop, and beside it the server that keeps nothing."""
    write_model(folder / "models" / "tiny")
    with running(folder / "plain", config=config_of(folder / "models") + PLAIN) as plain:
        yield KillLoop(folder / "home", plain, seed, settings=settings)


def is_whole(path: Path) -> bool:
    """Whether each byte of a slot or a head is as it was written."""
    try:
        with open_file(path, HEAD if HEADS in path.parts else SLOT) as file:
            file.read()
    except StoreError:
        return False
    return True


def windows(pieces: Iterable[list[int]]) -> set[bytes]:
    """Every so many tokens in a row, as files have them."""
    size, found = 4 * WINDOW, set[bytes]()
    for piece in pieces:
        data = array("I", piece).tobytes()
        found |= {data[at : at + size] for at in range(0, len(data) - size + 1, 4)}
    return found
