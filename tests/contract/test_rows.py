"""Sequences that join a batch with their own caches decode as upstream's own way in has them."""

import importlib
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.kv import layers
from runtime.types import GenerateRequest, SamplingParams, TokenPrompt
from runtime.worker.decode import DecodedToken, Decoder
from runtime.worker.model import LoadedModel
from runtime.worker.sequence import Sequence, SequenceGroup
from tests.kv_sessions import load
from tests.tiny_models import write_model

upstream: Any = importlib.import_module("mlx_lm.generate")

NUM_TOKENS = 6
DEVIATION = 1e-5
FAMILIES = ["qwen3", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v32"]
REQUEST = GenerateRequest(
    request_id="r",
    model="m",
    prompt=TokenPrompt(token_ids=()),
    sampling=SamplingParams(temperature=0.0),
    ignore_eos=True,
)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    return load(write_model(tmp_path / "model", request.param))


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * position) % 400 for position in range(40 + 25 * number)]


def group_of(model: LoadedModel, number: int, num_choices: int = 1) -> SequenceGroup:
    """A prefilled prompt, ready to be inserted."""
    ids = prompt(number)
    kv = model.new_kv()
    model.prefill(ids[:-1], kv)
    group = SequenceGroup(
        request=REQUEST,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        max_tokens=NUM_TOKENS,
        deadline_s=0.0,
        kv=kv,
    )
    nobody = cast("Any", None)
    group.sequences = [Sequence(group, index, nobody, nobody) for index in range(num_choices)]
    return group


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_prompts_that_are_computed_in_one_forward_are_as_if_each_were_alone(
    family: str, tmp_path: Path
):
    model = load(write_model(tmp_path / "model", family))
    assert model.has_plain_rows
    layout = layers.layout_of(model.new_kv())
    prompts = [prompt(number)[:length] for number, length in enumerate((30, 3, 64, 41, 1))]
    known = [0, 2, 20, 33, 0]
    begun, alone = [model.new_kv() for _ in prompts], [model.new_kv() for _ in prompts]
    for ids, num_known, one, other in zip(prompts, known, begun, alone, strict=True):
        if num_known:
            model.prefill(ids[:num_known], one)
            model.prefill(ids[:num_known], other)
        model.prefill(ids[num_known:], other)
    lacking = [ids[num_known:] for ids, num_known in zip(prompts, known, strict=True)]
    before = [held(model, kv, num) if num else [] for kv, num in zip(begun, known, strict=True)]
    computed = model.prefill_together(lacking, begun)
    after = [held(model, kv, num) if num else [] for kv, num in zip(begun, known, strict=True)]
    assert before == after, "a forward that fails is done again, one by one"
    for ids, one, other in zip(prompts, computed, alone, strict=True):
        assert {cache.offset for cache in one} == {len(ids)}
        arrays = zip(*(layers.cut(kv, layout, 0, len(ids)) for kv in (one, other)), strict=True)
        for mine, theirs in arrays:
            assert mx.allclose(mine, theirs, atol=DEVIATION)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v32"])
def test_what_cannot_forget_its_last_tokens_is_computed_alone(family: str, tmp_path: Path):
    assert not load(write_model(tmp_path / "model", family)).has_plain_rows


def decoded(decoder: Decoder, groups: list[SequenceGroup]) -> list[list[DecodedToken]]:
    """What each sequence says when a group joins with every second step."""
    said: dict[Sequence, list[DecodedToken]] = {one: [] for g in groups for one in g.sequences}
    waiting = list(groups)
    while waiting or decoder.num_running:
        if waiting:
            group = waiting.pop(0)
            decoder.insert(group, group.sequences, takes=True)
        for _ in range(2):
            for token in decoder.step():
                token.sequence.output_token_ids.append(token.token_id)
                said[token.sequence].append(token)
    return list(said.values())


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(cast("bytes", mx.contiguous(array))))


def held(model: LoadedModel, kv: list[Any], num_tokens: int) -> list[bytes]:
    """All that these caches hold of so many tokens."""
    layout = layers.layout_of(model.new_kv())
    arrays = [*layers.cut(kv, layout, 0, num_tokens), *layers.checkpoint(kv, layout).arrays]
    return [bits(array) for array in arrays]


def test_one_that_is_handed_over_says_and_leaves_what_upstream_would(model: LoadedModel):
    (said,) = decoded(Decoder(model, 4), [group_of(model, 1)])
    ids, kv = prompt(1), group_of(model, 1).kv
    generator = upstream.BatchGenerator(model.model, stream=model.stream)
    generator.insert([ids[-1:]], max_tokens=[NUM_TOKENS], caches=[kv], all_tokens=[ids[:-1]])
    expected = [one for _ in range(NUM_TOKENS + 1) for one in generator.next()[1]]
    generator.close()
    assert [token.token_id for token in said] == [one.token for one in expected]
    for token, one in zip(said, expected, strict=True):
        assert bits(token.logprobs) == bits(one.logprobs)
    assert said[-1].kv is not None
    num_tokens = len(ids) + NUM_TOKENS
    known = held(model, said[-1].kv, num_tokens)
    assert known == held(model, expected[-1].prompt_cache, num_tokens)


def test_those_that_join_others_or_share_their_beginning_say_what_they_say_alone(
    model: LoadedModel,
):
    alone = [decoded(Decoder(model, 4), [group_of(model, number)])[0] for number in (0, 1, 2)]
    # More choices than there are places: the last ones join when others have left.
    groups = [group_of(model, 0), group_of(model, 1, 4), group_of(model, 2)]
    together = decoded(Decoder(model, 3), groups)
    for said, expected in zip(together, [alone[0], *[alone[1]] * 4, alone[2]], strict=True):
        assert [one.token_id for one in said] == [one.token_id for one in expected]
        for one, other in zip(said, expected, strict=True):
            assert mx.abs(one.logprobs - other.logprobs).max() <= DEVIATION


def test_one_that_never_joined_leaves_nothing(model: LoadedModel):
    decoder, group = Decoder(model, 1), group_of(model, 0, 2)
    decoder.insert(group, group.sequences, takes=True)
    list(decoder.step())
    first, second = group.sequences
    assert decoder.take(second) is None
    assert decoder.sequences == [first]
    assert decoder.take(first) is not None
    assert not decoder.num_running


def mask_of(kv: list[Any]) -> mx.array | None:
    """What a step of one token is not to see; the first layer's."""
    return kv[0].make_mask(1)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_step_has_a_mask_only_where_rows_are_of_several_lengths(
    model: LoadedModel, data: st.DataObject
):
    """A kernel without one is up to twice as fast on a GPU; with one too few, rows see padding."""
    lengths: list[int] = []
    batch: list[Any] = []
    for _ in range(data.draw(st.integers(1, 8))):
        if len(lengths) > 1 and data.draw(st.booleans()):
            every = st.integers(0, len(lengths) - 1)
            kept = sorted(data.draw(st.sets(every, min_size=1)))
            layers.keep_rows(batch, kept)
            lengths = [lengths[number] for number in kept]
        else:
            joining = data.draw(st.lists(st.sampled_from([3, 5, 9]), min_size=1, max_size=2))
            kvs = [prefilled(model, number) for number in joining]
            alone = len(kvs) == 1
            rows = layers.handed_over(kvs[0]) if alone else layers.merged(kvs)
            if batch:
                layers.add_rows(batch, rows)
            else:
                batch = rows
            lengths += joining
        mask = mask_of(batch)
        longest = max(lengths)
        hidden = [
            [column < longest - length for column in range(longest + 1)] for length in lengths
        ]
        if len(set(lengths)) == 1:
            assert mask is None
        else:
            assert mask is not None
            seen = cast("list[list[bool]]", mask[:, 0, 0].tolist())
            assert [[not one for one in row] for row in seen] == hidden


def prefilled(model: LoadedModel, num_tokens: int) -> list[Any]:
    kv = model.new_kv()
    model.prefill(list(range(num_tokens)), kv)
    return kv


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_a_row_that_was_alone_leaves_with_its_arrays_and_others_with_views(model: LoadedModel):
    alone = decoded(Decoder(model, 8), [group_of(model, 1)])
    beside = decoded(Decoder(model, 8), [group_of(model, 1), group_of(model, 2)])
    assert layers.can_go_on(alone[0][-1].kv or ())
    assert not any(layers.can_go_on(said[-1].kv or [None]) for said in beside[:1])
