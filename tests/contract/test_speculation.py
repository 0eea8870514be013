"""Rows that propose what they say next say what they say without, and leave the same KV."""

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv import layers
from runtime.types import GenerateRequest, SamplingParams, TokenPrompt
from runtime.worker.decode import Decoder
from runtime.worker.draft import DraftRows, why_no_draft
from runtime.worker.draft import Said as SaidSoFar
from runtime.worker.model import LoadedModel
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.speculation import StepCosts
from tests.kv_sessions import load
from tests.tiny_models import write_model

NUM_TOKENS = 40
DEVIATION = 2e-4
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.3, seed=5, top_k=50)
PENALISED = SamplingParams(
    temperature=0.9,
    seed=11,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((7, 3.0), (9, -100.0)),
)


class AlwaysPays(StepCosts):
    """A device on which a wide step takes no longer than a plain one."""

    def saw(self, num_rows: int, width: int, seconds: float) -> None: ...

    def plain_s(self, num_rows: int) -> float | None:
        return 1.0

    def of(self, num_rows: int, width: int) -> float | None:
        return 1.0


class HardlyPays(AlwaysPays):
    """A device on which a wide step takes a fifth longer, so that who is wrong thrice rests."""

    def of(self, num_rows: int, width: int) -> float | None:
        return 1.0 if width == 1 else 1.2


class Ask(NamedTuple):
    """One row: its prompt, its sampling, and what is predicted of its answer."""

    number: int
    sampling: SamplingParams = GREEDY
    prediction: tuple[int, ...] = ()
    num_tokens: int = NUM_TOKENS


class Said(NamedTuple):
    token_ids: list[int]
    logprobs: list[mx.array]
    kv: list[Any]
    num_accepted: int
    num_proposed: int


KEEPS_SHAPES = "qwen3 where shapes are kept"


@pytest.fixture(scope="module", params=["qwen3", KEEPS_SHAPES, "llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    family = str(request.param).split()[0]
    loaded = load(write_model(tmp_path_factory.mktemp("speculation") / "model", family))
    loaded.keeps_shapes = request.param == KEEPS_SHAPES
    return loaded


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * position) % 400 for position in range(20 + 25 * number)]


def group_of(model: LoadedModel, ask: Ask) -> SequenceGroup:
    ids, kv = prompt(ask.number), model.new_kv()
    model.prefill(ids[:-1], kv)
    group = SequenceGroup(
        request=GenerateRequest(
            request_id=str(ask.number),
            model="m",
            prompt=TokenPrompt(token_ids=()),
            sampling=ask.sampling,
            ignore_eos=True,
            speculates=True,
        ),
        token_ids=ids,
        num_prompt_tokens=len(ids),
        max_tokens=ask.num_tokens,
        deadline_s=0.0,
        kv=kv,
        prediction=ask.prediction,
    )
    nobody = cast("Any", None)
    group.sequences = [Sequence(group, 0, nobody, nobody)]
    return group


def said_by(
    model: LoadedModel,
    asks: list[Ask],
    costs: StepCosts | None,
    apart: int = 0,
    rows: int = 8,
    draft: LoadedModel | None = None,
) -> list[Said]:
    """What each says, when they join so many steps after one another."""
    decoder = Decoder(model, rows, costs, draft=draft)
    groups = [group_of(model, ask) for ask in asks]
    found = {group.sequences[0]: Said([], [], [], 0, 0) for group in groups}
    waiting, until_next = list(groups), 0
    while waiting or decoder.num_running:
        while waiting and (until_next == 0 or not decoder.num_running):
            group = waiting.pop(0)
            decoder.insert(group, group.sequences, takes=True)
            until_next = apart
        until_next -= 1 if until_next else 0
        for token in decoder.step():
            sequence = token.sequence
            sequence.output_token_ids.append(token.token_id)
            sequence.num_accepted_tokens += token.was_proposed
            said = found[sequence]
            said.token_ids.append(token.token_id)
            said.logprobs.append(token.logprobs)
            if token.is_last:
                assert token.kv is not None
                said.kv.extend(token.kv)
    return [
        said._replace(num_accepted=one.num_accepted_tokens, num_proposed=one.num_proposed_tokens)
        for one, said in found.items()
    ]


def mangled(token_ids: list[int], every: int) -> tuple[int, ...]:
    """A prediction that is wrong now and then: a token other, one more, one less."""
    ids: list[int] = []
    for number, token_id in enumerate(token_ids, 1):
        kind = (number // every) % 3 if number % every == 0 else 3
        ids += [[(token_id + 1) % 400], [token_id, 3], [], [token_id]][kind]
    return tuple(ids)


def is_kv_of(model: LoadedModel, kv: list[Any], token_ids: list[int]) -> bool:
    """These caches hold the KV of these tokens, as a prefill has it, and no more."""
    fresh = model.new_kv()
    model.prefill(token_ids, fresh)
    layout = layers.layout_of(fresh)
    same = [
        bool(mx.abs(ours - other).max() <= DEVIATION)
        for ours, other in zip(
            layers.cut(kv, layout, 0, len(token_ids)),
            layers.cut(fresh, layout, 0, len(token_ids)),
            strict=True,
        )
    ]
    return all(same) and all(cache.offset == len(token_ids) for cache in kv)


def same(ours: Said, others: Said) -> bool:
    pairs = zip(ours.logprobs, others.logprobs, strict=True)
    return ours.token_ids == others.token_ids and all(
        bool(mx.abs(mx.exp(one) - mx.exp(other)).max() <= DEVIATION) for one, other in pairs
    )


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seed", "penal"])
def test_a_row_says_the_same_and_leaves_the_same_kv(model: LoadedModel, sampling: SamplingParams):
    (plain,) = said_by(model, [Ask(1, sampling)], None)
    for every in (NUM_TOKENS + 1, 7, 3, 1):
        ask = Ask(1, sampling, mangled(plain.token_ids, every))
        (ours,) = said_by(model, [ask], AlwaysPays())
        assert same(ours, plain), every
        assert is_kv_of(model, ours.kv, [*prompt(1), *ours.token_ids])
        assert 0 <= ours.num_accepted <= ours.num_proposed
        if every >= 7:
            assert ours.num_accepted > NUM_TOKENS // 3


def test_rows_with_and_without_proposals_say_what_they_say_alone(model: LoadedModel):
    asks = [Ask(0), Ask(1, SEEDED), Ask(2, PENALISED), Ask(3), Ask(4, GREEDY, (), 9)]
    alone = [said_by(model, [ask], None)[0] for ask in asks]
    every = (8, 5, 6, 0, 0)
    predicting = [
        ask._replace(prediction=mangled(one.token_ids, n)) if n else ask
        for ask, one, n in zip(asks, alone, every, strict=True)
    ]
    for apart, rows in ((0, 8), (2, 3), (5, 2)):
        together = said_by(model, predicting, AlwaysPays(), apart, rows)
        for ask, ours, plain in zip(asks, together, alone, strict=True):
            assert same(ours, plain), (apart, ask)
            assert is_kv_of(model, ours.kv, [*prompt(ask.number), *ours.token_ids])
        assert sum(one.num_accepted for one in together) > NUM_TOKENS // 2


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_whatever_is_predicted_changes_nothing(model: LoadedModel, data: st.DataObject):
    numbers = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
    samplings = st.sampled_from([GREEDY, SEEDED, PENALISED])
    asks = [
        Ask(number, data.draw(samplings), (), data.draw(st.integers(1, 20))) for number in numbers
    ]
    alone = [said_by(model, [ask], None)[0] for ask in asks]
    predictions = [
        tuple(data.draw(st.integers(0, 399)) if data.draw(st.booleans()) else t for t in ids[k:])
        for ids, k in ((one.token_ids, data.draw(st.integers(0, 3))) for one in alone)
    ]
    predicting = [a._replace(prediction=p) for a, p in zip(asks, predictions, strict=True)]
    apart = data.draw(st.integers(0, 4))
    for ask, ours, plain in zip(
        asks, said_by(model, predicting, AlwaysPays(), apart), alone, strict=True
    ):
        assert same(ours, plain)
        assert is_kv_of(model, ours.kv, [*prompt(ask.number), *ours.token_ids])


def test_rows_that_outgrow_their_room_say_what_they_say_alone(model: LoadedModel):
    """They have 256 tokens of it at first: one crosses that with a wide step, one while alone."""
    asks = [Ask(9), Ask(8), Ask(1)]
    alone = [said_by(model, [ask], None)[0] for ask in asks]
    predicting = [
        a._replace(prediction=tuple(p.token_ids)) for a, p in zip(asks, alone, strict=True)
    ]
    for some in (predicting[:1], predicting):
        together = said_by(model, some, AlwaysPays(), 2)
        for ask, ours, plain in zip(some, together, alone, strict=False):
            assert same(ours, plain)
            assert is_kv_of(model, ours.kv, [*prompt(ask.number), *ours.token_ids])
            assert ours.num_accepted > NUM_TOKENS // 2


def test_who_rests_between_its_guesses_says_the_same(model: LoadedModel):
    asks = [Ask(0), Ask(1, SEEDED), Ask(2, PENALISED)]
    asks = [ask._replace(num_tokens=100) for ask in asks]
    alone = [said_by(model, [ask], None)[0] for ask in asks]
    wrong = [
        (*one.token_ids[:12], *mangled(one.token_ids[12:60], 2), *one.token_ids[60:])
        for one in alone
    ]
    predicting = [ask._replace(prediction=p) for ask, p in zip(asks, wrong, strict=True)]
    together = said_by(model, predicting, HardlyPays(), 3)
    for ask, ours, plain in zip(asks, together, alone, strict=True):
        assert same(ours, plain), ask
        assert is_kv_of(model, ours.kv, [*prompt(ask.number), *ours.token_ids])
        assert 0 < ours.num_accepted < ours.num_proposed


def test_a_draft_model_with_another_tokenizer_is_refused_by_what_differs(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path
):
    assert why_no_draft(model, other_model) is None
    path = write_model(tmp_path / "model", "qwen3")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[20:22]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "of which 2 have other numbers" in (why_no_draft(model, load(path)) or "")


def test_a_draft_model_whose_caches_cannot_be_trimmed_is_refused(
    model: LoadedModel, tmp_path: Path
):
    draft = load(write_model(tmp_path / "model", "gemma3_text"))
    assert "cannot be undone" in (why_no_draft(model, draft) or "")


def test_what_is_stopped_in_the_middle_of_a_step_leaves_kv_of_what_it_said(model: LoadedModel):
    (plain,) = said_by(model, [Ask(1)], None)
    for num_said in range(1, 12):
        group = group_of(model, Ask(1, prediction=tuple(plain.token_ids)))
        decoder, (sequence,) = Decoder(model, 4, AlwaysPays()), group.sequences
        decoder.insert(group, group.sequences, takes=True)
        kv = None
        while kv is None:
            for token in decoder.step():
                sequence.output_token_ids.append(token.token_id)
                if len(sequence.output_token_ids) == num_said:
                    kv = decoder.take(sequence)
                    break
        assert is_kv_of(model, kv, [*prompt(1), *plain.token_ids[:num_said]])
        assert not decoder.num_running


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("drafting") / "model", "llama", seed=5))


def test_a_draft_model_that_is_always_right_is_accepted(model: LoadedModel):
    (plain,) = said_by(model, [Ask(1)], None)
    (ours,) = said_by(model, [Ask(1)], AlwaysPays(), draft=model)
    assert same(ours, plain)
    assert is_kv_of(model, ours.kv, [*prompt(1), *ours.token_ids])
    assert ours.num_accepted > NUM_TOKENS * 3 // 4
    assert ours.num_accepted == ours.num_proposed


@pytest.mark.parametrize(("apart", "rows"), [(0, 8), (2, 3), (5, 2)])
def test_whatever_a_draft_model_proposes_rows_say_what_they_say_alone(
    model: LoadedModel, other_model: LoadedModel, apart: int, rows: int
):
    asks = [Ask(0), Ask(1, SEEDED), Ask(2, PENALISED), Ask(3), Ask(4, GREEDY, (), 9)]
    alone = [said_by(model, [ask], None)[0] for ask in asks]
    asks[3] = asks[3]._replace(prediction=mangled(alone[3].token_ids, 6))
    for draft in (model, other_model):
        together = said_by(model, asks, AlwaysPays(), apart, rows, draft)
        for ask, ours, plain in zip(asks, together, alone, strict=True):
            assert same(ours, plain), ask
            assert is_kv_of(model, ours.kv, [*prompt(ask.number), *ours.token_ids])
        assert sum(one.num_proposed for one in together) > NUM_TOKENS


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_draft_model_goes_by_all_that_its_rows_have_said(model: LoadedModel, data: st.DataObject):
    """All it guesses of itself is right, whoever asks when and however much was said meanwhile."""
    numbers = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
    asks = [Ask(number) for number in numbers]
    answers = [said_by(model, [ask], None)[0].token_ids for ask in asks]
    rows = [group_of(model, ask).sequences[0] for ask in asks]
    drafts, num_said = DraftRows(model, model.vocab_size, StepCosts()), [0] * len(asks)
    for row, ask in zip(rows, asks, strict=True):
        while drafts.prepare(row, prompt(ask.number)):
            pass
        assert drafts.is_ready(row)
    for _ in range(5):
        asking = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
        num_tokens = data.draw(st.sampled_from([1, 3, 7]))
        asked = {
            rows[n]: SaidSoFar(
                [*prompt(numbers[n]), *answers[n][: num_said[n]]], answers[n][num_said[n]]
            )
            for n in asking
        }
        found = drafts.propose(asked, num_tokens)
        for n in asking:
            start = num_said[n] + 1
            assert found[rows[n]] == answers[n][start : start + num_tokens]
        num_said = [n + data.draw(st.integers(0, 6)) for n in num_said]
        if len(rows) > 1 and data.draw(st.booleans()):
            drafts.forget(rows.pop())


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_model_whose_caches_cannot_be_trimmed_does_not_speculate(tmp_path: Path, family: str):
    model = load(write_model(tmp_path / "model", family))
    assert not model.has_plain_rows
    (plain,) = said_by(model, [Ask(1)], None)
    (ours,) = said_by(model, [Ask(1, prediction=tuple(plain.token_ids))], AlwaysPays())
    assert (ours.token_ids, ours.num_proposed) == (plain.token_ids, 0)
