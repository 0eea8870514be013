"""A server that reuses all it can, and one that never does: they must give the same answers.

Between the requests the first one loses its model, its memory and its life.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.random_asks import Ask, Asks, Plan, Prompts
from tests.running_server import RunningServer, running, started

CHORES = (
    ("POST", "/admin/cache/gc"),
    ("POST", "/admin/cache/verify"),
    ("DELETE", "/admin/cache/conversations?conversation=a"),
)
"""What is done beside requests."""


@dataclass
class Difference(AssertionError):
    """An answer that is not what the prompt alone gives."""

    what: str
    asked: str
    cursor: list[str] = field(default_factory=list[str])

    def told(self) -> str:
        """The answer, the request, and all that went before it."""
        return "\n".join((self.what, self.asked, "after", *self.cursor))


@dataclass
class Compared:
    """How much was compared, and how far apart it was."""

    counts: Counter[str] = field(default_factory=Counter[str])
    worst: float = 0.0
    tiers: Counter[str] = field(default_factory=Counter[str])

    def compare(
        self, ask: Ask, tried: httpx.Response, plain: httpx.Response, within: float
    ) -> None:
        if tried.status_code != plain.status_code:
            words = f"{tried.status_code} {tried.text[:500]} / {plain.status_code}"
            raise Difference(f"{words} {plain.text[:500]}", ask.told())
        if tried.status_code >= 500:
            raise Difference(tried.text[:500], ask.told())
        if tried.status_code >= 300:
            self.counts[f"status {tried.status_code}"] += 1
            return
        one, other = tried.json(), plain.json()
        if "usage" not in one:
            return
        self._look_at_use(ask, one, other)
        uses = [answer["usage"].get("prompt_tokens") for answer in (one, other)]
        if uses[0] != uses[1] or (self._is_rewritten(one) and not ask.is_healed):
            if not (ask.is_healed or self._is_rewritten(one)):
                raise Difference(f"the prompts differ: {uses}", ask.told())
            # A server that was killed, or told to forget, does not recognise what it said.
            self.counts["healed otherwise"] += 1
            return
        self.counts[ask.path.removeprefix("/v1/").partition("/agent-")[0]] += 1
        if "choices" not in one:
            if one["content"] != other["content"]:
                raise Difference(f"{one['content']} / {other['content']}", ask.told())
            return
        pairs = zip(one["choices"], other["choices"], strict=True)
        for number, (left, right) in enumerate(pairs):
            try:
                self._compare_choice(left, right, within)
            except AssertionError as error:
                cache = one["hearth"]
                raise Difference(f"choice {number}: {error} {cache}", ask.told()) from None

    def _is_rewritten(self, answer: Any) -> bool:
        rules = [one["rule"] for one in answer.get("hearth", {}).get("prompt", ())]
        return "healed_turn" in rules

    def _look_at_use(self, ask: Ask, one: Any, other: Any) -> None:
        reused = other["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        if reused:
            raise Difference(f"the server that reuses nothing reused {reused}", ask.told())
        if "hearth" in one:
            self.tiers[one["hearth"]["cache"]["tier"]] += 1

    def _compare_choice(self, left: Any, right: Any, within: float) -> None:
        ours, theirs = _said(left), _said(right)
        if ours is None or theirs is None:
            assert _text(left) == _text(right), f"{_text(left)!r} / {_text(right)!r}"
            return
        for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one[1] is None or other[1] is None:
                assert one == other, f"token {place}: {one} / {other}"
                continue
            pairs = list(zip(one[2], other[2], strict=False))
            apart = max((abs(a - b) for a, b in pairs), default=0.0)
            if one[0] == other[0]:
                apart = max(apart, abs(one[1] - other[1]))
            assert apart <= within, f"token {place} is {apart:.6f} apart: {one} / {other}"
            self.worst = max(self.worst, apart)
            if one[0] != other[0]:
                assert abs(one[1] - other[1]) <= 2 * within, f"token {place}: {one} / {other}"
                self.counts["ties"] += 1
                return
        assert len(ours) == len(theirs), f"{len(ours)} / {len(theirs)} tokens"


Entry = tuple[str, float | None, list[float]]


def _said(choice: Any) -> list[Entry] | None:
    """Tokens with their log probability and the best ones."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [
            (
                json.dumps(one["bytes"]),
                one["logprob"],
                sorted((top["logprob"] for top in one["top_logprobs"]), reverse=True)[:5],
            )
            for one in logprobs["content"]
        ]
    tops = [sorted((one or {}).values(), reverse=True)[:4] for one in logprobs["top_logprobs"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True))


def _text(choice: Any) -> str:
    message = choice.get("message")
    return choice["text"] if message is None else json.dumps(message.get("content"))


class Duel:
    """The two servers, and what was asked of them."""

    def __init__(self, model: Path, home: Path, plan: Plan) -> None:
        self._model = model
        self._home = home
        self.plan = plan
        self._chance = random.Random(plan.seed)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._ids = unmistakable(tokenizer)
        self.prompts = Prompts(self._chance, tokenizer.get_vocab_size(), plan)
        self.asks = Asks(self._chance, self.prompts, plan)
        self.compared = Compared()
        self.cursor: list[str] = []
        self._tried: RunningServer
        self._plain: RunningServer
        self._stack = ExitStack()

    def _config(self, extra: str) -> str:
        return f"""
models_dir = "{self._model.parent}"
default_model = "{self._model.name}"
block_size = {self.plan.block_size}
{extra}
"""

    def run(self) -> Compared:
        """Raises Difference with everything that was asked before it in `cursor`."""
        settings = self.plan.settings
        with ExitStack() as outer, self._stack:
            both = ("kv_bits", "quantized_kv_start", "prefill_slice")
            lines = [line for line in settings.splitlines() if line.startswith(both)]
            plain = self._config("kv_disk = false\nhot_bytes = 1\nprewarm = false\n")
            plain += "\n".join(lines)
            self._plain = outer.enter_context(running(self._home / "plain", config=plain))
            self._begin()
            for _ in range(self.plan.num_rounds):
                self._round()
            assert "Traceback" not in self._tried.stderr, self._tried.stderr
        return self.compared

    def _begin(self) -> None:
        config = self._config(self.plan.settings)
        self._tried = self._stack.enter_context(started(self._home / "tried", config=config))
        self._tried.wait_until_ready()
        self._tried.wait_for_the_store()

    def _round(self) -> None:
        if self._chance.random() < self.plan.trouble_rate:
            self._trouble(self._chance.choice(self.plan.troubles))
        batch = [self.asks.next()]
        num_more = self._chance.choice((0, 0, 0, 1, 3, 7))
        batch += [self.asks.next(is_alone=False) for _ in range(num_more)]
        self.cursor += [f"{number}/{len(batch)} {ask.told()}" for number, ask in enumerate(batch)]
        chore = self._chance.choice(CHORES) if self._chance.random() < 0.15 else None
        if chore is not None:
            self.cursor.append(f"meanwhile {' '.join(chore)}")
        answers = asyncio.run(self._ask_all(batch, chore))
        for ask, answer in zip(batch, answers, strict=True):
            if answer is None or ask.path == "/v1/prewarm":
                self.compared.counts["left" if answer is None else "prewarm"] += 1
                continue
            plain = self._ask_plain(ask)
            try:
                self.compared.compare(ask, answer, plain, self.plan.tolerance)
            except Difference as error:
                error.cursor = self.cursor
                raise
            self._learn(ask, answer)

    def _ask_plain(self, ask: Ask) -> httpx.Response:
        """With `off` no answer is recognised, so what a talk left in memory is displaced instead:
        the newest stays there, however little room there is.
        """
        if not ask.is_healed:
            return self._plain.post(ask.path, ask.body | {"cache_mode": "off"})
        other = {"prompt": self.prompts.fresh(3), "max_tokens": 1}
        self._plain.post("/v1/completions", other)
        return self._plain.post(ask.path, ask.body)

    def _learn(self, ask: Ask, answer: httpx.Response) -> None:
        """Later prompts go on from what was said."""
        if ask.is_healed and "messages" in ask.body and answer.status_code == 200:
            self.asks.heard(ask, answer.json()["choices"][0]["message"])
        prompt = ask.body.get("prompt")
        if not isinstance(prompt, list) or answer.status_code != 200 or ask.body.get("echo"):
            return
        logprobs = answer.json()["choices"][0]["logprobs"] or {"tokens": []}
        texts = logprobs["tokens"]
        if texts and all(text in self._ids for text in texts):
            self.prompts.remember([*prompt, *(self._ids[text] for text in texts)])

    async def _ask_all(
        self, asks: list[Ask], chore: tuple[str, str] | None
    ) -> list[httpx.Response | None]:
        url = self._tried.url
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            answers = asyncio.gather(*(_ask(client, one) for one in asks))
            if chore is not None:
                await client.request(*chore)
            return await answers

    def _collect(self) -> None:
        answer = self._tried.request("POST", "/admin/cache/gc")
        assert answer.status_code == 200, answer.text
        self.compared.counts["dropped"] += answer.json()["num_dropped"]

    def _trouble(self, kind: str) -> None:
        self.cursor.append(kind)
        self.compared.counts[kind] += 1
        name, tried = self._model.name, self._tried
        match kind:
            case "unload":
                tried.request("POST", f"/admin/models/{name}/unload")
                tried.request("POST", f"/admin/models/{name}/load")
            case "chain":
                # So many small slots in a row become one.
                for prompt in self.prompts.growing(20):
                    how = {"max_tokens": 1, "session_id": "chain"}
                    tried.post("/v1/completions", {"prompt": prompt} | how)
                self._collect()
            case "gc":
                self._collect()
            case "delete":
                tried.request("DELETE", "/admin/cache/conversations?conversation=a")
            case _:
                if kind == "kill":
                    tried.process.send_signal(signal.SIGKILL)
                    tried.process.wait()
                else:
                    tried.stop()
                self._stack.close()
                self._begin()


def unmistakable(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that are told from all others by their text."""
    texts = [tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())]
    times = Counter(texts)
    return {text: number for number, text in enumerate(texts) if times[text] == 1}


async def _ask(client: httpx.AsyncClient, ask: Ask) -> httpx.Response | None:
    asking = client.post(ask.path, json=ask.body)
    if ask.leaves_after_s is None:
        return await asking
    with suppress(TimeoutError):
        async with asyncio.timeout(ask.leaves_after_s):
            await asking
    return None
