"""What became of slots that were merged, however often, and what is no longer anywhere."""

from __future__ import annotations

from runtime.cache.redirects import MAX_HEIRS, SlotRedirect, SlotRedirects


def test_the_last_of_a_line_stands_for_all_of_it():
    redirects = SlotRedirects()
    redirects.note([("a", SlotRedirect("m", 20)), ("b", SlotRedirect("m", 30))])
    assert redirects.of("a", 20) == "m"
    assert redirects.of("b", 25) == "m"
    redirects.note([("m", SlotRedirect("n", 30))])
    assert redirects.of("a", 15) == "n"
    assert redirects.of("n", 30) is None
    assert redirects.of(None, 0) is None


def test_what_continued_tokens_that_were_cut_off_has_no_heir():
    redirects = SlotRedirects()
    redirects.note([("a", SlotRedirect("m", 20))])
    assert redirects.of("a", 21) is None
    redirects.note([("m", SlotRedirect("n", 18))])
    assert redirects.of("a", 18) == "n"
    assert redirects.of("a", 20) is None


def test_the_oldest_are_forgotten():
    redirects = SlotRedirects()
    redirects.note((str(number), SlotRedirect("m", 9)) for number in range(MAX_HEIRS + 2))
    assert [redirects.of(str(number), 9) for number in (0, 1, 2)] == [None, None, "m"]
