"""Who leaves first, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.stream.policy import Frequency, Policy, Recency


def use(policy: Policy, *calls: tuple[int, ...]) -> None:
    for call in calls:
        policy.use(np.array(call, np.int64))


def leaves(policy: Policy, *keys: int) -> int:
    """Which of ``keys`` leaves."""
    return keys[policy.least(np.array(keys, np.int64))]


def test_recency_gives_up_the_one_used_longest_ago() -> None:
    policy = Recency(5)
    use(policy, (3,), (1,), (2,), (1,))
    assert leaves(policy, 1, 2, 3) == 3
    assert leaves(policy, 1, 2) == 2
    assert leaves(policy, 1, 2, 3, 4) == 4  # never used


def test_within_a_call_the_first_is_the_older() -> None:
    for policy in (Recency(5), Frequency((5,))):
        use(policy, (2, 4, 1))
        assert leaves(policy, 1, 2, 4) == 2
        assert leaves(policy, 4, 1) == 4


def test_plain_counts_without_decay() -> None:
    policy = Frequency((4,), math.inf)
    use(policy, (0,), (0,), (1,), (2,), (1,))
    assert leaves(policy, 0, 1, 2) == 2
    assert leaves(policy, 0, 1) == 0  # two uses each, the last one of 0 is older
    assert leaves(policy, 0, 3) == 3  # never used


def test_uses_count_half_after_a_half_life() -> None:
    """Expert 0 is used at 1 and 2, expert 1 at 3.

    With a half life of 1 they count 1/4 + 1/2 and 1, with one of 4 they count 0.71 + 0.84 and 1.
    """
    for half_life, loser in ((1.0, 0), (4.0, 1)):
        policy = Frequency((2,), half_life)
        use(policy, (0,), (0,), (1,))
        assert leaves(policy, 0, 1) == loser


def test_a_pass_is_one_call_a_layer() -> None:
    """The same uses, with a call of another layer between any two: the half life is as many passes."""
    for half_life, loser in ((1.0, 0), (4.0, 1)):
        policy = Frequency((2, 1), half_life)
        use(policy, (0,), (2,), (0,), (2,), (1,))
        assert leaves(policy, 0, 1) == loser


def test_of_equals_the_one_whose_turn_is_further_away_leaves() -> None:
    """Experts 0 and 1 are of the first layer, 2 and 3 of the third; the second is dense. Uses do not fade.

    A use counts in full where the turn is next, and 3/4 where another layer comes first.
    """
    policy, heedless = Frequency((2, 0, 2), math.inf), Frequency((2, 0, 2), math.inf, waiting=0.0)
    for each in (policy, heedless):
        use(each, (0,), (2,))
    assert leaves(policy, 0, 2) == 2
    assert leaves(heedless, 0, 2) == 0  # as the older one
    use(policy, (0,))
    assert leaves(policy, 0, 2) == 2  # 3/4 of two uses are more than one
    use(policy, (2,), (1,), (3,), (1,))
    assert leaves(policy, 0, 2) == 0  # 3/4 of two uses and two in full


def test_counts_do_not_overflow_in_a_long_run() -> None:
    policy = Frequency((3,), 1.0)
    for _ in range(5000):  # 2^5000 is far beyond float64
        use(policy, (0,))
    use(policy, (1,))
    assert leaves(policy, 0, 1) == 0  # 1/2 + 1/4 + ... is below 1 by 2^-5000, which is a tie: the older one
    use(policy, (0,))
    assert leaves(policy, 0, 1) == 1
    assert leaves(policy, 0, 2) == 2


@pytest.mark.parametrize("half_life", [0.0, -1.0])
def test_half_life_is_positive(half_life: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Frequency((1,), half_life)


@pytest.mark.parametrize("waiting", [-0.1, 1.0])
def test_waiting_takes_a_part_of_the_worth(waiting: float) -> None:
    with pytest.raises(ValueError, match="waiting"):
        Frequency((1,), waiting=waiting)
