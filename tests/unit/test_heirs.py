"""What became of slots that were merged, however often, and what is no longer anywhere."""

from __future__ import annotations

from runtime.heirs import MAX_HEIRS, Heir, Heirs


def test_the_last_of_a_line_stands_for_all_of_it():
    heirs = Heirs()
    heirs.note([("a", Heir("m", 20)), ("b", Heir("m", 30))])
    assert heirs.of("a", 20) == "m"
    assert heirs.of("b", 25) == "m"
    heirs.note([("m", Heir("n", 30))])
    assert heirs.of("a", 15) == "n"
    assert heirs.of("n", 30) is None
    assert heirs.of(None, 0) is None


def test_what_continued_tokens_that_were_cut_off_has_no_heir():
    heirs = Heirs()
    heirs.note([("a", Heir("m", 20))])
    assert heirs.of("a", 21) is None
    heirs.note([("m", Heir("n", 18))])
    assert heirs.of("a", 18) == "n"
    assert heirs.of("a", 20) is None


def test_the_oldest_are_forgotten():
    heirs = Heirs()
    heirs.note((str(number), Heir("m", 9)) for number in range(MAX_HEIRS + 2))
    assert [heirs.of(str(number), 9) for number in (0, 1, 2)] == [None, None, "m"]
