"""A prompt on its way back: its tokens, where each begins, and how likely it was."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.types import PromptLogprobs, TokenLogprob, TokenLogprobs
from runtime.worker.output.detokenizer import Detokenizer, StreamDetokenizer
from runtime.worker.prompt_logprobs import MAX_LOGITS, Echo
from runtime.worker.scores import TokenScore


class ByteTokenizer:
    """A token for each byte, and 256, which is put in front."""

    def __init__(self) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        self.backend = tokenizer

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text).ids

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        return StreamDetokenizer(self.backend, context)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return self.backend.decode([token_id], skip_special_tokens=False), bytes([token_id % 256])


BYTES = ByteTokenizer()


def told(token_ids: Sequence[int], text: str | None, *cuts: int) -> list[PromptLogprobs]:
    """All slices; every token is as likely as its place says."""
    echo = Echo(BYTES, token_ids, text, num_top=1, vocab_size=100)
    scores = [TokenScore(-float(place), [(0, -0.5)]) for place in range(1, len(token_ids))]
    borders = [0, *cuts, len(scores)]
    return [echo.next_slice(scores[i:j]) for i, j in pairwise(borders)]


def test_each_token_but_the_first_comes_with_its_own_score_and_the_alternatives():
    token_ids = BYTES.ids("abc")
    (whole,) = told(token_ids, "abc")
    assert (whole.tokens, whole.offsets, whole.text) == (("a", "b", "c"), (0, 1, 2), "abc")
    first, second, third = whole.logprobs
    assert first is None
    likeliest = TokenLogprob(*BYTES.token_text(0), -0.5)
    for entry, token_id, place in ((second, token_ids[1], 1), (third, token_ids[2], 2)):
        chosen = TokenLogprob(*BYTES.token_text(token_id), -float(place))
        assert entry == TokenLogprobs(chosen=chosen, top=(likeliest,))


@pytest.mark.parametrize("text", ["kettle", "héllo 狐狸 😀!", "狐"])
@pytest.mark.parametrize("is_text", [True, False])
def test_slices_joined_are_the_whole_wherever_they_are_cut(text: str, *, is_text: bool):
    token_ids = BYTES.ids(text)
    given = text if is_text else None
    (whole,) = told(token_ids, given)
    assert whole.text == text
    for cut in range(len(token_ids)):
        one, other = told(token_ids, given, cut)
        assert one.text + other.text == text
        assert one.offsets + other.offsets == whole.offsets
        assert one.logprobs + other.logprobs == whole.logprobs


def test_a_character_of_several_tokens_begins_where_its_first_one_does():
    (whole,) = told(BYTES.ids("a狐b"), "a狐b")
    assert whole.offsets == (0, 1, 1, 1, 2)


@pytest.mark.parametrize(("text", "offsets"), [("ab", (0, 0, 1)), (None, (0, 3, 4))])
def test_a_token_that_the_tokenizer_put_in_front_is_no_part_of_the_text(
    text: str | None, offsets: tuple[int, ...]
):
    (whole,) = told([256, *BYTES.ids("ab")], text)
    assert (whole.tokens, whole.offsets) == (("<s>", "a", "b"), offsets)
    assert whole.text == (text or "<s>ab")


def test_a_character_that_breaks_off_is_told_at_the_end():
    (whole,) = told(BYTES.ids("a狐")[:-1], None)
    assert whole.text == "a\ufffd"


def test_a_prompt_of_one_token_is_told_without_a_score():
    (whole,) = told(BYTES.ids("a"), "a")
    assert (whole.text, whole.tokens, whole.logprobs) == ("a", ("a",), (None,))


def test_an_impossible_token_has_a_number():
    echo = Echo(BYTES, BYTES.ids("ab"), "ab", num_top=0, vocab_size=100)
    entry = echo.next_slice([TokenScore(-float("inf"), [])]).logprobs[1]
    assert entry is not None
    assert entry.chosen.logprob == -9999.0


def test_the_larger_the_vocabulary_the_shorter_a_slice():
    for vocab_size in (50, 150_000, MAX_LOGITS * 2):
        echo = Echo(BYTES, [1], None, num_top=0, vocab_size=vocab_size)
        assert echo.max_slice == max(1, MAX_LOGITS // vocab_size)
