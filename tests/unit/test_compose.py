"""From a client's messages to tokens: what is healed, where it may be cut, that nothing is lost."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from runtime.errors import ContextTooLong, InvalidRequest
from runtime.prompt.compaction import summary_message, with_summary_begun
from runtime.prompt.healing import Cut
from runtime.types import (
    CacheParams,
    ChatPrompt,
    GenerateRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    Thinking,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from runtime.worker.input.compose import MAX_BOUNDARIES, Composed, Composer
from runtime.worker.input.intake import said_by
from runtime.worker.input.intake_pool import REHEARSAL
from runtime.worker.input.preparer import PromptPreparer
from runtime.worker.input.template import Template, inner_tokenizer
from runtime.worker.input.turns import PendingTurn, TurnStore
from tests.kept_turns import KeptHeads
from tests.templates import TEMPLATES, template_of

LOOK = Tool(name="look", description="Look.", parameters='{"type": "object"}')
SYSTEM = Message(role="system", text="Be brief.")
USER = Message(role="user", text="the quick brown fox")
RESULT = Message(role="tool", text="rain falls", tool_call_id="a", name="look")
END = "<|im_end|>"


@dataclass
class Counted:
    num_healed_turns: int = 0


def num_healed(composed: Composed) -> int:
    return sum(one.num_places for one in composed.changes if one.rule == "healed_turn")


class Talk:
    """One model's composer, and what the model says."""

    def __init__(
        self,
        template: Template,
        store: TurnStore,
        heads: KeptHeads | None = None,
        **fields: Any,
    ) -> None:
        self.template = template
        self.store = store
        self.heads = heads
        self.counts = Counted()
        eos = frozenset(template.encode(END).token_ids)
        given: dict[str, Any] = {"context": 8192, "needs_state": True, "eos_token_ids": eos}
        self.composer = Composer(
            template=template,
            turns=store,
            counts=self.counts,
            **given | fields,
        )

    def compose(self, *messages: Message, session: str | None = None, **fields: Any) -> Composed:
        tools = fields.pop("tools", (LOOK,))
        client, mode = fields.pop("client", ""), fields.pop("mode", "full")
        model, tenant = fields.pop("model", "m"), fields.pop("tenant", "")
        max_tokens, work = fields.pop("max_tokens", None), fields.pop("work", "generate")
        prompt = ChatPrompt(messages=messages, tools=tools, **fields)
        request = GenerateRequest(
            request_id="r",
            model=model,
            prompt=prompt,
            work=work,
            client=client,
            max_tokens=max_tokens,
            cache=CacheParams(session_id=session, mode=mode, tenant=tenant),
        )
        return self.composer.compose(request, prompt)

    def says(
        self,
        composed: Composed,
        raw: str,
        text: str = "",
        calls: tuple[ToolCall, ...] = (),
        stop: str | None = None,
        thoughts: str = "",
        *,
        is_last: bool = False,
    ) -> list[int]:
        """The model generates `raw`, the client is shown the rest; all tokens there are now."""
        output = self.template.encode(raw).token_ids
        assert composed.lineage is not None
        known = self.store, composed.lineage, self.template
        answer = PendingTurn(*known, composed.token_ids)
        answer.spoken.add(ReasoningDelta(index=0, text=thoughts))
        for number, call in enumerate(calls):
            delta = ToolCallDelta(
                index=0, call_index=number, arguments=call.arguments, id=call.id, name=call.name
            )
            answer.spoken.add(delta)
        answer.spoken.add(TextDelta(index=0, text=text))
        turn = answer.end(output, None if stop is None else Cut(stop, is_last))
        token_ids = [*composed.token_ids, *output]
        if self.heads is not None and turn is not None:
            said = said_by(composed.lineage)
            said = said._replace(turns=(*said.turns, turn))
            self.heads.keep(composed.lineage.scope, token_ids[:-1], said)
        return token_ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(self.template.token_text(token_id)[0] for token_id in token_ids)


@pytest.fixture(params=["chatml", "qwen3"])
def talk(request, tmp_path: Path) -> Talk:
    return Talk(template_of(tmp_path, request.param), TurnStore())


def echo(arguments: str, call_id: str = "other", text: str = "") -> Message:
    call = ToolCall(id=call_id, name="look", arguments=arguments)
    return Message(role="assistant", text=text, tool_calls=(call,))


RAW_CALL = (
    '<think>\nlet me see\n</think>\n\n<tool_call>\n{"name":"look","arguments":{"at":7}}\n'
    f"</tool_call>{END}"
)
CALL = ToolCall(id="a", name="look", arguments='{"at":7}')


@pytest.mark.parametrize(
    "given_back",
    [
        echo('{"at":7}', "a"),
        echo('{"at": 7}'),
        echo('{ "at" : 7.0 }', text=" \n"),
        echo('{"at":7}', text="<think>let me see</think>"),
    ],
)
def test_a_changed_turn_is_read_as_the_tokens_that_were_generated(talk: Talk, given_back: Message):
    asked = talk.compose(SYSTEM, USER)
    before = talk.says(asked, RAW_CALL, calls=(CALL,), thoughts="let me see")
    result = Message(role="tool", text="rain", tool_call_id=given_back.tool_calls[0].id)
    healed = talk.compose(SYSTEM, USER, given_back, result)
    assert healed.token_ids[: len(before)] == before
    assert talk.text_of(healed.token_ids[len(before) :]).startswith("\n<|im_start|>")
    assert "rain" in talk.text_of(healed.token_ids[len(before) :])
    assert num_healed(healed) == 1
    assert talk.counts.num_healed_turns == 1


@pytest.mark.parametrize(("first", "second"), [("full", "off"), ("off", "full"), ("off", "off")])
def test_the_model_reads_the_same_tokens_whatever_is_kept_of_kv(
    talk: Talk, first: str, second: str
):
    asked = talk.compose(SYSTEM, USER, mode=first)
    before = talk.says(asked, RAW_CALL, calls=(CALL,), thoughts="let me see")
    given_back = echo('{"at": 7}')
    result = Message(role="tool", text="rain", tool_call_id=given_back.tool_calls[0].id)
    following = talk.compose(SYSTEM, USER, given_back, result, mode=second)
    assert following.token_ids[: len(before)] == before


def test_healing_goes_on_from_turn_to_turn(talk: Talk):
    said = Message(role="assistant", text="rain falls")
    raw = f"<think>\nlet me\n</think>\n\nrain falls{END}"
    messages = [SYSTEM, USER]
    known: list[int] = []
    for number in range(5):
        composed = talk.compose(*messages)
        assert composed.token_ids[: len(known)] == known
        known = talk.says(composed, raw, "rain falls")
        messages += [said, Message(role="user", text=f"step {number}")]
    assert talk.compose(*messages).changes[-1].num_places == 5


@pytest.mark.parametrize(
    "changed",
    [
        (SYSTEM, USER, echo('{"at":8}')),
        (SYSTEM, USER, echo('{"at":7}', text="But")),
        (SYSTEM, Message(role="user", text="the quick  brown fox"), echo('{"at":7}')),
        (USER, echo('{"at":7}')),
    ],
)
def test_an_edited_conversation_is_read_as_it_is(talk: Talk, changed: tuple[Message, ...]):
    talk.says(talk.compose(SYSTEM, USER), RAW_CALL, calls=(CALL,))
    composed = talk.compose(*changed, RESULT)
    assert not num_healed(composed)
    prompt = ChatPrompt(messages=(*changed, RESULT), tools=(LOOK,))
    assert composed.token_ids == talk.template.token_ids(prompt)


def test_other_tools_or_switches_are_another_conversation(talk: Talk):
    talk.says(talk.compose(SYSTEM, USER), RAW_CALL, calls=(CALL,))
    other = Tool(name="read", description="Read.")
    assert not num_healed(talk.compose(SYSTEM, USER, echo('{"at":7}'), RESULT, tools=(other,)))


def test_a_branch_keeps_what_it_shares(talk: Talk):
    first = talk.compose(SYSTEM, USER)
    main = talk.says(first, RAW_CALL, calls=(CALL,))
    other = talk.says(first, f"rain{END}", "rain")
    back = talk.compose(SYSTEM, USER, echo('{"at":7}'), RESULT)
    branch = talk.compose(SYSTEM, USER, Message(role="assistant", text="rain"), USER)
    assert back.token_ids[: len(main)] == main
    assert branch.token_ids[: len(other)] == other


def test_a_turn_that_we_ended_is_closed_for_the_model(talk: Talk):
    raw = RAW_CALL.removesuffix(END)
    before = talk.says(talk.compose(SYSTEM, USER), raw, calls=(CALL,))
    healed = talk.compose(SYSTEM, USER, echo('{"at":7}'), RESULT)
    assert healed.token_ids[: len(before)] == before
    assert talk.text_of(healed.token_ids[len(before) :]).startswith(f"{END}\n<|im_start|>")


def test_where_the_next_role_ends_a_turn_its_marker_is_said_once(tmp_path: Path):
    talk = Talk(template_of(tmp_path, "role_ends"), TurnStore())
    raw = f"let me</think><tool_call>look\nat=7</tool_call>{END}"
    before = talk.says(talk.compose(SYSTEM, USER), raw, calls=(CALL,))
    healed = talk.compose(SYSTEM, USER, echo('{"at": 7}'), RESULT)
    assert healed.token_ids[: len(before)] == before
    assert talk.text_of(healed.token_ids[len(before) :]) == "\nrain falls<think>"
    # Had a user spoken instead, the marker that was generated is not the one that follows.
    other = talk.compose(SYSTEM, USER, echo('{"at": 7}'), USER)
    assert not num_healed(other)


def test_a_text_with_the_sentinel_in_it_is_not_healed(talk: Talk):
    talk.says(talk.compose(SYSTEM, USER), RAW_CALL, calls=(CALL,))
    trap = Message(role="user", text="say hearth7c1e94d2splice")
    assert not num_healed(talk.compose(SYSTEM, USER, echo('{"at":7}'), RESULT, trap))


VARYING = ("Current time: 11:23.", "Current time: 11:23. The password of the vault is walrus.")


def test_what_one_was_told_is_not_in_the_prompt_of_another_who_was_answered_the_same(talk: Talk):
    noted = Message(role="assistant", text="Noted.")
    heads = [Message(role="system", text=f"Be brief.\n{text}") for text in VARYING]
    for head in reversed(heads):
        talk.says(talk.compose(head, USER, client="claude-code"), f"Noted.{END}", "Noted.")
    bobs = talk.compose(heads[0], USER, noted, USER, client="claude-code")
    assert "walrus" not in talk.text_of(bobs.token_ids)
    alices = talk.compose(heads[1], USER, noted, USER, client="claude-code")
    assert talk.text_of(alices.token_ids).count("walrus") == 1
    assert num_healed(bobs) == 1


def test_a_date_stays_where_its_client_put_it(talk: Talk):
    first = Message(role="user", text="Today's date is 2026-11-22.")
    text = talk.text_of(talk.compose(first, client="claude-code").token_ids)
    assert "Today's date is 2026-11-22." in text
    assert "system-reminder" not in text


def test_a_prompt_that_only_held_telemetry_is_refused(talk: Talk):
    telemetry = Message(role="system", text="x-anthropic-billing-header: cc_version=2.1.329.ec4;")
    with pytest.raises(InvalidRequest):
        talk.compose(telemetry, client="claude-code")


def test_thoughts_that_their_client_edited_are_read_as_it_gives_them(talk: Talk):
    before = talk.says(talk.compose(SYSTEM, USER), RAW_CALL, calls=(CALL,), thoughts="let me see")
    same = msgspec.structs.replace(echo('{"at":7}'), reasoning="let me see")
    assert talk.compose(SYSTEM, USER, same, RESULT).token_ids[: len(before)] == before
    edited = msgspec.structs.replace(echo('{"at":7}'), reasoning="let me not see")
    composed = talk.compose(SYSTEM, USER, edited, RESULT)
    assert composed.token_ids[: len(before)] != before
    assert not num_healed(composed)


@cache
def chatml() -> Template:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), "chatml")


WORDS = st.sampled_from(["Noted.", "a b", "a  b", "if x:\n    y()", "if x:\n        y()"])
THOUGHTS = st.sampled_from(["", "hm", "well well"])
SPOKEN = st.tuples(WORDS, WORDS, THOUGHTS)


@given(
    tellings=st.lists(
        st.tuples(WORDS, st.lists(SPOKEN, min_size=1, max_size=3)), min_size=2, max_size=4
    ),
    edits=st.lists(st.tuples(st.integers(0, 2), WORDS, THOUGHTS), max_size=2),
    data=st.data(),
)
def test_every_token_is_of_this_request_or_of_a_turn_that_was_asked_the_same(
    tellings: list[tuple[str, list[tuple[str, str, str]]]],
    edits: list[tuple[int, str, str]],
    data: st.DataObject,
):
    """Many conversations at once, each turn given back as clients do, or edited by them.

    The model of it is a list: for every turn that was generated what it was asked with, all of it
    before the turn, what was thought and what was said.
    """
    talk = Talk(chatml(), TurnStore(), needs_state=False)
    generated: dict[tuple[int, ...], list[Message]] = {}
    for system, turns in tellings:
        asked = [Message(role="system", text=system)]
        for number, (question, said, thought) in enumerate(turns):
            asked.append(Message(role="user", text=question))
            composed = talk.compose(*asked)
            check_origin(talk, composed, asked, generated)
            raw = f"<think>\n{thought}\n</think>\n\n{said}{END}" if thought else f"{said}{END}"
            whole = talk.says(composed, raw, said, thoughts=thought)
            had = Message(role="assistant", text=said, reasoning=thought or None)
            generated[tuple(whole)] = [*asked, had]
            keeps = data.draw(st.booleans())
            given = msgspec.structs.replace(had, reasoning=had.reasoning if keeps else None)
            for at, text, thoughts in edits:
                if at == number:
                    given = Message(role="assistant", text=text, reasoning=thoughts or None)
            asked.append(given)


def check_origin(
    talk: Talk,
    composed: Composed,
    asked: list[Message],
    generated: dict[tuple[int, ...], list[Message]],
) -> None:
    """Healed tokens are those of a turn all of whose input and words are this request's own."""
    if not num_healed(composed):
        return
    assert composed.lineage is not None
    before = generated[tuple(composed.token_ids[: composed.lineage.start])]
    for ours, theirs in zip(asked, before, strict=False):
        assert ours.role == theirs.role
        if ours.role == "assistant":
            assert ours.text.strip() == theirs.text.strip()
            assert ours.reasoning in (None, theirs.reasoning)
        else:
            assert ours == theirs


# Boundaries


def test_boundaries_are_where_the_next_turn_still_agrees(talk: Talk):
    messages = [SYSTEM, USER, echo('{"at":7}', "a"), RESULT]
    composed = talk.compose(*messages)
    other = talk.compose(SYSTEM, Message(role="user", text="let me see"))
    longer = talk.compose(*messages, Message(role="assistant", text="let me"), USER)
    last = composed.boundaries[-1]
    assert longer.token_ids[:last] == composed.token_ids[:last]
    assert talk.text_of(composed.token_ids[last:]).startswith("<|im_start|>assistant")
    assert composed.prefix_end in composed.boundaries
    assert other.token_ids[: composed.prefix_end] == composed.token_ids[: composed.prefix_end]
    assert talk.text_of(composed.token_ids[composed.prefix_end :]).startswith("<|im_start|>user")


def test_boundaries_of_a_long_conversation_are_few_and_dense_at_the_end(talk: Talk):
    said = Message(role="assistant", text="rain")
    messages = [SYSTEM, *([USER, said] * 60), USER]
    composed = talk.compose(*messages)
    assert len(composed.boundaries) == MAX_BOUNDARIES
    gaps = [b - a for a, b in zip(composed.boundaries[1:], composed.boundaries[2:], strict=False)]
    assert gaps[0] > gaps[1] > gaps[2] > max(gaps[3:])


def test_cache_breakpoints_are_boundaries_and_worth_their_time(talk: Talk):
    talk.composer.needs_state = False
    breakpoint_ = Message(role="user", text="the quick brown fox").kept(3600.0)
    composed = talk.compose(SYSTEM, breakpoint_, Message(role="assistant", text="rain"), USER)
    ((position, keep_s),) = composed.keeps
    assert keep_s == 3600.0
    assert position in composed.boundaries
    assert talk.text_of(composed.token_ids[:position]).endswith("brown fox")


def test_kept_tools_are_worth_their_time_up_to_their_end(talk: Talk):
    kept, other = msgspec.structs.replace(LOOK, keep_s=300.0), Tool(name="go", description="Go.")
    for tools, after in (((kept,), "Be brief."), ((kept, other), '"go"')):
        composed = talk.compose(SYSTEM, USER, tools=tools)
        ((position, keep_s),) = composed.keeps
        assert keep_s == 300.0
        assert position in composed.boundaries
        before = talk.text_of(composed.token_ids[:position])
        assert ('"look"' in before, after in before) == (True, False)
        assert composed.token_ids == talk.compose(SYSTEM, USER, tools=(LOOK, *tools[1:])).token_ids


def test_without_a_need_for_state_nothing_is_cut(talk: Talk):
    talk.composer.needs_state = False
    assert talk.compose(SYSTEM, USER).boundaries == ()


@pytest.mark.parametrize(
    "line",
    [
        "Current time: 11:23.",
        "  Today's date: Sat Nov 21 2026",
        "Current date: 2026-11-21",
        "gitStatus: This is the git status.",
        "  <current_date>2026-11-21</current_date>",
    ],
)
def test_what_precedes_a_line_that_changes_is_a_boundary_to_stay(talk: Talk, line: str):
    system = Message(role="system", text=f"Be brief.\n{line}\nWhat follows.")
    composed = talk.compose(system, USER)
    ends = {talk.text_of(composed.token_ids[:at])[-10:]: at for at in composed.boundaries}
    assert ends["Be brief.\n"[-10:]] not in composed.passing
    plain = talk.template.token_ids(ChatPrompt(messages=(system, USER), tools=(LOOK,)))
    assert composed.token_ids == plain
    typed = Message(role="user", text=system.text)
    assert len(talk.compose(USER, typed).boundaries) <= 3


# Refusal and files


def test_a_text_far_too_long_is_refused_before_all_of_it_is_tokenized(talk: Talk):
    talk.composer.context = 100
    with pytest.raises(ContextTooLong) as caught:
        talk.compose(Message(role="user", text="the quick brown fox " * 5000))
    assert 100 < caught.value.num_tokens < 40_000


def test_a_healed_prompt_that_does_not_fit_is_read_without_its_thinking(talk: Talk):
    thought = f"<think>\n{'let me see ' * 40}\n</think>\n\nrain{END}"
    before = talk.says(talk.compose(SYSTEM, USER), thought, "rain")
    talk.composer.context = len(before) + 5
    composed = talk.compose(SYSTEM, USER, Message(role="assistant", text="rain"), USER)
    assert len(composed.token_ids) < len(before)


def test_turns_survive_a_restart_in_private_files(tmp_path: Path):
    template, heads = template_of(tmp_path, "qwen3"), KeptHeads(tmp_path / "kv")
    talk = Talk(template, heads.turns(), heads)
    before = talk.says(talk.compose(SYSTEM, USER, session="s"), RAW_CALL, calls=(CALL,))
    (file,) = heads.files
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    again = Talk(template, heads.turns())
    healed = again.compose(SYSTEM, USER, echo('{"at":7}'), RESULT, session="s")
    assert healed.token_ids[: len(before)] == before


@pytest.mark.parametrize("harm", ["cut", "flip", "delete"])
def test_a_damaged_or_deleted_head_is_a_turn_that_is_not_known(tmp_path: Path, harm: str):
    template, heads = template_of(tmp_path, "qwen3"), KeptHeads(tmp_path / "kv")
    talk = Talk(template, heads.turns(), heads)
    talk.says(talk.compose(SYSTEM, USER), RAW_CALL, calls=(CALL,))
    (file,) = heads.files
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if harm == "flip" else data[:-7])
    if harm == "delete":
        file.unlink()
    again = Talk(template, heads.turns())
    composed = again.compose(SYSTEM, USER, echo('{"at":7}'), RESULT)
    assert not num_healed(composed)


def test_the_server_is_asked_for_turns_that_are_not_in_memory_and_for_no_others(tmp_path: Path):
    template, heads = template_of(tmp_path, "qwen3"), KeptHeads(tmp_path / "kv")
    talk = Talk(template, heads.turns(), heads)
    talk.says(talk.compose(SYSTEM, USER, session="s"), RAW_CALL, calls=(CALL,))
    talk.compose(SYSTEM, USER, echo('{"at":7}'), RESULT, session="s")
    assert heads.asked == []
    again = Talk(template, heads.turns())
    for _ in range(2):
        assert num_healed(again.compose(SYSTEM, USER, echo('{"at":7}'), RESULT, session="s")) == 1
    assert len(heads.asked) == 1
    again.compose(SYSTEM, USER, echo('{"at":8}'), RESULT, session="s")
    assert len(heads.asked) == 2, "nobody said that"


# Order of tools and system text


def test_tools_come_before_the_system_text_where_the_template_allows(tmp_path: Path):
    tools = tuple(
        Tool(name=f"look{i}", parameters=json.dumps({"type": "object", "title": "kettle " * 20}))
        for i in range(4)
    )

    def shared(*, tools_first: bool) -> tuple[int, int]:
        template = template_of(tmp_path, "qwen3", tools_first=tools_first)
        one, two = (
            Talk(template, TurnStore()).compose(
                Message(role="system", text=f"You work in {place}.\n" + "Be brief. " * 10),
                USER,
                tools=tools,
            )
            for place in ("/home/ada", "/srv/bob")
        )
        pairs = zip(one.token_ids, two.token_ids, strict=False)
        same = next(i for i, (a, b) in enumerate(pairs) if a != b)
        return same, len(one.token_ids)

    before, num_before = shared(tools_first=False)
    after, num_after = shared(tools_first=True)
    assert before < 0.05 * num_before
    assert after > 0.8 * num_after
    assert abs(num_after - num_before) <= 2


def test_turned_tools_lose_no_text(tmp_path: Path):
    prompt = ChatPrompt(messages=(SYSTEM, USER), tools=(LOOK,), thinking=Thinking())
    plain = template_of(tmp_path, "qwen3", tools_first=False).render(prompt)
    turned = template_of(tmp_path, "qwen3").render(prompt)
    assert sorted("".join(turned.split())) == sorted("".join(plain.split()))
    assert turned.index("# Tools") < turned.index("Be brief.") < turned.index("quick")


class CountingBench(PromptPreparer):
    num_rendered = 0

    @override
    def render(
        self, messages: list[dict[str, object]], tools: object, kwargs: dict[str, object]
    ) -> str:
        self.num_rendered += 1
        return super().render(messages, tools, kwargs)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_rehearsal_finds_out_what_the_first_prompt_would_have_to_wait_for(
    tmp_path: Path, name: str
):
    tokenizer = template_of(tmp_path, name)._tokenizer
    bench = CountingBench(inner_tokenizer(tokenizer))
    talk = Talk(Template(tokenizer, bench=bench), TurnStore())
    assert isinstance(REHEARSAL.prompt, ChatPrompt)
    talk.composer.compose(REHEARSAL, REHEARSAL.prompt)
    at_rehearsal, bench.num_rendered = bench.num_rendered, 0
    talk.compose(USER, tools=())
    at_first, bench.num_rendered = bench.num_rendered, 0
    talk.compose(Message(role="user", text="rain falls"), tools=())
    assert at_first == bench.num_rendered < at_rehearsal


def test_a_turn_that_ended_with_another_end_token_than_the_templates_is_healed(talk: Talk):
    ends = frozenset(talk.template.encode(f"{END}<|endoftext|>").token_ids)
    talk.composer.eos_token_ids = ends
    asked = talk.compose(SYSTEM, USER)
    before = talk.says(asked, "rain falls<|endoftext|>", "rain falls")
    said = Message(role="assistant", text="rain falls")
    healed = talk.compose(SYSTEM, USER, said, USER)
    assert healed.token_ids[: len(before) - 1] == before[:-1]
    assert talk.text_of(healed.token_ids[len(before) - 1 :]).startswith(END)
    assert num_healed(healed) == 1


SUMMARIES = st.text(alphabet="ab1é好 .,:;!?-'\n\t\u00a0", max_size=40)


@given(
    said=SUMMARIES,
    rest=SUMMARIES,
    name=st.sampled_from(sorted(TEMPLATES)),
    needs_state=st.booleans(),
)
def test_of_a_summary_that_is_still_written_no_token_is_read_that_may_change(
    said: str, rest: str, name: str, needs_state: bool
) -> None:
    """Whatever it goes on with: what is computed of it is how the whole of it begins."""
    composer = written_with(name, needs_state=needs_state)
    first = ChatPrompt(messages=(USER, Message(role="user", text="")))
    following = GenerateRequest(request_id="r", model="m", prompt=first)

    def composed(text: str) -> Composed:
        request = with_summary_begun(following, text)
        assert isinstance(request.prompt, ChatPrompt)
        return composer.compose(request, request.prompt)

    begun = composed(said).up_to_last_keep()
    messages = (USER, summary_message((said + rest + " x").strip()))
    whole = composer.compose(following, ChatPrompt(messages=messages))
    computed = begun.token_ids[:-1]
    assert computed == whole.token_ids[: len(computed)]
    assert max(begun.boundaries) == len(computed)
    later = composed(said + rest).up_to_last_keep().token_ids[:-1]
    assert later[: len(computed)] == computed
    if not said.strip():
        known = composer.template.render(ChatPrompt(messages=(USER,)), opens_answer=False)
        assert len(composer.template.encode(known).token_ids) - 3 < len(computed)


@cache
def written_with(name: str, *, needs_state: bool) -> Composer:
    with TemporaryDirectory() as directory:
        template = template_of(Path(directory), name)
    return Talk(template, TurnStore(), needs_state=needs_state).composer


@pytest.mark.parametrize(
    ("now", "fields", "is_told"),
    [
        ("It is 10:24.", {}, True),
        ("It is 10:23.", {}, False),
        ("It is 10:24.", {"session": "other"}, False),
        ("It is 10:24.", {"session": None}, False),
        ("It is 10:24.", {"session": "@ann/s", "tenant": "ann"}, False),
    ],
)
def test_thoughts_that_a_clock_makes_unknown_are_told_of_in_the_same_session(
    talk: Talk, now: str, fields: dict[str, Any], is_told: bool
):
    clock = Message(role="system", text="It is 10:23.")
    asked = talk.compose(clock, USER, session="s")
    talk.says(asked, f"<think>\nlet me\n</think>\n\nrain{END}", "rain", thoughts="let me")
    later = Message(role="system", text=now)
    said, given = Message(role="assistant", text="rain"), {"session": "s"} | fields
    composed = talk.compose(later, USER, said, USER, **given)
    assert composed.notes == (("earlier_thoughts_unknown",) if is_told else ())
    thoughtful = Message(role="assistant", text="rain", reasoning="let me")
    assert talk.compose(later, USER, thoughtful, USER, **given).notes == ()
