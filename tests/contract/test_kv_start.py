"""KV that is quantised from a start on: as mlx-lm quantises it, however it came to be there."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from runtime.kv import layers
from runtime.kv.cursor import CacheCursor
from runtime.types import GenerateRequest, SamplingParams, TokenPrompt
from runtime.worker.decode import DecodedToken, Decoder
from runtime.worker.model import LoadedModel
from runtime.worker.sequence import Sequence as Choice
from runtime.worker.sequence import SequenceGroup
from tests.kv_sessions import BLOCK_TOKENS, SLICE_TOKENS, Session, ids, load
from tests.tiny_models import write_model

upstream: Any = importlib.import_module("mlx_lm.generate")

START = 96
BITS, GROUP = 8, 64
FAMILIES = ["qwen3", "gemma3_text", "qwen3_next"]
"""All layers can be sliced; and some keep a window, or a state, and are never quantised."""
GREEDY = GenerateRequest(
    request_id="r",
    model="m",
    prompt=TokenPrompt(token_ids=()),
    sampling=SamplingParams(temperature=0.0),
    ignore_eos=True,
)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_model(tmp_path_factory.mktemp("model"), request.param, head_dim=64)
    return load(path, BITS, START)


def forward(model: LoadedModel, token_ids: Sequence[int], kv: list[Any]) -> mx.array:
    """As mlx-lm's own loop calls a model with `quantized_kv_start`.

    It refuses models with windows; of these all but the windows is given to it.
    """
    with mx.stream(model.stream):
        logits = model.model(mx.array(list(token_ids))[None], cache=kv)
        for number, cache in enumerate(kv):
            if type(cache) is not RotatingKVCache:
                one = [cache]
                upstream.maybe_quantize_kv_cache(one, START, GROUP, BITS)
                kv[number] = one[0]
        mx.eval(logits, [cache.state for cache in kv])
    return logits[0, -1]


def computed(model: LoadedModel, prompt: Sequence[int], answer: Sequence[int] = ()) -> list[Any]:
    """Upstream's caches of a prompt in slices, without its last token, or with it and an answer."""
    kv = make_prompt_cache(model.model)
    for start in range(0, len(prompt) - 1, SLICE_TOKENS):
        forward(model, prompt[start : min(start + SLICE_TOKENS, len(prompt) - 1)], kv)
    for token_id in [prompt[-1], *answer] if answer else []:
        forward(model, [token_id], kv)
    return kv


def check_same(model: LoadedModel, kv: list[Any], theirs: list[Any], num_tokens: int) -> None:
    """To the bit."""
    if model.is_at_start(kv):
        model.quantise(kv)
    layout = layers.layout_of(theirs)
    assert layers.layout_of(kv) == layout
    ours, expected = (
        [*layers.cut(one, layout, 0, num_tokens), *layers.checkpoint(one, layout).arrays]
        for one in (kv, theirs)
    )
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("num_tokens", [START - 7, START - 1, START, START + 1, START + 40])
def test_prompt_and_answer_have_the_kv_that_mlx_lm_computes(model: LoadedModel, num_tokens: int):
    prompt, said = ids(1, num_tokens), ids(2, 9)
    session = Session(model)
    cursor = session.cursor(prompt)
    kv, start = session.take_up(cursor)
    session.compute(cursor, kv, start)
    session.answer(cursor, kv, said)
    check_same(model, kv, computed(model, prompt, said), num_tokens + len(said))


class Life:
    """Workers of one model, one after the other, over one store."""

    def __init__(self, model: LoadedModel, root: Path, hot_bytes: int) -> None:
        self.model, self.root, self.hot_bytes = model, root, hot_bytes
        self.session = self._begun()

    def _begun(self) -> Session:
        return Session(self.model, self.root, hot_bytes=self.hot_bytes)

    def restart(self) -> None:
        self.session.close()
        self.session = self._begun()

    def lose(self, number: int) -> None:
        """One of the files is gone."""
        self.restart()
        files = sorted(self.root.rglob("*.safetensors"))
        if files:
            files[number % len(files)].unlink()

    def ask(self, prompt: list[int]) -> CacheCursor:
        cursor = self.session.cursor(prompt)
        kv, start = self.session.take_up(cursor)
        self.session.compute(cursor, kv, start)
        check_same(self.model, kv, computed(self.model, prompt), len(prompt) - 1)
        self.session.tiers.release(cursor)
        return cursor


PIECE = st.integers(0, 1)
PROMPTS = st.lists(PIECE, min_size=1, max_size=6)
EVENTS = st.one_of(PROMPTS, PROMPTS, st.just("restart"), st.integers(0, 9))


def spoken(pieces: Sequence[int]) -> list[int]:
    """Prompts that share pieces share whole slices, so that they are computed to the same bits."""
    path = itertools.accumulate(pieces, lambda seed, piece: 2 * seed + piece, initial=1)
    slices = [ids(seed, SLICE_TOKENS) for seed in itertools.islice(path, 1, None)]
    return [*itertools.chain.from_iterable(slices), 7]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(events=st.lists(EVENTS, min_size=2, max_size=8), is_tight=st.booleans())
def test_what_is_taken_up_is_what_would_be_computed(
    model: LoadedModel, events: list[Any], is_tight: bool
):
    """Hot, after restarts and where files are lost, by prompts that part before and after it."""
    with tempfile.TemporaryDirectory() as root:
        life = Life(model, Path(root), 60_000 if is_tight else 1 << 30)
        asked: list[list[int]] = []
        is_whole = not is_tight
        for event in events:
            match event:
                case "restart":
                    life.restart()
                case int():
                    life.lose(event)
                    is_whole = False
                case _:
                    prompt = spoken(event)
                    cursor = life.ask(prompt)
                    if is_whole and not life.session.tiers.needs_state:
                        assert cursor.use.num_tokens == _most_shared(prompt, asked)
                    asked.append(prompt)
        life.session.close()


def test_a_prefix_that_ends_before_the_start_can_be_pinned_after_it(
    model: LoadedModel, tmp_path: Path
):
    prompt, prefix_end = ids(1, START + 10), START - 7
    session = Session(model, tmp_path)
    for mode, where in (("full", 0), ("prefix", prefix_end)):
        cursor = session.cursor(prompt, mode=mode, prefix_end=where, boundaries=(where,))
        kv, start = session.take_up(cursor)
        session.compute(cursor, kv, start)
    session.tiers.pin(cursor, kv, "mine")
    session.close()
    pinned = [one for one in session.tiers.memory if one.ttl_class == "pinned"]
    if session.tiers.needs_state:
        assert not any(one.has_state for one in pinned if one.end == prefix_end), "it has passed"
        return
    assert {one.end for one in pinned} >= {*range(BLOCK_TOKENS, prefix_end, BLOCK_TOKENS)}
    theirs = computed(model, prompt[:START])
    layout = layers.layout_of(model.new_kv())
    for one in pinned:
        expected = layers.cut(theirs, layout, one.start, one.end)
        assert all(map(mx.array_equal, one.kv.slices, expected))


def _most_shared(prompt: list[int], asked: list[list[int]]) -> int:
    """How many tokens of a prompt some other one began with, the last token of both aside."""
    pairs = [zip(prompt[:-1], other[:-1], strict=False) for other in asked]
    common = [itertools.takewhile(lambda pair: pair[0] == pair[1], one) for one in pairs]
    return max((len(list(one)) for one in common), default=0)


def group_of(model: LoadedModel, prompt: list[int], num_choices: int, num_said: int) -> Any:
    """A prompt that is computed, ready to be decoded."""
    group = SequenceGroup(
        request=GREEDY,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=num_said,
        deadline_s=0.0,
        kv=model.new_kv(),
    )
    assert group.kv is not None
    for start in range(0, len(prompt) - 1, SLICE_TOKENS):
        end = min(start + SLICE_TOKENS, len(prompt) - 1)
        model.prefill(prompt[start:end], group.kv)
    nobody = cast("Any", None)
    group.sequences = [Choice(group, index, nobody, nobody) for index in range(num_choices)]
    return group


def greedy(model: LoadedModel, prompt: list[int], num_said: int) -> list[int]:
    """What mlx-lm says."""
    kv, said = computed(model, prompt), [prompt[-1]]
    for _ in range(num_said):
        said.append(cast("int", forward(model, said[-1:], kv).argmax().item()))
    return said[1:]


def test_rows_leave_their_batch_at_the_start_and_say_what_mlx_lm_says(model: LoadedModel):
    """Some begin before it in one batch, some right at it, some behind it, some end before it."""
    kept: list[tuple[Choice, list[str], int]] = []

    def on_kv_start(sequence: Choice, kv: list[Any], num_tokens: int) -> None:
        kinds = sorted({type(cache).__name__ for cache in kv})
        kept.append((sequence, kinds, num_tokens))
        assert all(cache.offset == START for cache in kv if hasattr(cache, "offset"))

    sizes = [(START - 20, 2, 40), (START - 30, 1, 40), (START - 60, 1, 9)]
    sizes += [(START, 2, 5), (START + 1, 1, 5), (START + 30, 1, 5)]
    groups = [group_of(model, ids(number, size), n, m) for number, (size, n, m) in enumerate(sizes)]
    decoder = Decoder(model, 8)
    decoder.on_kv_start = on_kv_start
    said: dict[Choice, list[int]] = {}
    waiting = list(groups)
    while waiting or decoder.num_running:
        if waiting:
            group = waiting.pop(0)
            decoder.insert(group, group.sequences, takes=True)
        for token in steps(decoder, 2):
            token.sequence.output_token_ids.append(token.token_id)
            said.setdefault(token.sequence, []).append(token.token_id)
            if token.is_last:
                held = len(token.sequence.group.token_ids) + len(said[token.sequence])
                names = {type(cache).__name__ for cache in token.kv or ()}
                assert ("QuantizedKVCache" in names) == (held > START), names
    for group in groups:
        expected = greedy(model, group.token_ids, group.max_tokens)
        assert [said[one] for one in group.sequences] == [expected] * len(group.sequences)
    crossed = [one for group in (*groups[:2], groups[3]) for one in group.sequences]
    assert {one for one, _, _ in kept} == set(crossed)
    assert all(num == START and "QuantizedKVCache" not in kinds for _, kinds, num in kept)


def steps(decoder: Decoder, number: int) -> Iterator[DecodedToken]:
    for _ in range(number):
        yield from decoder.step()


def test_a_row_that_is_taken_away_after_the_start_holds_all_it_said(model: LoadedModel):
    prompt = ids(5, START - 3)
    group = group_of(model, prompt, 1, 50)
    decoder = Decoder(model, 4)
    (choice,) = group.sequences
    decoder.insert(group, [choice], takes=True)
    for token in steps(decoder, 8):
        choice.output_token_ids.append(token.token_id)
    kv = decoder.take(choice)
    assert kv is not None
    assert choice.output_token_ids == greedy(model, prompt, 8)
    if not any(type(cache) is RotatingKVCache for cache in kv):  # a batch turns these otherwise
        check_same(model, kv, computed(model, prompt, choice.output_token_ids), START - 3 + 8)
    assert decoder.num_running == 0
