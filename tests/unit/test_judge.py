"""The parts of `make judge` that need no model: names, weights, comparisons and the page."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest

from ops.judge.bench import CUT_CHARACTER, FIRST_BLANK, Amount, beside
from ops.judge.beside_mlx_lm import perplexity
from ops.judge.compare import Divergence, Scored, divergence, noise, parting
from ops.judge.conversion import (
    BYTE_PIECE,
    GEMMA_PARTS,
    LLAMA_PARTS,
    Piece,
    halves_apart,
    hub_name,
    merges_of,
)
from ops.judge.outcome import Outcome
from ops.judge.reference import Continued
from ops.judge.report import Report, packages, page
from ops.judge.schemas import schemas
from ops.judge.server import Call, Function, Said, message_of, said
from ops.judge.shapes import judged, stops_of
from ops.judge.talks import steps
from ops.judge.texts import lengths

ROOT = Path(__file__).parents[2]
NAMES = ("Hearth", "mlx_lm")


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("token_embd.weight", LLAMA_PARTS, "model.embed_tokens.weight"),
        ("output_norm.weight", LLAMA_PARTS, "model.norm.weight"),
        ("output.weight", LLAMA_PARTS, "lm_head.weight"),
        ("blk.0.attn_q.weight", LLAMA_PARTS, "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", LLAMA_PARTS, "model.layers.29.post_attention_layernorm.weight"),
        ("blk.7.ffn_norm.weight", GEMMA_PARTS, "model.layers.7.pre_feedforward_layernorm.weight"),
        ("blk.7.attn_k_norm.weight", GEMMA_PARTS, "model.layers.7.self_attn.k_norm.weight"),
    ],
)
def test_tensors_get_the_names_of_their_family(
    name: str, parts: dict[str, str], expected: str
) -> None:
    assert hub_name(name, parts) == expected


def test_a_tensor_of_no_known_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q_norm\.weight is of no known kind"):
        hub_name("blk.0.attn_q_norm.weight", LLAMA_PARTS)


def test_pairs_that_rotate_together_become_halves_of_a_head() -> None:
    two_heads = np.arange(8, dtype=np.float32)[:, None]
    assert halves_apart(two_heads, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_scores_become_merges_the_best_first_and_bytes_have_none() -> None:
    pieces = [
        Piece("a", 1, -9.0),
        Piece("b", 1, -8.0),
        Piece("ab", 1, -2.0),
        Piece("abb", 1, -1.0),
        Piece("bb", 1, -2.0),
        Piece("<0x0A>", BYTE_PIECE, 0.0),
    ]
    assert merges_of(pieces) == [("a", "bb"), ("ab", "b"), ("a", "b"), ("b", "b")]


def scored(*tokens: tuple[str, float, str, float]) -> list[Scored]:
    return [
        Scored(one, logprob, [(one, logprob), (other, beside)])
        for one, logprob, other, beside in tokens
    ]


def test_two_answers_part_at_the_first_token_that_differs() -> None:
    ours = scored(("a", -1.0, "x", -2.0), ("b", -1.0, "c", -1.5))
    theirs = scored(("a", -1.25, "x", -2.0), ("c", -1.0, "b", -1.5))
    assert parting(ours, theirs) == 1
    assert parting(ours, ours) is None
    assert parting(ours, ours[:1]) == 1
    assert noise(ours, theirs) == 0.25


def test_a_tie_on_both_sides_explains_a_divergence() -> None:
    ours = scored(("b", -1.0, "c", -1.0005))
    theirs = scored(("c", -1.0002, "b", -1.0004))
    assert divergence("here", ours, theirs, NAMES) == Divergence(
        "here",
        "token 1 is a tie (Hearth: 'b' -1.00000, 'c' -1.00050; mlx_lm: 'c' -1.00020, 'b' -1.00040)",
        True,
    )


def test_a_tie_on_one_side_explains_nothing() -> None:
    ours = scored(("b", -1.0, "c", -1.0005))
    theirs = scored(("c", -1.0, "b", -1.1))
    assert not divergence("here", ours, theirs, NAMES).is_explained
    unlikely = scored(("c", -1.0, "d", -1.0001))
    found = divergence("here", ours, unlikely, NAMES)
    assert "not among the likeliest" in found.reason
    assert not found.is_explained


def test_an_answer_that_ends_early_is_not_explained() -> None:
    ours = scored(("a", -1.0, "b", -2.0))
    assert divergence("here", ours, [], NAMES) == Divergence(
        "here", "mlx_lm ended after 0 tokens, the other went on", False
    )


def answer(text: str, *tokens: tuple[str, float, str, float], finish: str = "length") -> Said:
    return Said(text, [], finish, [*scored(*tokens)], 1, 0)


def test_only_a_blank_at_the_beginning_may_be_missing_from_the_text_beside() -> None:
    tokens = [(" a", -1.0, "b", -2.0)]
    theirs = Continued("a", ["", "a"], scored(*tokens), "length", 1)
    assert beside("x", answer("a", *tokens), theirs) is None
    assert beside("x", answer(" a", *tokens), theirs) == Divergence("x", FIRST_BLANK, True)
    other = beside("x", answer("  a", *tokens), theirs)
    assert other is not None
    assert not other.is_explained


def test_a_character_that_was_cut_may_have_another_number_of_marks() -> None:
    theirs = Continued("a\ufffd", ["", "a\ufffd"], [], "length", 1)
    assert beside("x", answer("a\ufffd\ufffd"), theirs) == Divergence("x", CUT_CHARACTER, True)
    other = beside("x", answer("b\ufffd\ufffd"), theirs)
    assert other is not None
    assert not other.is_explained


def test_perplexity_is_the_exponent_of_the_mean() -> None:
    assert perplexity([-1.0, -3.0]) == pytest.approx(7.38905609893065)


def test_events_of_a_stream_become_the_answer_that_comes_whole() -> None:
    logprobs = {"content": [{"token": "ab", "logprob": -1.0}]}
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    whole = {
        "choices": [
            {
                "message": {
                    "content": "ab",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
                "logprobs": logprobs,
            }
        ],
        "usage": usage,
    }
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}
    events = [
        {"choices": [{"delta": {"content": "a"}, "logprobs": logprobs}]},
        {"choices": [{"delta": {"content": "b", "tool_calls": [call]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": usage},
    ]
    from ops.judge.server import _Answer

    found = said([msgspec.convert(one, _Answer) for one in events])
    expected = said([msgspec.convert(whole, _Answer)])
    assert found.same == expected.same == ("ab", [("f", "{}")], "tool_calls")
    assert found.tokens == expected.tokens == [Scored("ab", -1.0)]
    assert (found.num_prompt, found.num_cached, found.pieces) == (9, 4, ["a", "b"])


def test_an_answer_goes_back_as_it_came() -> None:
    called = Said("", [Call(Function("f", "{}"), "1")], "tool_calls", [], 1, 0)
    assert message_of(called) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }


def test_lengths_grow_by_the_same_ratio_from_the_shortest_to_the_longest() -> None:
    assert lengths(3, 3000) == [30, 300, 3000]
    assert lengths(1, 3000) == [30]
    assert (len(lengths(40, 6000)), lengths(40, 6000)[-1]) == (40, 6000)


def test_there_are_sixty_valid_schemas() -> None:
    given = schemas()
    assert len(given) == 60
    assert len({json.dumps(schema) for schema in given.values()}) == 60
    for schema in given.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_an_answer_is_judged_by_its_schema_and_by_how_it_ended() -> None:
    schema: dict[str, object] = {"type": "integer"}
    assert judged("x", schema, answer("7", finish="stop")) is None
    for text, finish in (("7", "length"), ('"7"', "stop"), ("7,", "stop")):
        assert judged("x", schema, answer(text, finish=finish)) is not None


def test_stop_strings_lie_in_the_text_and_have_no_broken_character() -> None:
    assert stops_of("abcdef日本語\ufffd") == ["e", "日本語"]
    assert stops_of("abcde\ufffd") == []


def test_a_conversation_has_twelve_turns_with_edits_branches_and_interruptions() -> None:
    planned = steps(lambda kind, _length, _number: kind)
    assert len(planned) == 12
    assert [one.before for one in planned if one.before] == [
        *("restart", "kill", "kill_worker", "restart", "kill"),
    ]
    assert all(one.after is None or 0 < one.after <= n for n, one in enumerate(planned))


LOCK = """\
one-model==1.0 \\
    --hash=sha256:{a}
    # via hearth (pyproject.toml:judge)
reader==0.2.1 \\
    --hash=sha256:{b} \\
    --hash=sha256:{c}
""".format(a="a" * 64, b="b" * 64, c="c" * 64)


def test_packages_are_read_from_the_lock_file() -> None:
    assert packages(LOCK) == [
        ("one-model", "1.0", ["a" * 64]),
        ("reader", "0.2.1", ["b" * 64, "c" * 64]),
    ]
    names = [name for name, _, _ in packages((ROOT / "requirements-judge.lock").read_text())]
    assert len(names) == 7


def test_the_page_tells_each_divergence_and_which_is_not_explained() -> None:
    good, bad = Outcome("perplexity"), Outcome("conversation")
    good.count(None)
    good.count(Divergence("text 2", "a tie", True))
    bad.count(Divergence("turn 3", "no | tie\nat all", False))
    amounts = {"A, perplexity": Amount(), "A, conversation": Amount(num_turns=3)}
    text = page(Report({"Hearth": "1.2"}, amounts, {"A": [good, bad]}), LOCK)
    assert "| perplexity | 1 of 2 equal, 1 explained | Texts scored" in text
    assert "| conversation | 0 of 1 equal, **1 not** |" in text
    assert "| greedy text | not run |" in text
    assert "- text 2: a tie.\n" in text
    assert "- **not explained**: turn 3: no \\| tie at all.\n" in text
    assert "**A part was asked for.** A whole run is 40 prompts of up to 6,000 tokens" in text
    assert "60 schemas, 3 turns (A, conversation)" in text
    assert "Hearth 1.2.\n" in text
    assert f"| `one-model` | 1.0 | `{'a' * 64}` |" in text
