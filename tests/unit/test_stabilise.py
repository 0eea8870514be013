"""What changes from turn to turn leaves the early prompt; what carries meaning stays or moves."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import SettingsError
from runtime.prompt.rules import RULE_NAMES, RULES, Rule, rules_for
from runtime.prompt.stabilise import CLOSE, OPEN, place, stabilise
from runtime.prompt.switches import PromptSwitches
from runtime.settings import load_settings
from runtime.types import Image, Message, PromptChange

ALL = rules_for("", frozenset())
USER = Message(role="user", text="Fix the bug in parse.py.")
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;"
GIT_STATUS = """\
gitStatus: This is the git status at the start of the conversation. Note that this status is a \
snapshot in time, and will not update during the conversation.
Current branch: main

Main branch (you will usually use this for PRs): main

Status:
 M parse.py
?? notes.md

Recent commits:
0a1b2c3 Begin
1b2c3d4 Parse numbers"""


def system(text: str) -> Message:
    return Message(role="system", text=text)


def lines_of(*texts: str) -> Counter[str]:
    return Counter(line for text in texts for line in text.split("\n") if line.strip())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_matches_the_shape_it_was_made_for(rule):
    assert rule.pattern.search(rule.observed.replace("[...]", "Note this.")), rule.observed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("line", ["{}", "<system-reminder>{}x", "{date}{}<b", '{}"message_id": "'])
def test_a_long_line_of_blanks_is_read_once(rule: Rule, line: str):
    # Read again from each of its blanks, it would take hours.
    text = line.format(" " * 1_000_000, date="Today's date is 2026-11-21")
    assert rule.pattern.search(text) is None


def test_a_billing_header_goes_and_nothing_else():
    rest = "You are an agent.\n\nUse the tools."
    one, two = (
        stabilise([system(f"{BILLING.format(nonce)}\n{rest}"), USER], ALL)
        for nonce in ("ec4", "73c")
    )
    assert one.messages == two.messages == (system(rest), USER)
    assert one.moved == ()
    assert one.changes == (PromptChange(rule="billing_header"),)


def test_a_block_that_was_only_telemetry_disappears():
    stable = stabilise([system(BILLING.format("ec4")), system("You are an agent."), USER], ALL)
    assert stable.messages == (system("You are an agent."), USER)


def test_a_nonce_goes_out_of_its_line():
    text = "x-client-header: cc_entrypoint=cli; cch={}; v=2\nYou are an agent."
    one, two = (stabilise([system(text.format(n)), USER], ALL) for n in ("7f3a9", "00bb1"))
    assert one.messages == two.messages
    assert one.messages[0].text == "x-client-header: cc_entrypoint=cli; v=2\nYou are an agent."


@pytest.mark.parametrize(
    "line",
    [
        "Today's date is 2026-11-21.",
        "  Today's date: Sat Nov 21 2026",
        "Today's date: Sat, Nov 21, 2026",
        "The current date is: Saturday, November 21, 2026 (formatted for the user's locale).",
        "  <current_date>2026-11-21</current_date>",
        "<system-reminder>The current date is: Saturday, November 21, 2026.</system-reminder>",
        "- Current date: 11/21/2026",
        "Current time is Saturday, November 21st, 2026 - 11:23 (UTC)",
    ],
)
def test_dates_and_times_move_to_the_end_whole(line: str):
    stable = stabilise([system(f"Be brief.\n{line}\nUse the tools."), USER], ALL)
    if line.strip().startswith("Today's date: Sat Nov"):
        assert stable.moved == (line,)
    assert stable.messages[0].text == "Be brief.\nUse the tools."
    placed = place(stable.messages, stable.moved)
    assert placed[-1].text == f"{USER.text}\n\n{OPEN}\n{line.strip()}\n{CLOSE}"


def test_the_git_status_moves_whole_and_no_further():
    stable = stabilise([system(f"Be brief.\n\n{GIT_STATUS}\nAnswer in French."), USER], ALL)
    assert stable.messages[0].text == "Be brief.\n\nAnswer in French."
    assert stable.moved == (GIT_STATUS,)


def test_a_first_message_without_its_date_is_the_same_conversation():
    reminder = Message(role="user", text=f"{OPEN}\nThe current date is: 2026-11-21.\n{CLOSE}")
    with_date, without = stabilise([reminder, USER], ALL), stabilise([USER], ALL)
    assert with_date.messages == without.messages == (USER,)
    assert len(with_date.moved) == 1


def test_what_a_user_says_later_is_never_moved():
    later = Message(role="user", text="Today's date is 2026-11-21.\nIs that right?")
    messages = (USER, Message(role="assistant", text="Current time is 11:23."), later)
    assert stabilise(messages, ALL).messages == messages


def test_ids_and_run_statistics_move_for_the_client_that_sends_them():
    text = "[message_id: 8c1f22d0]\nStats: runtime 42s, tokens 12.3k\nGo on."
    messages = (Message(role="user", text=text),)
    assert stabilise(messages, ALL).messages == messages
    stable = stabilise(messages, rules_for("openclaw", frozenset()))
    assert stable.messages[0].text == "Go on."
    assert stable.moved == ("[message_id: 8c1f22d0]", "Stats: runtime 42s, tokens 12.3k")


def test_tool_output_that_is_frozen_once_sent_stays():
    result = Message(role="tool", text="Chunk ID: 1f62e7\nWall time: 0.0000 seconds\nok")
    assert stabilise((USER, result), ALL).messages == (USER, result)


@pytest.mark.parametrize("name", sorted(RULE_NAMES))
def test_every_rule_has_a_switch(name: str):
    names = {rule.name for rule in rules_for("openclaw", frozenset({name}))}
    assert name not in names
    assert stabilise((system(BILLING.format("ec4")), USER), ()).changes == ()


def test_the_switches_are_those_of_the_rules():
    names = set(PromptSwitches.__struct_fields__) - {"tools_first", "healed_turn"}
    assert names == {rule.name for rule in RULES if rule.kind != "keep"}


def test_a_model_has_switches_of_its_own(tmp_path: Path):
    file = tmp_path / "hearth.toml"
    file.write_text(
        "[prompt_rules]\ncurrent_date = false\nhealed_turn = false\n"
        "[models.m.prompt_rules]\ncurrent_date = true\ngit_status = false\n"
    )
    chosen = load_settings({"config": str(file)}, {"HOME": str(tmp_path)})
    assert set(chosen.prompt_rules_off("other")) == {"current_date", "healed_turn"}
    assert set(chosen.prompt_rules_off("m")) == {"git_status", "healed_turn"}
    file.write_text("[prompt_rules]\ncurrent_dat = false\n")
    with pytest.raises(SettingsError, match=r"prompt_rules\.current_date"):
        load_settings({"config": str(file)}, {"HOME": str(tmp_path)})


def test_images_stay_where_they_are_in_the_text():
    text = "Today's date is 2026-11-21.\nLook:  here"
    image = Image(at=text.index("  here") + 1, field="f", data=b"png")
    stable = stabilise([Message(role="user", text=text, images=(image,))], ALL)
    (message,) = stable.messages
    assert message.text[: message.images[0].at] == "Look: "


def test_what_moved_is_said_in_a_turn_of_its_own_after_an_assistants():
    placed = place((USER, Message(role="assistant", text="Well")), ("Today's date is 2026-11-21.",))
    assert [message.role for message in placed] == ["user", "assistant", "user"]


LINES = st.sampled_from(
    [
        "Be brief.",
        "",
        "  indented",
        "Today's date is 2026-11-21.",
        "  Today's date: Sat Nov 21 2026",
        "Current time is 11:23",
        *GIT_STATUS.split("\n"),
        "[message_id: 8c1f22d0]",
        OPEN,
        CLOSE,
        "Chunk ID: 1f62e7",
    ]
)
TEXTS = st.lists(LINES, max_size=12).map("\n".join)
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), text=TEXTS),
    max_size=6,
)


@settings(deadline=None)
@given(MESSAGES, st.sampled_from(["", "claude-code", "openclaw"]))
def test_no_line_is_lost_or_invented(messages: list[Message], client: str):
    stable = stabilise(messages, rules_for(client, frozenset()))
    before = lines_of(*(message.text for message in messages))
    after = lines_of(*(message.text for message in stable.messages))
    moved = lines_of(*stable.moved)
    assert not after - before
    assert set(before - after) == set(moved)
    assert set(before) == set(after) | set(moved)


@settings(deadline=None)
@given(MESSAGES, st.sampled_from(["", "openclaw"]))
def test_what_is_stable_stays_so(messages: list[Message], client: str):
    rules = rules_for(client, frozenset())
    once = stabilise(messages, rules)
    assert stabilise(once.messages, rules).messages == once.messages
