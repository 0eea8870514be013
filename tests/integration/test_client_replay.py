"""Agent clients' conversations, replayed over restarts: what is computed is what is new."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from runtime.cache.service import KvStore
from runtime.config.settings import ModelSettings, PromptSwitches
from runtime.embedded import HEARTH_TINY
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, ChatPrompt, Message, Tool, Usage
from tests.asking import Answer, ask, script, supervising, supervising_with_store
from tests.client_shapes import (
    LAST_OF_ITS_DAY,
    NEEDLE,
    SHAPES,
    Conversation,
    Said,
    Shape,
    with_clock,
)
from tests.templates import TEMPLATES
from tests.tiny_models import TOOL_CALL, write_model
from tests.waiting import until

log = logging.getLogger(__name__)

CONTEXT = 16_384
FAMILIES = ("qwen3", "qwen3_next", "gemma3_text", "falcon_h1", "gpt_oss")
SLACK_TOKENS = 64
BLOCK_SIZE = 32
THOUGHT = "let me see"
CALLS = f"{THOUGHT}</think><tool_call>{TOOL_CALL}</tool_call><|im_end|>"
SAYS = f"{THOUGHT}</think>while rain falls<|im_end|>"


@dataclass
class Turn:
    """What one request cost."""

    number: int
    usage: Usage
    num_new: int
    is_first_after_start: bool

    @property
    def num_prefilled(self) -> int:
        return self.usage.num_prompt_tokens - self.usage.num_cached_tokens


class Replay:
    """Every client's conversation with one model."""

    def __init__(
        self,
        home: Path,
        shapes: Sequence[Shape] = SHAPES,
        switches: PromptSwitches | None = None,
        template: str = "chatml",
    ) -> None:
        self.home = home
        if template != "chatml":
            (home / "models" / "m" / "chat_template.jinja").write_text(TEMPLATES[template])
        self.opening = "<think>" * (template == "qwen3")
        self.switches = switches or PromptSwitches()
        path = home / "models" / "m" / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(path))
        self.conversations = {shape.client: Conversation(shape) for shape in shapes}
        self.turns: dict[str, list[Turn]] = {shape.client: [] for shape in shapes}
        self.num_healed = 0

    def supervising(self) -> AbstractAsyncContextManager[tuple[Supervisor, KvStore]]:
        models = {"m": ModelSettings(context=CONTEXT)}
        fields = {"kv_disk": True, "block_size": BLOCK_SIZE, "prompt_rules": self.switches}
        return supervising_with_store(self.home, models=models, **fields)

    async def run(self, num_turns: int, num_starts: int, *, at_once: bool = False) -> None:
        """The clients' turns one after the other, or those of all of them at the same time."""
        for _ in range(num_starts):
            async with self.supervising() as (supervisor, kv):
                for number in range(num_turns // num_starts):
                    turns = (
                        self.turn(supervisor, client, conversation, is_first=number == 0)
                        for client, conversation in self.conversations.items()
                    )
                    if at_once:
                        await asyncio.gather(*turns)
                        continue
                    for turn in turns:
                        await turn
                await self.check_counts(kv)

    async def check_counts(self, kv: KvStore) -> None:
        """The worker counts what was healed; nothing that must not happen has happened."""
        turns = [turn for turns in self.turns.values() for turn in turns]
        num_healed = sum(healed(turn.usage) for turn in turns) - self.num_healed
        self.num_healed += num_healed

        def has_arrived() -> bool:
            counts = kv.figures().models.get("m")
            return counts is not None and counts.num_healed_turns == num_healed

        await until(has_arrived, f"{num_healed} turns are counted as healed")
        counts = kv.figures().models["m"]
        assert counts.exact_key_rejected_by_model_lcp == 0
        assert counts.vlm_retreat == counts.num_damaged == 0

    async def turn(
        self, supervisor: Supervisor, client: str, conversation: Conversation, *, is_first: bool
    ) -> None:
        number = conversation.num_turns
        words = CALLS if number % 5 < 4 else SAYS
        words, is_call = self.opening + words, words == CALLS
        ids = self.tokenizer.encode(words, add_special_tokens=False).ids
        answer = await ask(
            supervisor,
            conversation.prompt(),
            sampling=script(ids),
            client=client,
            cache=CacheParams(session_id=conversation.session_id),
        )
        said = said_of(answer)
        assert said.reasoning == THOUGHT, (client, number, answer.text)
        assert said.calls if is_call else said.text == "while rain falls"
        turns = self.turns[client]
        before = turns[-1].usage if turns else None
        known = before.num_prompt_tokens + before.num_output_tokens if before else 0
        usage = answer.finished.usage
        turns.append(Turn(number, usage, usage.num_prompt_tokens - known, is_first))
        conversation.answered(said)


def said_of(answer: Answer) -> Said:
    return Said(answer.text, answer.reasoning, answer.calls)


def healed(usage: Usage) -> int:
    return sum(c.num_places for c in usage.prompt_changes if c.rule == "healed_turn")


def check(replay: Replay, client: str) -> None:
    """Every turn computes its new tokens and next to nothing else, after a restart as well.

    When the date changes that is early in the prompt, all that follows it is another prompt.
    """
    first, *rest = replay.turns[client]
    for turn in rest:
        assert 0 < turn.num_new < 250, (client, turn)
        if turn.number == LAST_OF_ITS_DAY + 1:
            assert turn.usage.num_cached_tokens > 0.75 * first.usage.num_prompt_tokens, client
            continue
        # A tiny model on a busy machine may compute faster than the disk is read.
        if turn.usage.cache.reason != "slower_than_prefill":
            assert turn.num_prefilled <= turn.num_new + SLACK_TOKENS, (client, turn.usage.cache)
        assert healed(turn.usage) == turn.number, (client, turn)
    after_restart = [turn for turn in rest if turn.is_first_after_start]
    assert after_restart
    assert any(turn.usage.num_cached_tokens > turn.num_new for turn in after_restart)
    assert first.usage.num_prompt_tokens > 1.5 * SLACK_TOKENS


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_agents_pay_for_new_tokens_only_over_a_restart(family: str, tmp_path: Path):
    write_model(tmp_path / "models" / "m", family)
    replay = Replay(tmp_path)
    await replay.run(num_turns=6, num_starts=2)
    for client in replay.turns:
        check(replay, client)


async def test_programs_that_ask_one_model_at_once_pay_for_new_tokens_only(tmp_path: Path):
    write_model(tmp_path / "models" / "m")
    replay = Replay(tmp_path)
    assert len(replay.turns) > 2
    await replay.run(num_turns=6, num_starts=2, at_once=True)
    for client in replay.turns:
        check(replay, client)


async def test_a_client_that_completes_a_call_by_its_schema_pays_for_new_tokens_only(
    tmp_path: Path,
):
    """Claude Code sends `replace_all: false` back with every edit that did not say it."""
    write_model(tmp_path / "models" / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "models" / "m" / "tokenizer.json"))
    said = f"<tool_call>{TOOL_CALL}</tool_call><|im_end|>"
    sampling = script(tokenizer.encode(said, add_special_tokens=False).ids)
    properties = {"at": {"type": "integer"}, "all": {"type": "boolean", "default": False}}
    schema = {"type": "object", "properties": properties}
    look = Tool(name="look", parameters=json.dumps(schema))
    asked = (Message(role="user", text="the quick brown fox"),)
    async with supervising(tmp_path) as supervisor:
        prompt = ChatPrompt(messages=asked, tools=(look,))
        first = await ask(supervisor, prompt, sampling=sampling)
        (call,) = first.calls
        for completed, num_healed in (("false", 1), ("true", 0)):
            arguments = f'{{"all": {completed}, "at": 7}}'
            sent = msgspec.structs.replace(call, arguments=arguments)
            result = Message(role="tool", text="rain falls", tool_call_id=call.id)
            turns = (Message(role="assistant", tool_calls=(sent,)), result)
            prompt = ChatPrompt(messages=(*asked, *turns), tools=(look,))
            usage = (await ask(supervisor, prompt)).finished.usage
            assert healed(usage) == num_healed
            known = first.finished.usage.num_prompt_tokens + first.finished.usage.num_output_tokens
            assert (usage.num_cached_tokens >= known) == bool(num_healed)


async def test_a_clock_in_the_system_prompt_costs_what_follows_it_alone(tmp_path: Path):
    """Also with layers that cannot be sliced, and over a restart."""
    write_model(tmp_path / "models" / "m", "qwen3_next")
    replay = Replay(tmp_path, shapes=(with_clock(),))
    await replay.run(num_turns=4, num_starts=2)
    first, *rest = replay.turns["openclaw"]
    for turn in rest:
        if turn.usage.cache.reason != "slower_than_prefill":
            assert turn.usage.num_cached_tokens > 0.75 * first.usage.num_prompt_tokens


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "template"),
    [
        *((family, "chatml") for family in FAMILIES),
        ("qwen3", "qwen3"),
        ("qwen3_next", "qwen3"),
    ],
)
async def test_agents_pay_for_new_tokens_only_for_thirty_turns(
    family: str, template: str, tmp_path: Path
):
    write_model(tmp_path / "models" / "m", family)
    replay = Replay(tmp_path, template=template)
    await replay.run(num_turns=30, num_starts=5)
    for client in replay.turns:
        log.info("%s %s %s %s", family, template, client, figures_of(replay.turns[client]))
        check(replay, client)


def figures_of(turns: Sequence[Turn]) -> dict[str, int]:
    """What a conversation cost after its first turn, in tokens."""
    rest = turns[1:]
    return {
        "prompt": sum(turn.usage.num_prompt_tokens for turn in rest),
        "new": sum(turn.num_new for turn in rest),
        "prefilled": sum(turn.num_prefilled for turn in rest),
        "most_beyond_new": max(turn.num_prefilled - turn.num_new for turn in rest),
    }


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.client)
async def test_a_real_model_recalls_after_thirty_turns_over_restarts(shape: Shape, tmp_path: Path):
    models = {"m": ModelSettings(path=HEARTH_TINY)}
    conversation = Conversation(shape)
    known, beyond = 0, 0
    for start in range(5):
        async with supervising(tmp_path, models=models, kv_disk=True) as supervisor:
            for number in range(6):
                is_asked = (start, number) == (4, 5)
                if is_asked:
                    question = Message(role="user", text="What is the code word?")
                    conversation.later[-1] = question
                prompt = msgspec.structs.replace(conversation.prompt(), tools=())
                answer = await ask(supervisor, prompt, client=shape.client, max_tokens=60)
                usage = answer.finished.usage
                assert not is_asked or NEEDLE in answer.text, (shape.client, answer.text)
                num_prefilled = usage.num_prompt_tokens - usage.num_cached_tokens
                if conversation.num_turns:
                    beyond = max(beyond, num_prefilled - (usage.num_prompt_tokens - known))
                known = usage.num_prompt_tokens + usage.num_output_tokens
                conversation.answered(said_of(answer))
    assert conversation.num_turns == 30
    assert beyond <= SLACK_TOKENS


async def test_a_real_model_still_knows_what_was_said_first(tmp_path: Path):
    models = {"m": ModelSettings(path=HEARTH_TINY)}
    conversations = [Conversation(shape) for shape in SHAPES]
    known = dict.fromkeys((c.shape.client for c in conversations), 0)
    for _ in range(2):
        async with supervising(tmp_path, models=models, kv_disk=True) as supervisor:
            for conversation, number in itertools.product(conversations, range(3)):
                client = conversation.shape.client
                if conversation.num_turns:
                    question = Message(role="user", text="What is the code word?")
                    conversation.later[-1] = question
                prompt = msgspec.structs.replace(conversation.prompt(), tools=())
                answer = await ask(supervisor, prompt, client=client, max_tokens=60)
                usage = answer.finished.usage
                if conversation.num_turns:
                    assert NEEDLE in answer.text, (client, number, answer.text)
                    num_new = usage.num_prompt_tokens - known[client]
                    prefilled = usage.num_prompt_tokens - usage.num_cached_tokens
                    assert prefilled <= num_new + SLACK_TOKENS
                known[client] = usage.num_prompt_tokens + usage.num_output_tokens
                conversation.answered(said_of(answer))


async def test_a_hybrid_resumes_at_message_ends_without_healing(tmp_path: Path):
    write_model(tmp_path / "models" / "m", "qwen3_next")
    replay = Replay(tmp_path, SHAPES[2:3], PromptSwitches(healed_turn=False))
    await replay.run(num_turns=4, num_starts=1)
    first, *rest = replay.turns["opencode"]
    before = first
    for turn in rest:
        num_new = turn.usage.num_prompt_tokens - before.usage.num_prompt_tokens
        assert healed(turn.usage) == 0
        # Thinking is gone from the turn before: it is computed again, and nothing else is.
        assert turn.num_prefilled <= num_new + SLACK_TOKENS, turn
        before = turn
