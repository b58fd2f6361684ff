"""When requests are due."""

from itertools import islice

import numpy as np
import pytest

from loadtest.arrivals import Open, due_times


def times(load: Open, count: int = 4000, duration_s: float | None = None) -> np.ndarray:
    return np.array(list(islice(due_times(load, np.random.default_rng(5), duration_s), count)))


def test_constant_gaps_are_the_rates() -> None:
    assert times(Open(4.0, gaps="constant"), 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("load", "variation"),
    [(Open(10.0), 1.0), (Open(10.0, "gamma", 0.25), 2.0), (Open(10.0, "gamma", 4.0), 0.5), (Open(10.0, "gamma"), 1.0)],
)
def test_gaps_have_the_rates_mean_and_their_kinds_variation(load: Open, variation: float) -> None:
    gaps = np.diff(times(load, 20_000))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_none_is_due_at_or_after_the_end() -> None:
    due = times(Open(100.0), 10**6, duration_s=20.0)
    assert due[-1] < 20.0
    assert len(due) == pytest.approx(2000, rel=0.1)
    assert times(Open(2.0, "constant"), 10**6, duration_s=1.0).tolist() == [0.0, 0.5]


@pytest.mark.parametrize(("first", "last"), [(10.0, 100.0), (100.0, 10.0), (50.0, 50.0), (50.0, 50.0001)])
def test_a_ramp_has_at_each_moment_the_rate_between(first: float, last: float) -> None:
    due = times(Open(first, "constant", end_rate=last), 10**6, duration_s=40.0)
    for at_s in (5.0, 20.0, 35.0):
        here = ((due >= at_s - 1) & (due < at_s + 1)).sum() / 2
        assert here == pytest.approx(first + (last - first) * at_s / 40.0, rel=0.02, abs=0.5)
    assert len(due) == pytest.approx((first + last) / 2 * 40.0, rel=0.01)


def test_a_ramp_needs_an_end() -> None:
    with pytest.raises(ValueError, match="duration_s"):
        next(due_times(Open(1.0, end_rate=2.0), np.random.default_rng(0), None))


def test_the_same_seed_is_the_same_load() -> None:
    assert times(Open(3.0), 50).tolist() == times(Open(3.0), 50).tolist()
