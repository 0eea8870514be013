"""How long a worker that leaves may take."""

import pytest

from runtime.timeouts import flush_budget_s, stop_bound_s, term_grace_s


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 10.0), (8 * 10**9, 10.0), (20 * 10**9, 22.0)]
)
def test_a_flush_has_ten_seconds_or_a_second_for_each_gigabyte(num_bytes: int, seconds: float):
    assert flush_budget_s(num_bytes) == seconds


@pytest.mark.parametrize("stop_timeout_s", [0.5, 5.0, 30.0, 120.0])
@pytest.mark.parametrize("num_bytes", [0, 50 * 10**9])
def test_the_outer_bound_holds_all_inner_ones(stop_timeout_s: float, num_bytes: int):
    inner_s = stop_timeout_s + flush_budget_s(num_bytes) + stop_timeout_s
    assert stop_bound_s(stop_timeout_s, num_bytes) >= inner_s + term_grace_s(stop_timeout_s)
