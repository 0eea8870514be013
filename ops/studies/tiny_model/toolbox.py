"""Tools, requests that fit one of them, the calls, their results and the answers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from ops.studies.tiny_model import words
from ops.studies.tiny_model.facts import Fact, ask, make_fact, state
from ops.studies.tiny_model.filler import sentence
from ops.studies.tiny_model.tool_texts import COMMANDS, GENERIC, KNOWN, MADE_UP_VERBS, MORE, QUOTES
from ops.studies.tiny_model.values import Values

Json = dict[str, object]


@dataclass
class Tool:
    """One tool as the request's `tools` list names it."""

    name: str
    description: str
    params: list[tuple[str, str]]  # (name, kind of value)
    requests: list[str]
    optional: list[str] = field(default_factory=list[str])

    def schema(self) -> Json:
        """The OpenAI form of the tool."""
        props: Json = {
            name: {"type": "integer" if kind == "integer" else "string"}
            for name, kind in self.params
        }
        props |= {name: {"type": "boolean"} for name in self.optional}
        parameters: Json = {
            "type": "object",
            "properties": props,
            "required": [name for name, _ in self.params],
        }
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }


@dataclass
class Task:
    """A request, the calls it needs, what each returns, and the answer."""

    request: str
    calls: list[tuple[str, Json]]
    results: list[str]
    thought: str
    answer: str
    needle: str  # the part of the result that the answer must hold


def argument(rng: random.Random, values: Values, kind: str) -> str:
    """A value for a parameter of `kind`."""
    if kind == "command":
        text = rng.choice(COMMANDS)
        for slot, value in (("{p}", "path"), ("{w}", "word"), ("{i}", "integer")):
            while slot in text:
                text = text.replace(slot, values.draw(value), 1)
        return text.replace("{d}", argument(rng, values, "folder")).replace(
            "{u}", argument(rng, values, "url")
        )
    if kind == "expression":
        parts = [values.draw("integer") for _ in range(rng.choice((2, 2, 3)))]
        return (
            f" {rng.choice('+-*/')} ".join(parts)
            if rng.random() < 0.8
            else rng.choice("+-*/").join(parts)
        )
    if kind == "folder":
        path = values.draw("path")
        return rng.choice(
            (
                path.rpartition("/")[0] or ".",
                "src",
                "/tmp",
                ".",
                f"{words.common(rng)}/{words.made_up(rng)}",
            )
        )
    if kind == "glob":
        folder = rng.choice(("", "**/", words.common(rng) + "/"))
        return f"{folder}*.{rng.choice('py md txt rs ts json'.split())}"
    if kind == "url":
        host = f"{words.made_up(rng)}.{rng.choice(('com', 'org', 'io', 'dev'))}"
        return f"https://{host}{rng.choice(('', '/' + values.draw('word')))}"
    if kind == "email":
        return f"{words.made_up(rng)}@{words.made_up(rng)}.{rng.choice(('com', 'org', 'net'))}"
    if kind == "symbol":
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))
    if kind == "language":
        return rng.choice(words.LANGUAGES)
    return values.draw(kind)


def known_tool(rng: random.Random) -> Tool:
    """A tool that clients really send, with the names of one of many clients."""
    names, description, params, requests = rng.choice(KNOWN)
    picked = [
        (rng.choice(entry.partition(":")[0].split("/")), entry.partition(":")[2])
        for entry in params.split()
    ]
    return Tool(rng.choice(names.split()), description, picked, requests.split("|"))


def made_up_tool(rng: random.Random) -> Tool:
    """A tool nobody has seen: its name and description name a verb and a noun."""
    verb = rng.choice(MADE_UP_VERBS) if rng.random() < 0.75 else words.made_up(rng, 2, 2)
    noun = (
        rng.choice(words.OFFICE + words.NOUNS) if rng.random() < 0.75 else words.made_up(rng, 2, 2)
    )
    name = rng.choice(
        (
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{noun}_{verb}",
            f"{verb}{noun.capitalize()}",
            f"{verb}-{noun}",
        )
    )
    pool = [
        noun,
        f"{noun}_id",
        "name",
        "id",
        "key",
        "target",
        "value",
        "label",
        *rng.sample(words.OFFICE, 3),
        words.made_up(rng),
    ]
    params = [
        (param, rng.choice(("any", "any", "word", "integer", "path", "phrase")))
        for param in dict.fromkeys(rng.sample(pool, rng.choice((1, 1, 1, 2, 2, 3))))
    ]
    requests = [
        request.replace("{V}", verb.capitalize())
        .replace("{v}", verb)
        .replace("{n}", noun)
        .replace("{t}", name)
        .replace("{p}", params[0][0])
        for request in rng.sample(GENERIC, 4)
    ]
    extra = "".join(
        rng.choice(MORE).replace("{p}", param).replace("{x}", f"{{{index + 1}}}")
        for index, (param, _) in enumerate(params[1:])
    )
    requests = [
        (request[:-1] if extra and request[-1] in ".?" else request) + extra for request in requests
    ]
    return Tool(
        name,
        rng.choice(
            (
                f"{verb.capitalize()} a {noun}.",
                f"{verb.capitalize()} the given {noun}.",
                f"{verb.capitalize()} one {noun} by its {params[0][0]}.",
            )
        ),
        params,
        requests,
    )


def toolset(rng: random.Random, size: int, wordy: float = 0.15) -> list[Tool]:
    """`size` tools with distinct names; with chance `wordy` their descriptions run on."""
    tools: dict[str, Tool] = {}
    while len(tools) < size:
        tool = known_tool(rng) if rng.random() < 0.5 else made_up_tool(rng)
        if any(tool.description == other.description for other in tools.values()):
            continue
        tools.setdefault(tool.name, tool)
    for tool in tools.values():
        if rng.random() < 0.15:
            tool.optional = [rng.choice(words.OFFICE) + "_" + rng.choice(words.VERBS)]
    if rng.random() < wordy:
        for tool in tools.values():
            tool.description += " " + " ".join(sentence(rng) for _ in range(rng.randint(1, 6)))
    return list(tools.values())


def _request(rng: random.Random, tool: Tool, values: Values) -> tuple[str, Json]:
    while True:
        arguments = [argument(rng, values, kind) for _, kind in tool.params]
        if len(set(arguments)) == len(arguments):
            break
    text = rng.choice(tool.requests)
    for index, (value, (_, kind)) in enumerate(zip(arguments, tool.params, strict=True)):
        quote = "{}" if kind == "integer" or '"' in value or "'" in value else rng.choice(QUOTES)
        text = text.replace(f"{{{index}}}", quote.replace("{}", value))
    if rng.random() < 0.15:
        text = rng.choice(("Please help me. ", "Hi. ", "Now ", "OK, ", "Next: ", "Thanks! ")) + text
    call: Json = {
        name: int(value) if kind == "integer" else value
        for (name, kind), value in zip(tool.params, arguments, strict=True)
    }
    return text, call


def _result(rng: random.Random, values: Values) -> tuple[str, str, str]:
    """(result, answer, needle) of a call."""
    shape = rng.random()
    if shape < 0.35:
        text = rng.choice(
            (
                values.draw(),
                values.draw("digits"),
                f"{values.draw('integer')} {rng.choice(words.OFFICE)}s",
                f"{rng.randint(-20, 40)} degrees and {rng.choice(words.ADJECTIVES)}",
                "ok",
                "done",
                sentence(rng),
            )
        )
        return text, f"The result is {text.rstrip('.')}.", text.rstrip(".")
    if shape < 0.6:
        keys = rng.sample(
            [*words.OFFICE[::3], "temperature", "status", "result", "value", "price", "time"],
            rng.randint(1, 3),
        )
        data = {
            key: values.draw("integer") if rng.random() < 0.4 else values.draw() for key in keys
        }
        loaded = {
            key: int(value) if value.isdigit() and value[0] != "0" else value
            for key, value in data.items()
        }
        return (
            json.dumps(loaded, ensure_ascii=False),
            "The result: " + ", ".join(f"{key} {value}" for key, value in data.items()) + ".",
            next(iter(data.values())),
        )
    if shape < 0.75:
        lines = [values.draw("path") for _ in range(rng.randint(2, 5))]
        return "\n".join(lines), "The result: " + ", ".join(lines) + ".", lines[0]
    if shape < 0.87:
        reason = rng.choice(
            (
                "no such file",
                "not found",
                "permission denied",
                "timeout",
                f"{words.common(rng)} is missing",
                f"exit code {rng.randint(1, 255)}",
            )
        )
        return (
            rng.choice((f"error: {reason}", f"Error: {reason}")),
            f"The tool failed: {reason}.",
            reason,
        )
    if shape < 0.9:
        return "", "The tool returned nothing.", "nothing"
    lines = [
        " ".join(words.common(rng) for _ in range(rng.randint(2, 7)))
        for _ in range(rng.randint(7, 20))
    ]
    return "\n".join(lines), f"The result begins with: {lines[0]}", lines[0]


def make_task(
    rng: random.Random, tools: list[Tool], values: Values, taken: set[str]
) -> tuple[Task, Fact | None]:
    """A task for one of `tools`, and the fact its result states, if the request asks for one."""
    tool = rng.choice(tools)
    request, call = _request(rng, tool, values)
    thought = f"The request fits {tool.name}. I call it."
    shape = rng.random()
    if shape < 0.08:
        second, other = _request(rng, tool, values)
        one, two = values.draw(), values.draw()
        return Task(
            f"{request} {second}",
            [(tool.name, call), (tool.name, other)],
            [one, two],
            thought,
            f"The results are {one} and {two}.",
            two,
        ), None
    if shape < 0.28:
        fact = make_fact(rng, values, taken)
        question, answer = ask(rng, fact)
        lines = [sentence(rng) for _ in range(rng.randint(0, 6))]
        lines.insert(rng.randint(0, len(lines)), state(rng, fact, "system"))
        return Task(
            f"{request} {question}",
            [(tool.name, call)],
            [rng.choice(("\n", " ")).join(lines)],
            thought,
            answer,
            fact.value,
        ), fact
    result, answer, needle = _result(rng, values)
    return Task(request, [(tool.name, call)], [result], thought, answer, needle), None
