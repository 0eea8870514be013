"""Tokens to text: joined pieces are the whole text, and no piece is ever taken back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from runtime.worker.output.detokenizer import (
    Detokenizer,
    PlainDetokenizer,
    StreamDetokenizer,
    token_bytes,
)
from tests.tiny_models import write_tokenizer

BYTES_OF_FOX = ["ð", "Ł", "¦", "Ĭ"]


class Plain:
    """The slow tokenizer's interface over the fast one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    found = [tokenizer.token_to_id(piece) for piece in pieces]
    return [token_id for token_id in found if token_id is not None]


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def both(tokenizer: Tokenizer) -> list[Detokenizer]:
    return [StreamDetokenizer(tokenizer), PlainDetokenizer(Plain(tokenizer))]


def test_a_character_of_four_tokens_comes_with_the_last(tokenizer: Tokenizer):
    token_ids = ids_of(tokenizer, BYTES_OF_FOX)
    assert len(token_ids) == 4
    for detokenizer in both(tokenizer):
        assert pieces_of(detokenizer, token_ids) == ["", "", "", "🦊", ""]


def test_an_unfinished_character_is_replaced_at_the_end(tokenizer: Tokenizer):
    token_ids = [*tokenizer.encode("a").ids, *ids_of(tokenizer, BYTES_OF_FOX[:3])]
    for detokenizer in both(tokenizer):
        assert pieces_of(detokenizer, token_ids) == ["a", "", "", "", "\ufffd"]


def test_a_broken_character_is_replaced_as_soon_as_the_next_one_is_certain(tokenizer: Tokenizer):
    token_ids = [*ids_of(tokenizer, BYTES_OF_FOX[:2]), *tokenizer.encode("ab").ids]
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, token_ids)) == "\ufffdab"


def test_special_tokens_are_text(tokenizer: Tokenizer):
    token_ids = tokenizer.encode("<think>a</think><|im_end|>").ids
    assert len(token_ids) == 4
    pieces = pieces_of(StreamDetokenizer(tokenizer), token_ids)
    assert pieces == ["<think>", "a", "</think>", "<|im_end|>", ""]


def test_the_context_is_not_said_again(tokenizer: Tokenizer):
    before, after = tokenizer.encode("the quick brown").ids, tokenizer.encode(" fox").ids
    detokenizer = StreamDetokenizer(tokenizer, before)
    assert "".join(pieces_of(detokenizer, after)) == " fox"


def test_a_context_that_ends_inside_a_character_does_no_harm(tokenizer: Tokenizer):
    fox = ids_of(tokenizer, BYTES_OF_FOX)
    detokenizer = StreamDetokenizer(tokenizer, [*tokenizer.encode("a").ids, *fox[:2]])
    said = "".join(pieces_of(detokenizer, [*fox[2:], *tokenizer.encode(" dog").ids]))
    assert said.endswith(" dog")
    assert "a" not in said


@given(data=st.data())
def test_whatever_is_generated_the_pieces_join_to_the_whole_text(
    tokenizer: Tokenizer, data: st.DataObject
):
    vocabulary = st.integers(0, tokenizer.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(vocabulary, max_size=40))
    whole = tokenizer.decode(token_ids, skip_special_tokens=False)
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, token_ids)) == whole


@given(text=st.text(max_size=60))
def test_any_text_survives_its_tokens(tokenizer: Tokenizer, text: str):
    token_ids = tokenizer.encode(text).ids
    for detokenizer in both(tokenizer):
        assert "".join(pieces_of(detokenizer, token_ids)) == text


@given(data=st.data(), text=st.text(max_size=30))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    tokenizer: Tokenizer, data: st.DataObject, text: str
):
    pieces = tokenizer.encode(text).tokens
    raw = b"".join(token_bytes(piece, is_byte_level=True) for piece in pieces)
    assert raw == text.encode()


@pytest.mark.parametrize(
    ("piece", "is_byte_level", "expected"),
    [
        ("Ġthe", True, b" the"),
        ("Ċ", True, b"\n"),
        ("ð", True, b"\xf0"),
        ("<think>", True, b"<think>"),
        ("漢", True, "漢".encode()),
        ("▁the", False, b" the"),
        ("<0xF0>", False, b"\xf0"),
        ("<0xF0>", True, b"<0xF0>"),
        ("é", False, "é".encode()),
    ],
)
def test_a_vocabulary_entry_has_these_bytes(piece: str, is_byte_level: bool, expected: bytes):
    assert token_bytes(piece, is_byte_level=is_byte_level) == expected
