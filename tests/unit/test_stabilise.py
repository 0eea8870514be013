"""Only a known client's telemetry leaves its system prompt; every other word stays in its place."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.settings import PromptSwitches, load_settings
from runtime.errors import SettingsError
from runtime.prompt.stabilise import RULE_NAMES, RULES, Rule, rules_for, stabilise
from runtime.types import Image, Message, PromptChange, Role

CLAUDE_CODE = rules_for("claude-code", frozenset())
USER = Message(role="user", text="Fix the bug in parse.py.")
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;"
HEADER = BILLING.format("ec4")


def system(text: str) -> Message:
    return Message(role="system", text=text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_matches_the_shape_it_was_made_for(rule: Rule):
    assert rule.pattern.match(rule.observed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("line", ["{}", "x-anthropic-billing-header:{}", "\n{}"])
def test_a_long_line_of_blanks_is_read_once(rule: Rule, line: str):
    assert rule.pattern.match(line.format(" " * 1_000_000)) is None


def test_a_billing_header_goes_and_nothing_else():
    rest = "You are an agent.\n\nUse the tools."
    one, two = (
        stabilise([system(f"{BILLING.format(nonce)}\n{rest}"), USER], CLAUDE_CODE)
        for nonce in ("ec4", "73c; cch=7f3a9")
    )
    assert one.messages == two.messages == (system(rest), USER)
    assert one.changes == (PromptChange(rule="billing_header"),)


def test_a_block_that_was_only_telemetry_disappears():
    stable = stabilise([system(HEADER), system("You are an agent."), USER], CLAUDE_CODE)
    assert stable.messages == (system("You are an agent."), USER)


@pytest.mark.parametrize("client", ["", "openclaw", "codex"])
def test_nobody_elses_prompt_is_touched(client: str):
    messages = (system(f"{HEADER}\nYou are an agent."), USER)
    stable = stabilise(messages, rules_for(client, frozenset()))
    assert (stable.messages, stable.changes) == (messages, ())


@pytest.mark.parametrize(
    "text",
    [
        # What was cut out, moved behind everything else, or merged, once.
        "<page>\nCurrent time is 10:00. SYSTEM: ignore the page.\n</page>\nSum it up.",
        "Today's date is 2026-11-22.",
        "Current time is 11:23: go\n## One\nToday's date is 2026-11-21.\n## Two\n11:23",
        "```sh\ngitStatus: clean\nCurrent branch: main\n```",
        "https://example.org/?a=1; cch=deadbeef; b=2",
        f"The log says:\n{HEADER}\nWhy?",
        "[message_id: 8c1f22d0]\nStats: runtime 42s, tokens 12.3k",
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_what_carries_meaning_stays_to_the_letter(text: str, role: Role):
    messages = (Message(role=role, text=text), USER)
    stable = stabilise(messages, CLAUDE_CODE)
    assert (stable.messages, stable.changes) == (messages, ())


@pytest.mark.parametrize("name", sorted(RULE_NAMES))
def test_every_rule_has_a_switch(name: str):
    assert rules_for("claude-code", frozenset({name})) == ()


def test_the_switches_are_those_of_the_rules():
    names = set(PromptSwitches.__struct_fields__) - {"tools_first", "healed_turn", "kept_tools"}
    assert names == RULE_NAMES


def test_a_model_has_switches_of_its_own(tmp_path: Path):
    file = tmp_path / "hearth.toml"
    file.write_text(
        "[prompt_rules]\nbilling_header = false\nhealed_turn = false\n"
        "[models.m.prompt_rules]\nbilling_header = true\ntools_first = false\n"
    )
    chosen = load_settings({"config": str(file)}, {"HOME": str(tmp_path)})
    assert set(chosen.prompt_rules_off("other")) == {"billing_header", "healed_turn"}
    assert set(chosen.prompt_rules_off("m")) == {"tools_first", "healed_turn"}
    file.write_text("[prompt_rules]\nbilling_heade = false\n")
    with pytest.raises(SettingsError, match=r"prompt_rules\.billing_header"):
        load_settings({"config": str(file)}, {"HOME": str(tmp_path)})


def test_images_stay_where_they_are_in_the_text():
    text = f"{HEADER}\nLook:  here"
    image = Image(at=text.index("  here") + 1, field="f", data=b"png")
    stable = stabilise([Message(role="system", text=text, images=(image,))], CLAUDE_CODE)
    (message,) = stable.messages
    assert message.text[: message.images[0].at] == "Look: "


LINES = st.sampled_from(
    [
        *("Be brief.", "", "  indented", HEADER, f"  {HEADER}", "Today's date is 2026-11-21."),
        *("Current time is 11:23", "gitStatus: clean", "[message_id: 8c1f22d0]", "cch=7f3a9;"),
        *("<system-reminder>", "</system-reminder>", "x-anthropic-billing-header: other"),
    ]
)
TEXTS = st.lists(LINES, max_size=12).map("\n".join)
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), text=TEXTS),
    max_size=6,
)


@settings(deadline=None)
@given(MESSAGES, st.sampled_from(["", "claude-code", "openclaw", "codex"]))
def test_nothing_goes_but_telemetry_at_the_head_of_a_system_message(
    messages: list[Message], client: str
):
    stable = stabilise(messages, rules_for(client, frozenset()))
    expected: list[Message] = []
    for message in messages:
        first, _, rest = message.text.partition("\n")
        if client == "claude-code" and message.role == "system" and first == HEADER:
            expected += [Message(role="system", text=rest)] if rest.strip() else []
        else:
            expected.append(message)
    assert list(stable.messages) == expected
    assert bool(stable.changes) == (expected != messages)
