"""Stored conversations that many clients use at once, in a random order, with `kill -9` in between.

A plain record of what clients asked and were told says what each conversation may and must have:
nothing that was deleted, nothing of another one, all that was acknowledged, and in that order.
"""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running_server import RunningServer, running

NUM_TALKS = 5
TALKS, RESPONSES = "/v1/conversations", "/v1/responses"


@dataclass
class Said:
    """What one request was to add: its text, and the ids of the items behind it where known.

    Times are numbers that everybody counts up. Without `acknowledged` it may be there or not.
    """

    text: str
    began: int
    acknowledged: int | None = None
    item_ids: list[str] = field(default_factory=list[str])


@dataclass
class Talk:
    """A conversation as its clients know it; deletions have the time when they were told of."""

    id: str
    said: dict[str, Said] = field(default_factory=dict[str, Said])
    asked_to_delete: set[str] = field(default_factory=set[str])
    deleted: dict[str, int] = field(default_factory=dict[str, int])
    is_asked_to_go: bool = False
    gone: int | None = None


class Record:
    """All conversations, and a clock."""

    def __init__(self) -> None:
        self.talks: list[Talk] = []
        self.lock = threading.Lock()
        self.num_answered = 0
        self._clock = count(1)

    def now(self) -> int:
        return next(self._clock)

    def add(self, talk: Talk) -> None:
        with self.lock:
            self.talks.append(talk)


def texts_of(item: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in item.get("content") or [])


def check(record: Record, talk: Talk, items: Sequence[dict[str, Any]], asked: int) -> None:
    """Whether a conversation may look like this to who asked then."""
    with record.lock:
        said, deleted = dict(talk.said), dict(talk.deleted)
        asked_to_delete = set(talk.asked_to_delete)
    ids = [item["id"] for item in items]
    assert len(set(ids)) == len(ids), "an item is there twice"
    assert not {one for one, when in deleted.items() if when < asked} & set(ids), "it came back"
    places: dict[str, int] = {}
    known = {item_id for one in said.values() for item_id in one.item_ids}
    open_text = ""
    for place, item in enumerate(items):
        text = texts_of(item)
        if item.get("role") == "user":
            assert text in said, f"{text!r} was not said in this conversation"
            assert text not in places, f"{text!r} is there twice"
            places[text] = place
            open_text = text
        elif item["id"] not in known:
            told = said[open_text].acknowledged
            assert told is None or told > asked, f"{open_text!r} has an item that nobody told of"
    for text, one in said.items():
        if one.acknowledged is None or one.acknowledged > asked:
            continue
        at = [ids.index(item_id) for item_id in one.item_ids if item_id in ids]
        missing = set(one.item_ids) - set(ids) - asked_to_delete
        assert not missing, f"an acknowledged item of {text!r} is missing"
        assert at == sorted(at)
        if text not in places:
            assert one.item_ids, f"the acknowledged {text!r} is missing"
            assert one.item_ids[0] in asked_to_delete, f"the acknowledged {text!r} is missing"
    check_order([said[text] for text in sorted(places, key=places.__getitem__)])


def check_order(there: Sequence[Said]) -> None:
    """Whoever was acknowledged before another one was sent stands before it."""
    latest = 0
    for one in there:
        assert one.acknowledged is None or one.acknowledged > latest, f"{one.text!r} is late"
        latest = max(latest, one.began)


class Client:
    """One that does what its dice say until it has done enough, or its server is gone."""

    def __init__(self, record: Record, server: RunningServer, seed: str, num: int) -> None:
        self.failure: BaseException | None = None
        self._record = record
        self._dice = random.Random(seed)
        self._http = httpx.Client(base_url=server.url, timeout=150, trust_env=False)
        self._names = (f"{seed}-{number}" for number in count())
        self._num = num

    def run(self) -> None:
        try:
            with self._http:
                for _ in range(self._num):
                    self._one()
        except httpx.TransportError:
            pass  # it was killed
        except BaseException as failure:  # the main thread tells it
            self.failure = failure

    def _one(self) -> None:
        talks = [one for one in list(self._record.talks) if one.gone is None]
        if len(talks) < NUM_TALKS:
            return self._begin()
        talk = self._dice.choice(talks)
        does: list[Callable[[Talk], None]] = [
            self._add,
            self._answer,
            self._delete_item,
            self._look,
        ]
        if self._dice.random() < 0.06:
            return self._delete(talk)
        return self._dice.choices(does, [3, 4, 2, 2])[0](talk)

    def _asked(self, method: str, path: str, body: Any = None) -> httpx.Response:
        answer = self._http.request(method, path, json=body)
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], answer.text
        self._record.num_answered += 1
        return answer

    def _begin(self) -> None:
        text, began = next(self._names), self._record.now()
        items = [{"role": "user", "content": text}] if self._dice.random() < 0.5 else []
        made = self._asked("POST", TALKS, {"items": items})
        assert made.status_code == 200, made.text
        talk = Talk(made.json()["id"])
        if items:
            talk.said[text] = Said(text, began, self._record.now())
        self._record.add(talk)

    def _sent(self, talk: Talk) -> Said:
        said = Said(next(self._names), self._record.now())
        with self._record.lock:
            talk.said[said.text] = said
        return said

    def _told(self, talk: Talk, said: Said, status: int, item_ids: list[str]) -> None:
        """What is refused adds nothing, and may be so only for what may be gone."""
        if status == 200:
            said.item_ids = item_ids
            said.acknowledged = self._record.now()
        else:
            assert status == 503 or talk.is_asked_to_go, status
            if status != 503:
                with self._record.lock:
                    del talk.said[said.text]

    def _add(self, talk: Talk) -> None:
        said = self._sent(talk)
        items = [{"role": "user", "content": said.text}]
        added = self._asked("POST", f"{TALKS}/{talk.id}/items", {"items": items})
        ids = [item["id"] for item in added.json().get("data", [])]
        self._told(talk, said, added.status_code, ids)

    def _answer(self, talk: Talk) -> None:
        said = self._sent(talk)
        body = {
            "model": "hearth-tiny",
            "input": said.text,
            "conversation": talk.id,
            "max_output_tokens": 3,
            "store": self._dice.random() < 0.5,
            "stream": self._dice.random() < 0.3,
        }
        answer = self._asked("POST", RESPONSES, body)
        made = answer.json() if not body["stream"] or answer.status_code != 200 else last_of(answer)
        self._told(talk, said, answer.status_code, [one["id"] for one in made.get("output", [])])

    def _delete_item(self, talk: Talk) -> None:
        known = [item_id for one in list(talk.said.values()) for item_id in one.item_ids]
        left = [item_id for item_id in known if item_id not in talk.asked_to_delete]
        if not left:
            return
        item_id = self._dice.choice(left)
        with self._record.lock:
            talk.asked_to_delete.add(item_id)
        gone = self._asked("DELETE", f"{TALKS}/{talk.id}/items/{item_id}")
        assert gone.status_code in (200, 404, 503), gone.text
        if gone.status_code == 200:
            with self._record.lock:
                talk.deleted[item_id] = self._record.now()

    def _delete(self, talk: Talk) -> None:
        talk.is_asked_to_go = True
        gone = self._asked("DELETE", f"{TALKS}/{talk.id}")
        assert gone.status_code in (200, 404, 503), gone.text
        if gone.status_code == 200:
            talk.gone = self._record.now()

    def _look(self, talk: Talk) -> None:
        look(self._record, talk, self._asked)


def last_of(answer: httpx.Response) -> dict[str, Any]:
    """The response that the last event of a stream has; a stream that ended before is no answer."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    last = json.loads(lines[-1]) if lines else {}
    if last.get("type") not in ("response.completed", "response.incomplete"):
        raise httpx.RemoteProtocolError(f"the stream broke off: {last}")
    return last["response"]


def look(record: Record, talk: Talk, ask: Callable[[str, str], httpx.Response]) -> None:
    """Read a conversation to its end, and see that it is as it must be."""
    asked, items, after = record.now(), list[dict[str, Any]](), ""
    while True:
        path = f"{TALKS}/{talk.id}/items?order=asc&limit=100{after}"
        page = ask("GET", path)
        if page.status_code == 503:
            return
        if page.status_code == 404 and (talk.is_asked_to_go or after):
            return
        assert page.status_code == 200, page.text
        assert talk.gone is None or talk.gone > asked, "a deleted conversation came back"
        items += page.json()["data"]
        if not page.json()["has_more"]:
            break
        after = f"&after={page.json()['last_id']}"
    check(record, talk, items, asked)


def phase(
    record: Record, home: Path, seed: str, num_clients: int, num_asks: int, *, is_killed: bool
) -> None:
    """A server and its clients; what was said before is there, and at the end what is said now."""
    with running(home) as server:
        server.wait_for_the_store()
        for talk in record.talks:
            look(record, talk, server.request)
        clients = [Client(record, server, f"{seed}{n}", num_asks) for n in range(num_clients)]
        threads = [threading.Thread(target=one.run) for one in clients]
        kill_at = record.num_answered + random.Random(seed).randint(num_asks, num_asks * 2)
        for thread in threads:
            thread.start()
        while is_killed and record.num_answered < kill_at and any(t.is_alive() for t in threads):
            threads[0].join(0.005)
        if is_killed:
            server.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
        for client in clients:
            if client.failure is not None:
                raise client.failure
        if not is_killed:
            for talk in record.talks:
                look(record, talk, server.request)
        assert "Traceback" not in server.stderr


def played(home: Path, seed: str, num_clients: int, num_asks: int, num_phases: int) -> None:
    record = Record()
    for number in range(num_phases):
        is_killed = number < num_phases - 1
        name = f"{seed}{number}-"
        phase(record, home, name, num_clients, num_asks, is_killed=is_killed)
    assert any(one.acknowledged for talk in record.talks for one in talk.said.values())


def test_what_clients_say_and_delete_at_once_is_kept_and_gone_whatever_is_killed(
    tmp_path: Path,
) -> None:
    played(tmp_path, "short", num_clients=4, num_asks=10, num_phases=2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_the_same_for_long(tmp_path: Path, seed: str) -> None:
    played(tmp_path, seed, num_clients=8, num_asks=60, num_phases=6)
