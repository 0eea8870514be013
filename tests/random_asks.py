"""Random requests whose prompts share much with one another.

A prompt is made of a few pieces, so that prefixes, repeats, prompts one token longer or shorter,
lengths around a block's border and divergences within a block are common.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Body = dict[str, Any]
FIRST_TOKEN = 7
"""Those before it are special."""
WORDS = (
    "the quick brown fox jumps ",
    "over the lazy dog while a kettle hums ",
    "on the hearth and rain falls ",
    "naïve café 你好世界 ",
    "def answer(question): return 42 ",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
        },
    }
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"at": {"enum": ["dog", "fox", "rain"]}, "is": {"type": "boolean"}},
            "required": ["at", "is"],
            "additionalProperties": False,
        },
    },
}


DOORS = ("tokens", "tokens", "tokens", "chat", "talk", "messages", "agent")
SEEING = ("tokens", "pictures", "pictures", "pictures", "talk", "agent")


@dataclass(frozen=True)
class Plan:
    """Which model is compared, and under which circumstances. `settings` is TOML."""

    seed: int
    num_rounds: int
    settings: str = ""
    block_size: int = 16
    max_tokens: int = 160
    tolerance: float = 3e-4
    troubles: tuple[str, ...] = ("unload", "restart", "kill", "gc", "delete", "chain")
    trouble_rate: float = 0.12
    doors: tuple[str, ...] = DOORS


def plan_of(seed: int, home: Path, *, num_rounds: int = 60, **changes: Any) -> Plan:
    """The circumstances that belong to a seed: little memory, little disk, short lives, or not."""
    chance = random.Random(seed)
    choices = {
        "max_batch": (2,),
        "prewarm": ("false",),
        "hot_bytes": (30_000, 200_000, 1_000_000),
        "cache_max_bytes": (300_000, 2_000_000),
        "prefill_slice": (16, 32, 48),
        "kv_ttl_s": (1,),
        "kv_daily_write_bytes": (100_000, 1_000_000),
        "kv_write_queue_bytes": (50_000, 300_000),
        "cold_store": (f'"{home}/cold"',),
    }
    settings = [f"{k} = {chance.choice(v)}\n" for k, v in choices.items() if chance.random() < 0.3]
    sizes = ((16, 160), (16, 160), (16, 700), (32, 300), (256, 1400), (256, 3500))
    block_size, max_tokens = chance.choice(sizes)
    return Plan(
        seed=seed,
        num_rounds=num_rounds,
        settings="".join(settings) + str(changes.pop("settings", "")),
        block_size=block_size,
        max_tokens=max_tokens,
        **changes,
    )


@dataclass
class Ask:
    """A request. `leaves_after_s` has its client leave then; it is not compared.

    With `is_healed` the prompt is what the server remembers of its own answers.
    """

    path: str
    body: Body
    leaves_after_s: float | None = None
    is_healed: bool = False

    def told(self) -> str:
        return f"{self.path} {json.dumps(self.body)}"


class Prompts:
    """Prompts of token ids that share pieces with one another and with what was said before."""

    def __init__(self, chance: random.Random, vocab_size: int, plan: Plan) -> None:
        self._chance = chance
        self._vocab_size = vocab_size
        self._plan = plan
        size = plan.block_size
        lengths = [1, 2, size // 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1]
        self._pieces = [self.fresh(length) for length in (*lengths, 3 * size, 5 * size)]
        self._known: list[list[int]] = [self._built()]
        self._growing: list[int] = []

    def fresh(self, length: int) -> list[int]:
        return [self._chance.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(length)]

    def remember(self, token_ids: list[int]) -> None:
        self._known.append(token_ids)
        del self._known[:-24]

    def growing(self, num_prompts: int) -> list[list[int]]:
        """A conversation, turn by turn."""
        prompts = [self._built()[: self._plan.max_tokens // 2]]
        for _ in range(num_prompts):
            prompts.append(prompts[-1] + self.fresh(self._chance.randint(1, 6)))
        self._known += prompts[-6:]
        return prompts

    def next(self) -> list[int]:
        kind = self._chance.choice(
            (
                *("same", "longer", "shorter", "cut", "border", "other", "joined", "built"),
                *("swapped", "grown", "grown"),
            )
        )
        made = self._changed(kind, list(self._chance.choice(self._known)))
        made = made[: self._plan.max_tokens] or self.fresh(1)
        self.remember(made)
        return made

    def _changed(self, kind: str, one: list[int]) -> list[int]:
        chance, size = self._chance, self._plan.block_size
        at = chance.randrange(len(one))
        match kind:
            case "longer":
                return one + self.fresh(1)
            case "shorter":
                return one[:-1]
            case "cut":
                return one[: at + 1]
            case "border":
                return one[: max(1, at // size * size + chance.choice((-1, 0, 1)))]
            case "other":
                return one[:at] + self.fresh(1) + one[at + 1 :]
            case "joined":
                return one + chance.choice(self._pieces)
            case "swapped":
                return one[:at] + chance.choice(self._pieces) + chance.choice(self._pieces)
            case "built":
                return self._built()
            case "grown":
                if len(self._growing) >= self._plan.max_tokens:
                    self._growing = self._growing[:at]
                self._growing += self.fresh(chance.randint(1, max(2, self._plan.max_tokens // 20)))
                return list(self._growing)
            case _:
                return one

    def _built(self) -> list[int]:
        pieces = self._chance.choices(self._pieces, k=self._chance.randint(1, 5))
        return [token_id for piece in pieces for token_id in piece]


class Asks:
    """Random requests."""

    def __init__(self, chance: random.Random, prompts: Prompts, plan: Plan) -> None:
        self._chance = chance
        self._prompts = prompts
        self._plan = plan
        self._turns = [chance.choices(WORDS, k=chance.randint(1, 8)) for _ in range(5)]
        self._agents: list[str] = []
        self._talks: list[list[Body]] = []
        self._num_agents = 0
        self._doors: dict[str, Callable[[], Ask]] = {
            "tokens": self._tokens,
            "chat": self._chat,
            "talk": self._talk,
            "pictures": self._pictures,
            "messages": self._messages,
            "agent": self._agent,
        }

    def next(self, *, is_alone: bool = True) -> Ask:
        """Talks and agents are in order only where there is one at a time."""
        doors = [one for one in self._plan.doors if is_alone or one not in ("talk", "agent")]
        door = self._chance.choice(doors)
        ask = self._doors[door]()
        if not ask.is_healed and self._chance.random() < 0.08:
            ask.leaves_after_s = self._chance.choice((0.005, 0.02, 0.05, 0.1))
            ask.body["max_tokens"] = 100
        return ask

    def _how(self) -> Body:
        chance = self._chance
        body: Body = {"ignore_eos": chance.random() < 0.9, "temperature": 0.0}
        if chance.random() < 0.25:
            body |= {"temperature": 1.0, "seed": chance.randrange(5)}
        if chance.random() < 0.15:
            body["cache_mode"] = chance.choice(("prefix", "off"))
        if chance.random() < 0.15:
            body["ttl"] = chance.choice((0, 0, 3600))
        if chance.random() < 0.3:
            body["session_id"] = chance.choice("abc")
        return body

    def _tokens(self) -> Ask:
        chance = self._chance
        body = self._how() | {"logprobs": 5, "prompt": self._prompts.next()}
        body["max_tokens"] = chance.choice((0, 1, 1, 2, 5, 20))
        if chance.random() < 0.2:
            body["n"] = chance.choice((2, 3))
        if chance.random() < 0.15:
            body["echo"] = True
            if chance.random() < 0.5:
                body["prompt"] = "".join(chance.choice(self._turns))
                if chance.random() < 0.5:
                    del body["logprobs"]
        if chance.random() < 0.1:
            body["stop"] = chance.choice(("a", " ", "e", "t"))
        return Ask("/v1/completions", body)

    def _messages_of(self) -> list[Body]:
        chance = self._chance
        said = ["".join(turn) for turn in self._turns[: chance.randint(1, 5)]]
        if chance.random() < 0.3:
            said[-1] += chance.choice(WORDS)
        roles = ("user", "assistant", "user", "assistant", "user")
        turns = [{"role": r, "content": t} for r, t in zip(roles, said, strict=False)]
        if turns[-1]["role"] == "assistant":
            turns[-1]["content"] = turns[-1]["content"].rstrip()
        return turns

    def _system(self) -> str:
        return "".join(WORDS[: self._chance.randint(1, 3)] * 3)

    def _chat(self) -> Ask:
        chance = self._chance
        messages = self._messages_of()
        if chance.random() < 0.6:
            messages = [{"role": "system", "content": self._system()}, *messages]
        body = self._how() | {"messages": messages, "logprobs": True, "top_logprobs": 5}
        body["max_tokens"] = chance.choice((1, 2, 8, 20))
        if messages[-1]["role"] == "assistant" and chance.random() < 0.5:
            body["continue_final_message"] = False
        if chance.random() < 0.25:
            body["tools"] = TOOLS
        elif chance.random() < 0.15:
            body["response_format"] = SCHEMA
            body["max_tokens"] = 40
        if chance.random() < 0.15:
            body["n"] = 2
        if chance.random() < 0.12:
            return Ask("/v1/prewarm", self._announced(body))
        return Ask("/v1/chat/completions", body)

    def _announced(self, body: Body) -> Body:
        kind = self._chance.choice(("prompt", "prompt", "pinned", "session"))
        if kind == "session":
            return {"session_id": self._chance.choice("abc")}
        kept = ("messages", "tools", "session_id", "ttl")
        body = {field: body[field] for field in kept if field in body}
        if kind == "pinned":
            body.pop("ttl", None)
            body["pinned"] = True
        return body

    def _talk(self) -> Ask:
        """A conversation that goes on from what was answered."""
        chance = self._chance
        if not self._talks or chance.random() < 0.25:
            self._talks.append([{"role": "system", "content": self._system()}])
            del self._talks[:-4]
        said = "".join(chance.choices(WORDS, k=2))
        messages = [*chance.choice(self._talks), {"role": "user", "content": said}]
        body = {"messages": messages, "logprobs": True, "top_logprobs": 5, "temperature": 0.0}
        body["max_tokens"] = chance.choice((1, 6, 20))
        return Ask("/v1/chat/completions", body, is_healed=True)

    def heard(self, ask: Ask, message: Body) -> None:
        """What a talk was answered; it goes on from there."""
        said = {"role": "assistant", "content": message["content"]}
        if ask.is_healed and "messages" in ask.body and len(ask.body["messages"]) < 16:
            self._talks.append([*ask.body["messages"], said])

    def _pictures(self) -> Ask:
        """A chat with pictures here and there in it."""
        from tests.image_requests import chat_part
        from tests.tiny_vlms import encoded, picture

        chance = self._chance
        ask = self._chat()
        for message in ask.body.get("messages", ()):
            if message["role"] == "user" and chance.random() < 0.6:
                shown = chat_part(encoded(picture(chance.randrange(4))))
                text = {"type": "text", "text": message["content"]}
                message["content"] = [text, shown] if chance.random() < 0.5 else [shown, text]
        return ask

    def _messages(self) -> Ask:
        chance = self._chance
        messages = self._messages_of()
        body = {k: v for k, v in self._how().items() if k != "seed"} | {"messages": messages}
        body["temperature"] = 0.0
        if chance.random() < 0.6:
            block: Body = {"type": "text", "text": self._system()}
            if chance.random() < 0.5:
                block["cache_control"] = {"type": "ephemeral"}
            body["system"] = [block]
        body["max_tokens"] = chance.choice((0, 0, 1, 6))
        if not body["max_tokens"] and messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "look"})
        return Ask("/v1/messages", body)

    def _agent(self) -> Ask:
        chance = self._chance
        how = {"logprobs": True, "top_logprobs": 5, "temperature": 0.0, "ignore_eos": True}
        if not self._agents or chance.random() < 0.25:
            self._num_agents += 1
            name = f"agent-{self._num_agents}"
            copied = chance.choice(self._agents) if self._agents else None
            self._agents.append(name)
            del self._agents[:-6]
            if copied is not None and chance.random() < 0.6:
                self._agents.append(copied)
                return Ask(f"/v1/agents/{copied}/fork", {"id": name}, is_healed=True)
            return Ask("/v1/agents", {"id": name, "system": self._system()}, is_healed=True)
        name = chance.choice(self._agents)
        if chance.random() < 0.1:
            return Ask(f"/v1/agents/{name}/reset", {}, is_healed=True)
        said = [{"role": "user", "content": "".join(chance.choices(WORDS, k=2))}]
        body = how | {"messages": said, "max_tokens": chance.choice((1, 4, 12))}
        return Ask(f"/v1/agents/{name}/generate", body, is_healed=True)
