"""The replay of the benchmark, in short: over restarts nothing is prefilled but what is new."""

from pathlib import Path

from ops.bench.replay import AGENTS, replay


async def test_two_siblings_prefill_only_what_is_new_over_a_restart(tmp_path: Path):
    result = await replay(tmp_path, num_turns=6, restart_every=3)
    assert len(result.turns) == 6 * len(AGENTS)
    for number, turn in enumerate(result.turns):
        assert turn.recalls, turn
        assert turn.num_prefilled_tokens <= turn.num_new_tokens, (number, turn)
    first, *siblings = result.turns[: len(AGENTS)]
    rest = result.turns[len(AGENTS) :]
    assert first.num_prefilled_tokens == first.num_prompt_tokens
    for sibling in siblings:
        assert sibling.num_prefilled_tokens == sibling.num_new_tokens
        assert sibling.num_new_tokens < 0.1 * first.num_prompt_tokens
    assert all(turn.tier != "none" for turn in rest)
    after_restart = [turn for turn in rest if turn.is_first_after_start]
    assert len(after_restart) == len(AGENTS)
    assert result.ratio <= 1.0
