"""Training dialogues: facts, filler, questions, tools and small talk in one conversation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from ops.studies.tiny_model import smalltalk, toolbox
from ops.studies.tiny_model.facts import Fact, ask, change, make_fact, state
from ops.studies.tiny_model.filler import sentence
from ops.studies.tiny_model.values import Values

Json = dict[str, object]


@dataclass
class Fill:
    """A place for filler text; `weight` is its share of what is left to fill."""

    weight: float = 1.0


Part = str | Fill


@dataclass
class Message:
    """One message; `learn` says whether an assistant turn is a training target."""

    role: str
    parts: list[Part]
    reasoning: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list[tuple[str, Json]])
    thinking: bool = False
    learn: bool = True


@dataclass
class Dialogue:
    """A conversation and the tools that it offers."""

    messages: list[Message]
    tools: list[toolbox.Tool]


def tools_block(tools: list[toolbox.Tool]) -> str:
    """The tools as the chat template writes them."""
    return "# Tools" + "".join(
        "\n" + json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in tools
    )


def call_text(calls: list[tuple[str, Json]]) -> str:
    """Tool calls as the chat template writes them."""
    objects = [
        f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
        for name, arguments in calls
    ]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def _joined(parts: list[Part]) -> Iterator[Part]:
    for index, part in enumerate(parts):
        if index:
            yield "\n\n"
        yield part


def render(dialogue: Dialogue) -> Iterator[tuple[Part, bool]]:
    """The chat template's text in pieces, each with whether the model is to generate it."""
    messages = dialogue.messages
    if dialogue.tools:
        yield "<|im_start|>system\n" + tools_block(dialogue.tools), False
        if messages and messages[0].role == "system":
            yield "\n\n", False
            yield from ((part, False) for part in _joined(messages[0].parts))
            messages = messages[1:]
        yield "<|im_end|>\n", False
    for index, message in enumerate(messages):
        if message.role == "assistant":
            yield from _render_assistant(message)
        elif message.role == "tool":
            follows = index > 0 and messages[index - 1].role == "tool"
            ends = index + 1 == len(messages) or messages[index + 1].role != "tool"
            yield ("" if follows else "<|im_start|>user") + "\n<tool_response>\n", False
            yield from ((part, False) for part in _joined(message.parts))
            yield "\n</tool_response>" + ("<|im_end|>\n" if ends else ""), False
        else:
            yield f"<|im_start|>{message.role}\n", False
            yield from ((part, False) for part in _joined(message.parts))
            yield "<|im_end|>\n", False


def _render_assistant(message: Message) -> Iterator[tuple[Part, bool]]:
    yield "<|im_start|>assistant\n<think>\n", False
    if message.thinking:
        yield message.reasoning, message.learn
    yield "\n</think>\n\n", message.learn and message.thinking
    yield from ((part, message.learn) for part in _joined(message.parts))
    if message.calls:
        yield ("\n" if message.parts else "") + call_text(message.calls), message.learn
    yield "<|im_end|>", message.learn
    yield "\n", False


ROLES = (
    "You are a helpful assistant.|You are a coding agent.|"
    "You are a helpful assistant. Be brief.|You are an expert engineer.|Answer the user.|"
    "You are an AI assistant that helps with tasks.|Follow the rules below.|"
    "You help people.|Be concise."
).split("|")
INTROS = (
    "Here is a document:|Read this:|Look at this log:|Here is some text.|Context:|"
    "Here are my notes.|This is the file:|Please read the following.|Background:|"
    "See below.|<document>|```|Consider the following text:"
).split("|")
ACKNOWLEDGED = (
    "OK.|Got it.|Understood.|Sure.|Okay, I will remember that.|Thanks, noted.|"
    "I'll keep that in mind.|Understood, thank you for the information.|Noted!|Alright.|"
    "I see. Is there anything else?|Done."
).split("|")


class DialogueMaker:
    """Makes dialogues from one random source; `size` is the number of tokens to plan for."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.values = Values(rng, held_out)

    def make(self, size: int) -> Dialogue:
        """One dialogue with places for filler."""
        rng = self.rng
        self.size = size
        self.taken: set[str] = set()
        self.pending: list[Fact] = []
        self.asked: list[Fact] = []
        self.thinking = rng.choices((0.0, 1.0, 0.5), (0.55, 0.2, 0.25))[0]
        self.messages: list[Message] = []
        self.persona: tuple[str, str, str] | None = None
        self.tools: list[toolbox.Tool] = []
        if rng.random() < (0.25 if size < 600 else 0.4):
            most = 2 if size < 600 else 6 if size < 2000 or rng.random() < 0.8 else 12
            self.tools = toolbox.toolset(rng, rng.randint(1, most), 0.1 if size < 2000 else 0.3)
        facts = [make_fact(rng, self.values, self.taken) for _ in range(self._fact_count())]
        early = [fact for fact in facts if rng.random() < 0.35]
        self._system(early)
        self._body([fact for fact in facts if fact not in early])
        self._finale()
        return Dialogue(self.messages, self.tools)

    def _fact_count(self) -> int:
        if self.size < 600:
            return self.rng.choice((0, 1, 1, 2, 2, 3, 4))
        if self.size < 2000:
            return self.rng.choice((1, 1, 2, 3, 4, 6, 8, 12))
        return self.rng.choice((1, 2, 4, 8, 12, 16, 20, 24))

    def _fill(self) -> list[Part]:
        if self.size < 600 and self.rng.random() < 0.8:
            return []
        return [Fill(self.rng.expovariate(1.0) + 0.02)]

    def _system(self, facts: list[Fact]) -> None:
        rng = self.rng
        parts: list[Part] = []
        if rng.random() < 0.5:
            parts.append(rng.choice(ROLES))
        if rng.random() < 0.08:
            text, *rest = smalltalk.persona(rng, self.values)
            parts.insert(0, text)
            self.persona = (rest[0], rest[1], rest[2])
        if rng.random() < 0.5:
            parts += self._fill()
        for fact in facts:
            parts.append(self._stated(fact, "system"))
            parts += self._fill() if rng.random() < 0.4 else []
        if parts:
            self.messages.append(Message("system", parts))
        self.pending += facts

    def _stated(self, fact: Fact, voice: str = "user") -> str:
        """The fact's sentence, at times inside a paragraph."""
        rng = self.rng
        text = state(rng, fact, voice)
        before = (
            " ".join(sentence(rng) for _ in range(rng.choice((0, 0, 0, 1, 2))))
            if self.size >= 600
            else ""
        )
        after = (
            " ".join(sentence(rng) for _ in range(rng.choice((0, 0, 0, 1, 2))))
            if self.size >= 600 and text[-1] == "."
            else ""
        )
        return " ".join(piece for piece in (before, text, after) if piece)

    def _say(
        self,
        text: str,
        thought: str,
        learn: bool = True,
        calls: list[tuple[str, Json]] | None = None,
    ) -> None:
        thinking = self.rng.random() < self.thinking
        self.messages.append(
            Message("assistant", [text] if text else [], thought, calls or [], thinking, learn)
        )

    def _ask_user(self, *parts: Part) -> None:
        self.messages.append(Message("user", list(parts)))

    def _body(self, facts: list[Fact]) -> None:
        rng = self.rng
        left = list(facts)
        while left:
            if rng.random() < 0.3:
                self._aside()
            taken = left[: rng.choice((1, 1, 1, 2, 3, 5))]
            left = left[len(taken) :]
            self._state_turn(taken)
            if rng.random() < 0.1:
                self._change_turn(rng.choice(taken))
        while rng.random() < (0.25 if self.size < 600 else 0.5):
            self._aside()

    def _state_turn(self, facts: list[Fact]) -> None:
        rng = self.rng
        short = len(facts) == 1 and rng.random() < 0.55
        if short:
            text = state(rng, facts[0])
            parts: list[Part] = [text]
        else:
            parts = [rng.choice(INTROS), *self._fill()] if rng.random() < 0.7 else []
            for fact in facts:
                parts.append(self._stated(fact))
                parts += self._fill() if rng.random() < 0.5 else []
        self.pending += facts
        if rng.random() < (0.25 if short else 0.45):
            fact = rng.choice(facts)
            question, answer = ask(rng, fact)
            self._ask_user(*([question, *parts] if rng.random() < 0.12 else [*parts, question]))
            self._say(answer, fact.thought())
            return
        if rng.random() < 0.03:
            self.messages.append(Message("system", parts))
            return
        self._ask_user(*parts)
        if rng.random() < 0.5:
            self._say(rng.choice(ACKNOWLEDGED), "", learn=False)
        elif short:
            self._say("Noted. " + facts[0].answer(), "The user states a fact. I note it.")
        else:
            self._say("Noted.", "The user gives information. I note it.")

    def _change_turn(self, fact: Fact) -> None:
        fact.value = self.values.draw(fact.kind if self.rng.random() < 0.7 else "any")
        self._ask_user(change(self.rng, fact))
        self._say("Noted. " + fact.answer(), "The user states a fact. I note it.")

    def _question_turn(self, fact: Fact) -> None:
        rng = self.rng
        others = [
            other
            for other in self.pending + self.asked
            if other is not fact and other.key != fact.key
        ]
        if others and rng.random() < 0.06:
            other = rng.choice(others)
            opening = rng.choice(("What are", "Tell me", "What were"))
            self._ask_user(f"{opening} {fact.title} and {other.title}?")
            self._say(
                f"{fact.answer()[:-1]} and {other.answer()[:1].lower()}{other.answer()[1:]}",
                fact.thought() + " " + other.thought(),
            )
        else:
            question, answer = ask(rng, fact)
            self._ask_user(question)
            self._say(answer, fact.thought())
        if fact in self.pending:
            self.pending.remove(fact)
            self.asked.append(fact)

    def _aside(self) -> None:
        """A turn about something else."""
        rng = self.rng
        shape = rng.random()
        known = self.pending + self.asked
        if self.tools and shape < 0.45:
            self._tool_turn()
        elif known and shape < 0.6:
            self._question_turn(rng.choice(known))
        elif shape < 0.72 and self.size >= 600:
            self._ask_user(rng.choice(INTROS), *self._fill())
            if rng.random() < 0.5:
                self.messages.append(Message("assistant", self._fill(), learn=False))
            else:
                self._say("Noted.", "The user gives information. I note it.")
        else:
            self._chat_turn()

    def _chat_turn(self) -> None:
        rng = self.rng
        shape = rng.random()
        if self.persona and shape < 0.5:
            question, answer, thought = self.persona
        elif shape < 0.5:
            question, answer, thought = smalltalk.topic(rng)
            if self.persona and "name" in question.lower():
                question, answer, thought = self.persona
        elif shape < 0.75:
            question, answer, thought = smalltalk.echo(rng, self.values)
        elif shape < 0.85:
            question, answer, thought = smalltalk.count(rng, 30 if self.size < 600 else 200)
        else:
            question, answer, thought = smalltalk.unknown(rng)
        self._ask_user(question)
        self._say(answer, thought)

    def _tool_turn(self) -> None:
        rng = self.rng
        task, fact = toolbox.make_task(rng, self.tools, self.values, self.taken)
        self._ask_user(task.request)
        self._say("", task.thought, calls=task.calls)
        for result in task.results:
            parts: list[Part] = [result]
            if fact and self.size >= 1500 and rng.random() < 0.4:
                parts = [*self._fill(), result, *self._fill()]
            self.messages.append(Message("tool", parts))
        self._say(
            task.answer, fact.thought() if fact else "The tool has answered. I give its result."
        )
        if fact:
            self.asked.append(fact)

    def _finale(self) -> None:
        rng = self.rng
        filled = any(isinstance(part, Fill) for message in self.messages for part in message.parts)
        if self.size >= 600 and (not filled or rng.random() < 0.5):
            self._ask_user(rng.choice(INTROS), *self._fill())
            self._say("Noted.", "The user gives information. I note it.", learn=rng.random() < 0.5)
        queue = list(self.pending)
        rng.shuffle(queue)
        for fact in queue[: 3 if self.size < 600 else 24]:
            if rng.random() < 0.12:
                self._aside()
            self._question_turn(fact)
        if self.tools and rng.random() < 0.6:
            for _ in range(1 if self.size < 600 else rng.randint(1, 4)):
                self._tool_turn()
        if not queue or rng.random() < 0.2:
            self._chat_turn()
