"""The budget of a file: delays that grow, jitter within bounds, and an end in every case."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from formats.errors import EnvironmentProblem
from packer.fetch.retry import Limits, Patience, Trouble, retry_after


def delays(limits: Limits, positions: list[int], **trouble: float) -> list[float]:
    patience = Patience(limits, "file", random.Random(1))
    return [patience.failed(Trouble("down", **trouble), position) for position in positions]


def test_delays_double_up_to_the_longest_and_are_jittered() -> None:
    found = delays(Limits(first_delay=1, longest_delay=8, attempts=9), [0] * 6)
    for delay, longest in zip(found, [1, 2, 4, 8, 8, 8], strict=True):
        assert longest / 2 <= delay <= longest
    assert len(set(found)) == 6


def test_attempts_in_a_row_are_bounded() -> None:
    assert len(delays(Limits(attempts=4), [0] * 3)) == 3
    with pytest.raises(EnvironmentProblem, match="4 attempts"):
        delays(Limits(attempts=4), [0] * 4)


def test_progress_begins_a_new_row() -> None:
    limits = Limits(attempts=2, progress_bytes=100, longest_delay=1)
    assert len(delays(limits, [100, 200, 300])) == 3
    with pytest.raises(EnvironmentProblem):
        delays(limits, [100, 199])


def test_the_same_bytes_again_are_no_progress() -> None:
    with pytest.raises(EnvironmentProblem):
        delays(Limits(attempts=3, progress_bytes=100), [500, 500, 500])


def test_failures_in_all_are_bounded() -> None:
    with pytest.raises(EnvironmentProblem):
        delays(Limits(failures=5, progress_bytes=1, longest_delay=1), [1, 2, 3, 4, 5])


def test_waiting_is_bounded() -> None:
    with pytest.raises(EnvironmentProblem):
        delays(Limits(attempts=100, waiting_seconds=10), [0] * 20)


def test_the_server_may_ask_for_more_within_the_budget() -> None:
    assert delays(Limits(), [0], retry_after=120.0) == [120.0]
    with pytest.raises(EnvironmentProblem, match="601 s"):
        delays(Limits(), [0], retry_after=601.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("-7", None),
        ("7.5", None),
        ("9" * 30, None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", None),
        ("Wed, 99 Oct 2015 07:27:00 GMT", None),
    ],
)
def test_retry_after(text: str | None, seconds: float | None) -> None:
    assert retry_after(text, now=datetime(2015, 10, 21, 7, 28, tzinfo=UTC)) == seconds
