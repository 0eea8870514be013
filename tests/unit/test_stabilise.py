"""Only known telemetry leaves a system prompt; every other word stays in its place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.http.clients import FAMILIES
from runtime.config.settings import Family, PromptSwitches, load_settings
from runtime.errors import SettingsError
from runtime.prompt.stabilise import (
    RULE_NAMES,
    RULES,
    Rule,
    stabilise,
    stabilising_steps,
    varying_from,
)
from runtime.types import Image, LineRule, Message, PromptChange, Role

CLAUDE_CODE = "claude-code"
USER = Message(role="user", text="Fix the bug in parse.py.")
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;"
HEADER = BILLING.format("ec4")


def system(text: str) -> Message:
    return Message(role="system", text=text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.client)
def test_each_rule_matches_the_shape_it_was_made_for(rule: Rule):
    assert rule.pattern.match(rule.observed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.client)
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


REST = "You are an agent.\n\nUse the tools."
FIELDS = st.lists(
    st.sampled_from(
        [
            *("cch=7f3a9", "cch=00000", "cc_workload=cron", "cc_is_subagent=true"),
            *("cc_prev_req=req_011CU-x_Y", "cc_turn_origin=user_prompt", "cc_gateway=env"),
            *("cc_prompt_id=0b5e0c4e-9a39-4a53-8a65-0f2f4ad1c1aa", "cc_gateway=1"),
            *("cc_prompt_index=0", "cc_turn_index=12", "cc_prev_msg=msg_01Ab"),
        ]
    ),
    max_size=6,
)
CLIENTS = st.sampled_from(["", "litellm", "openclaw", "codex", "openai-sdk"])


def billing(fields: Sequence[str]) -> str:
    return " ".join([HEADER, *(f"{field};" for field in fields)])


@given(fields=FIELDS, client=CLIENTS)
def test_behind_a_proxy_the_exact_line_goes_whoever_asks(fields: list[str], client: str):
    whole = stabilise([system(f"{billing(fields)}\n{REST}"), USER], client)
    assert whole.messages == (system(REST), USER)
    assert whole.changes == (PromptChange(rule="billing_header"),)
    alone = stabilise([system(billing(fields)), system(REST), USER], client)
    assert alone.messages == (system(REST), USER)


MEANT = st.sampled_from(["Be brief.", "cch is a nonce", "x", "cc_note=hi;", "cch=G;", "cch=7f3a9"])
RESEMBLING: dict[str, Callable[[str, str], str]] = {
    "said behind it": lambda line, meant: f"{line} {meant}",
    "no line of its own": lambda line, meant: f"{line}{meant}",
    "said before it": lambda line, meant: f"{meant} {line}",
    "a later line": lambda line, meant: f"{meant}\n{line}",
    "said in a field": lambda line, meant: f"{line[:-1]} {meant};",
    "said in the version": lambda line, meant: line.replace("2.1.329", meant),
    "another header": lambda line, _: line.replace("billing", "bill"),
    "no entrypoint": lambda line, _: line.replace("cc_entrypoint=sdk-cli; ", ""),
    "upper case": lambda line, _: line.upper(),
    "an open end": lambda line, _: line[:-1],
    "a blank at its end": lambda line, _: f"{line} ",
    "quoted": lambda line, _: f"> {line}",
    "a tab": lambda line, _: line.replace("; ", ";\t", 1),
    "a figure that is no ASCII": lambda line, _: line.replace("329", "\u0663\u0662\u0669"),
}


@pytest.mark.parametrize("kind", RESEMBLING)
@given(fields=FIELDS.filter(bool), client=CLIENTS, meant=MEANT)
def test_what_only_resembles_the_line_stays_to_the_letter(
    kind: str, fields: list[str], client: str, meant: str
):
    text = RESEMBLING[kind](billing(fields), meant)
    messages = (system(f"{text}\n{REST}"), USER)
    stable = stabilise(messages, client)
    assert (stable.messages, stable.changes) == (messages, ())


@given(fields=FIELDS, client=st.sampled_from(["", "litellm", CLAUDE_CODE]))
def test_the_line_in_another_place_than_the_first_system_text_stays(fields: list[str], client: str):
    line = f"{billing(fields)}\n{REST}"
    for messages in (
        (system(REST), system(line), USER),
        (Message(role="user", text=line),),
        (system(REST), USER, Message(role="tool", text=line)),
        (USER, Message(role="assistant", text=line), system(line)),
    ):
        stable = stabilise(messages, client)
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
    steps = stabilising_steps("claude-code", frozenset({name}))
    assert {step.rule for step in steps} == RULE_NAMES - {name}


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
def test_nothing_goes_but_telemetry_at_the_head_of_the_first_system_text(
    messages: list[Message], client: str
):
    stable = stabilise(messages, client, frozenset({"system_first"}))
    expected = messages
    if messages and messages[0].role == "system":
        first, _, rest = messages[0].text.partition("\n")
        if first == HEADER:
            expected = [system(rest)] * bool(rest.strip()) + messages[1:]
    assert list(stable.messages) == expected
    assert bool(stable.changes) == (expected != messages)


def user(text: str) -> Message:
    return Message(role="user", text=text)


SAME = system("The following skills can be used.\nToday's date is 2026-11-21.")


def test_what_claude_code_tells_every_session_is_read_before_its_users_first_words():
    head, later = system("You are an agent."), Message(role="assistant", text="Done.")
    notice = system("A background task ended.")
    one, two = (
        stabilise([head, user(text), SAME, later, user("On."), notice], CLAUDE_CODE)
        for text in ("Fix it.", "Break it.")
    )
    assert one.messages == (head, SAME, user("Fix it."), later, user("On."), notice)
    assert two.messages[:2] == one.messages[:2]
    assert one.changes == (PromptChange(rule="system_first", num_places=2),)
    assert [part.sources for part in one.parts[:3]] == [(0,), (2,), (1,)]


@pytest.mark.parametrize("client", ["", "codex", "openclaw"])
def test_nobody_elses_late_system_text_is_moved(client: str):
    messages = (system("You are an agent."), USER, SAME)
    assert stabilise(messages, client).messages == messages


@pytest.mark.parametrize(
    "messages",
    [
        (system("a"), USER, Message(role="assistant", text="b"), SAME),
        (system("a"), SAME, USER),
        (system("a"), Message(role="assistant", text="b"), SAME, USER),
        (system("a"),),
        (),
    ],
)
def test_a_system_text_in_another_place_stays(messages: tuple[Message, ...]):
    assert stabilise(messages, CLAUDE_CODE).messages == messages


@settings(deadline=None)
@given(MESSAGES, st.sampled_from(["", "claude-code", "openclaw"]))
def test_what_users_and_tools_say_stays_in_its_order_and_to_the_letter(
    messages: list[Message], client: str
):
    stable = stabilise(messages, client, frozenset({"billing_header"}))
    others = [one for one in messages if one.role != "system"]
    assert [one for one in stable.messages if one.role != "system"] == others
    assert sorted(map(str, stable.messages)) == sorted(map(str, messages))


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("Be brief.\nCurrent date and time: Saturday, November 21", "Be brief.\n"),
        ("Be brief.\nNow: 2026-11-21T10:23:45Z\nGo.", "Be brief.\n"),
        ("You are Ada. Current date: 2026-11-21.", "You are Ada. "),
        ("You are Ada. The current time is 11:23.", "You are Ada. "),
        ("a\n## Inbound Context (trusted metadata)\nx", "a\n"),
        ("a\n[message_id: 8c1f22d0]", "a\n"),
    ],
)
def test_a_boundary_stands_right_before_what_changes(text: str, before: str):
    at = varying_from(text)
    assert at is not None
    assert text[:at] == before


@pytest.mark.parametrize(
    "text", ["Say it now: go", "Ask for it. Current dates are in the calendar.", "Be brief."]
)
def test_what_does_not_change_is_no_boundary(text: str):
    assert varying_from(text) is None


OWN_LINES = st.sampled_from(
    ["Build: 7", "Build: ", " Build: 8", "Be brief.", "", "Built: 9", "Now"]
)
OWN_TEXTS = st.lists(OWN_LINES, max_size=5).map("\n".join)
OWN_SPOKEN = st.lists(
    st.tuples(st.sampled_from(["system", "user", "tool", "assistant"]), OWN_TEXTS)
)


def lines_of(messages: Sequence[Message]) -> list[str]:
    return sorted(
        line for one in messages if one.role == "system" for line in one.text.split("\n") if line
    )


@given(spoken=OWN_SPOKEN, to=st.sampled_from(["first", "last"]))
def test_an_owners_rule_moves_whole_lines_of_the_first_system_messages_alone(
    spoken: list[tuple[Role, str]], to: Literal["first", "last"]
):
    messages = [Message(role=role, text=text) for role, text in spoken]
    num_head = next((i for i, one in enumerate(messages) if one.role != "system"), len(messages))
    rule = LineRule(name="own_rules.build", begins="Build: ", to=to)
    moved = [
        line
        for one in messages[:num_head]
        for line in one.text.split("\n")
        if line.startswith("Build: ")
    ]
    stable = stabilise(messages, "", own=(rule,))
    assert [change.rule for change in stable.changes] in ([], ["own_rules.build"])
    if not moved:
        assert list(stable.messages) == messages
        return
    place = 0 if to == "first" else len(stable.messages) - 1 - (messages[-1].role == "assistant")
    assert stable.messages[place] == Message(role="system", text="\n".join(moved))
    assert lines_of(stable.messages) == lines_of(messages)
    rest = [*stable.messages[:place], *stable.messages[place + 1 :]]
    assert [one for one in rest if one.role != "system"] == [
        one for one in messages if one.role != "system"
    ]
    assert rest[len(rest) - len(messages[num_head:]) :] == messages[num_head:]
    again = stabilise(stable.messages, "", own=(rule,))
    assert again.messages == stable.messages


def test_an_owners_rule_can_name_every_client_that_is_told_apart():
    assert set(get_args(Family)) == {"*", *(family for _, family in FAMILIES)}


def test_an_owners_rules_are_those_of_the_client(tmp_path: Path):
    file = tmp_path / "hearth.toml"
    file.write_text(
        '[own_rules.build]\nclient = "opencode"\nbegins = "Build: "\n'
        '[own_rules.skills]\nclient = "*"\nbegins = "Skill "\nto = "first"\n'
    )
    chosen = load_settings({"config": str(file)}, {"HOME": str(tmp_path)})
    build = LineRule(name="own_rules.build", begins="Build: ", to="last")
    skills = LineRule(name="own_rules.skills", begins="Skill ", to="first")
    assert chosen.own_rules_for("opencode") == (build, skills)
    assert chosen.own_rules_for("") == (skills,)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ('client = "pi"', "begins"),
        ('client = "opencod"\nbegins = "a"', "client"),
        ('client = "pi"\nbegins = ""', "begins"),
        ('client = "pi"\nbegins = " "', "begins must be the beginning of one line"),
        ('client = "pi"\nbegins = "a\\nb"', "begins must be the beginning of one line"),
        ('client = "pi"\nbegins = "a"\nto = "away"', "to"),
        ('client = "pi"\nbegins = "a"\npattern = "x"', "pattern"),
    ],
)
def test_an_owners_rule_that_says_too_little_is_refused(tmp_path: Path, rule: str, problem: str):
    file = tmp_path / "hearth.toml"
    file.write_text(f"[own_rules.build]\n{rule}\n")
    with pytest.raises(SettingsError, match=f"own_rules.build.*{problem}"):
        load_settings({"config": str(file)}, {"HOME": str(tmp_path)})
