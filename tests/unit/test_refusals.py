"""What a refusal tells a client: its status, whether and when to try again."""

from api.http.errors import refusal_of
from runtime.errors import MemoryShort, ModelTooLarge


def test_a_model_that_can_never_fit_says_both_sizes_and_not_to_try_again():
    refusal = refusal_of(ModelTooLarge("m", 7_000_000_000, 5_000_000_000))
    assert (refusal.status, refusal.headers["x-should-retry"]) == (400, "false")
    assert "7.00 GB" in refusal.message
    assert "5.00 GB" in refusal.message


def test_a_model_that_almost_fits_is_told_by_how_little_it_does_not():
    message = ModelTooLarge("m", 540_666_192, 537_641_463).message
    assert "needs 0.541 GB" in message
    assert "use 0.538 GB" in message
    message = ModelTooLarge("m", 540_666_192, 540_666_191).message
    assert "needs 0.540666192 GB" in message
    assert "use 0.540666191 GB" in message


def test_who_meets_a_machine_short_of_memory_is_told_when_to_try_again():
    refusal = refusal_of(MemoryShort())
    assert refusal.status == 503
    assert 0 < int(refusal.headers["retry-after"]) <= 60
