"""Choosing tokens: against probabilities and shares worked out by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from formats.errors import FormatError, UsageError
from runtime.sampling import Sampling, choose, log_probabilities, top


def logits_of(*shares: float) -> np.ndarray:
    return np.log(np.array(shares, np.float64)).astype(np.float32)


def draws(logits: np.ndarray, sampling: Sampling, count: int) -> Counter[int]:
    generator = sampling.generator()
    return Counter(choose(logits, sampling, generator) for _ in range(count))


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    generator = Sampling().generator()
    before = generator.bit_generator.state
    assert choose(np.array([0, 3, 1, 3], np.float32), Sampling(), generator) == 1
    assert generator.bit_generator.state == before  # nothing is drawn


def test_shares_are_those_of_the_softmax() -> None:
    """3 standard deviations of a binomial share around it; the seed is fixed, so this either holds or it does not."""
    found = draws(logits_of(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, seed=7), 20_000)
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(found[token] / 20_000 - share) < 3 * math.sqrt(share * (1 - share) / 20_000)


def test_temperature_divides_the_logits() -> None:
    """Shares 0.8 and 0.2 are odds of 4; at temperature 2 they are odds of 2."""
    found = draws(logits_of(0.8, 0.2), Sampling(temperature=2.0, seed=3), 20_000)
    assert abs(found[0] / 20_000 - 2 / 3) < 3 * math.sqrt(2 / 9 / 20_000)


def test_top_p_keeps_the_smallest_set_that_reaches_the_share() -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    assert set(draws(logits, Sampling(temperature=1.0, top_p=0.39), 2000)) == {1}
    assert set(draws(logits, Sampling(temperature=1.0, top_p=0.65), 2000)) == {1, 3}
    found = draws(logits, Sampling(temperature=1.0, top_p=0.85), 20_000)
    assert set(found) == {1, 2, 3}
    assert abs(found[1] / 20_000 - 4 / 9) < 3 * math.sqrt(20 / 81 / 20_000)


def test_top_p_takes_the_lower_id_among_equals() -> None:
    assert set(draws(np.zeros(4, np.float32), Sampling(temperature=1.0, top_p=0.5), 500)) == {0, 1}


def test_num_05_global_random_state_is_neither_used_nor_changed() -> None:
    np.random.seed(1)
    first = draws(logits_of(0.5, 0.5), Sampling(temperature=1.0, seed=5), 50)
    state = np.random.get_state()[1].tolist()
    np.random.seed(2)
    assert draws(logits_of(0.5, 0.5), Sampling(temperature=1.0, seed=5), 50) == first
    np.random.seed(1)
    assert np.random.get_state()[1].tolist() == state


def test_very_low_temperatures_and_far_logits_stay_numbers() -> None:
    logits = np.array([-3e38, 3e38, 0], np.float32)
    assert draws(logits, Sampling(temperature=1e-300, seed=1), 10) == {1: 10}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(FormatError, match="token 2: the model's logits are not finite"):
        choose(np.array([0, 1, value], np.float32), Sampling(), Sampling().generator())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 101},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="is out of range"):
        Sampling(**settings)  # type: ignore[arg-type]


def test_top_lists_the_largest_first_and_lower_ids_among_equals() -> None:
    assert top(np.array([1, 5, 5, 9, 0], np.float32), 3) == [(3, 9.0), (1, 5.0), (2, 5.0)]


def test_log_probabilities_sum_to_one() -> None:
    found = log_probabilities(logits_of(0.5, 0.3, 0.2) + np.float32(1000))
    assert np.exp(found) == pytest.approx([0.5, 0.3, 0.2], abs=1e-4)
