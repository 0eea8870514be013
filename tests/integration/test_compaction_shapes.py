"""What a compaction costs in the shapes of clients that make one by themselves."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, ChatPrompt, Tokens
from tests.asking import Answer, ask, script
from tests.client_shapes import Conversation, prompt_after_summary, summary_prompt
from tests.integration.test_client_replay import BLOCK_SIZE, SLACK_TOKENS, Replay
from tests.tiny_models import write_model

log = logging.getLogger(__name__)

SUMMARY = "let me see</think>while rain falls<|im_end|>"
APPENDED = ("claude-code", "codex", "opencode")
FLATTENED = ("pi",)


async def ids_of(supervisor: Supervisor, prompt: ChatPrompt, client: str) -> tuple[int, ...]:
    answer = await ask(supervisor, prompt, client=client, work="tokenize")
    return next(one.token_ids for one in answer.chunks if isinstance(one, Tokens))


def num_same(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


class Compaction:
    """The compaction of one client's conversation, and the request after it."""

    def __init__(self, replay: Replay, conversation: Conversation) -> None:
        self._replay = replay
        self._conversation = conversation

    async def _ask(self, supervisor: Supervisor, prompt: ChatPrompt) -> Answer:
        ids = self._replay.tokenizer.encode(SUMMARY, add_special_tokens=False).ids
        return await ask(
            supervisor,
            prompt,
            sampling=script(ids),
            client=self._conversation.shape.client,
            cache=CacheParams(session_id=self._conversation.session_id),
        )

    async def summarise(self, supervisor: Supervisor) -> Answer:
        return await self._ask(supervisor, summary_prompt(self._conversation))

    async def go_on(self, supervisor: Supervisor) -> tuple[Answer, int]:
        """The first answer after it, and how much of its prompt was the conversation's."""
        client = self._conversation.shape.client
        prompt = prompt_after_summary(self._conversation, "rain falls on the hearth")
        before = await ids_of(supervisor, self._conversation.prompt(), client)
        after = await ids_of(supervisor, prompt, client)
        return await self._ask(supervisor, prompt), num_same(before, after)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_a_summary_that_is_asked_for_at_the_end_reads_the_history_from_the_cache(
    family: str, tmp_path: Path
) -> None:
    """And what the first request after it has in common with it is known, after a restart too."""
    write_model(tmp_path / "models" / "m", family)
    replay = Replay(tmp_path)
    await replay.run(num_turns=3, num_starts=1)
    compactions = {name: Compaction(replay, one) for name, one in replay.conversations.items()}
    async with replay.supervising() as (supervisor, _):
        for client, compaction in compactions.items():
            last = replay.turns[client][-1].usage
            usage = (await compaction.summarise(supervisor)).finished.usage
            log.info("%s %s summary %s", family, client, usage)
            known = last.num_prompt_tokens + last.num_output_tokens
            if client in APPENDED:
                assert usage.num_cached_tokens >= 0.98 * known - 1, (client, usage)
            else:
                # Another system prompt and no tools: nothing of it is the same but its opening.
                assert usage.num_cached_tokens < SLACK_TOKENS, (client, usage)
    async with replay.supervising() as (supervisor, _):
        for client, compaction in compactions.items():
            answer, num_common = await compaction.go_on(supervisor)
            usage = answer.finished.usage
            log.info("%s %s next %s of %s", family, client, usage, num_common)
            assert num_common > 2 * SLACK_TOKENS
            # Taken up where a state was kept, at a message's end, or from disk at a block's.
            slack = SLACK_TOKENS if family == "qwen3_next" else BLOCK_SIZE
            assert usage.num_cached_tokens >= num_common - slack, (client, usage.cache)
