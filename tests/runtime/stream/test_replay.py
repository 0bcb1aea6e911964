"""Replays of short traces, worked out by hand, and of a model's requests against the stream itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from runtime.stream.experts import ExpertStream
from runtime.stream.policy import Frequency, Recency
from runtime.stream.replay import Outcome, Recorder, Request, compare, contenders, replay
from runtime.threads import Workers
from tests.runtime.stream.fake_loader import FakeLoader


def requests(*chosen: Sequence[int]) -> list[Request]:
    return [Request(0, tuple(experts)) for experts in chosen]


def test_a_loop_longer_than_the_cache_is_the_worst_case_of_recency() -> None:
    """0 1 2 0 1 2 0 1 2 in two slots: whoever comes next has just left. In three slots it is read once."""
    loop = requests(*([expert] for expert in (0, 1, 2) * 3))
    assert replay(loop, (3,), 2, Recency(3)).hits == 0
    assert replay(loop, (3,), 3, Recency(3)) == Outcome(9, 6, 0, 0, 3)


def test_frequency_keeps_what_is_used_often() -> None:
    """0 is used twice, then between any two others: it stays, and the others share the second slot."""
    trace = requests([0], [0], [1], [2], [0], [3], [1], [0], [2], [3], [0])
    assert replay(trace, (4,), 2, Frequency((4,), math.inf)).hits == 4
    # By recency 0 has left whenever two others came between: hits at the second 0 alone.
    assert replay(trace, (4,), 2, Recency(4)).hits == 1


def test_all_experts_of_a_request_are_pinned_together() -> None:
    """[0 1] then [2 0] in two slots: 2 takes the slot of 1, although 0 is older by the order of use."""
    assert replay(requests([0, 1], [2, 0]), (3,), 2, Recency(3)) == Outcome(4, 1, 0, 0, 3)


def test_more_than_fits_flows_through() -> None:
    """Four experts in two slots, twice: those of the end are there at the beginning of the second pass."""
    outcome = replay(requests([0, 1, 2, 3], [0, 1, 2, 3]), (4,), 2, Recency(4))
    assert (outcome.asked, outcome.hits, outcome.reads) == (8, 2, 6)


def test_what_is_expected_is_read_and_counted() -> None:
    """Layer 0 names three of layer 1, of which at most two are read, and one of these is used."""
    trace = [Request(0, (0,), (1, (2, 1, 0))), Request(1, (1, 3)), Request(0, (0,))]
    assert replay(trace, (4, 4), 8, Recency(8), ahead=2) == Outcome(4, 2, 2, 1, 4)
    assert replay(trace, (4, 4), 8, Recency(8)) == Outcome(4, 1, 0, 0, 3)


def test_what_is_expected_does_not_push_out_what_is_expected() -> None:
    """One slot is free for what is expected: the first is read, the second finds no room."""
    trace = [Request(0, (0,), (1, (0, 1))), Request(1, (1,))]
    assert replay(trace, (1, 4), 1, Recency(5), ahead=2) == Outcome(2, 0, 1, 0, 3)


def test_what_was_expected_and_not_used_leaves_by_its_history() -> None:
    """Expert 1 of layer 1 was read in vain and never used, so it makes room before expert 0, which was."""
    trace = [Request(0, (0,), (1, (1,))), Request(1, (2,)), Request(1, (3,)), Request(0, (0,)), Request(1, (2,))]
    for policy in (Recency(5), Frequency((1, 4))):
        assert replay(trace, (1, 4), 3, policy, ahead=1).hits == 2


def test_the_table_of_contenders() -> None:
    trace = requests(*([expert] for expert in (0, 1, 2) * 3))
    rows = compare(trace, (3,), [2, 3], contenders(2, [math.inf, 8]))
    names = ["least recently used"]
    names += [f"least used, {kind}" for kind in ("whosever turn it is", "for ever", "half life 8")]
    assert [contender.name for contender, _ in rows] == names + [f"{name}, 2 ahead" for name in names]
    assert [outcome.hits for outcome in rows[0][1]] == [0, 6]
    assert rows[0][1][1].hit_rate == 6 / 9
    assert replay([], (3,), 1, Recency(3)).hit_rate == 0.0


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_replay_is_what_the_stream_does(slots: int) -> None:
    """Without look-ahead, with one reader and one thread, the stream hits and reads exactly what the replay says."""
    loader = FakeLoader(layer_experts=(6, 6))
    trace = [(0, (0, 1)), (1, (2, 4)), (0, (1, 5)), (1, (2, 3)), (0, (1, 0)), (1, (4, 2)), (0, (1, 2)), (1, (2, 5))]
    with Workers(1) as workers:
        stream = ExpertStream(loader, slots=slots, workers=workers, readers=1, policy=Frequency((6, 6), 4.0))
        recorder = Recorder(stream)
        for layer, chosen in trace:
            recorder.compute(layer, chosen, lambda expert: None, lambda: None)
        stream.close()
    assert [(request.layer, request.chosen) for request in recorder.requests] == trace
    outcome = replay(recorder.requests, (6, 6), slots, Frequency((6, 6), 4.0))
    done = stream.statistics()
    assert (outcome.asked, outcome.hits, outcome.reads) == (done.asked, done.hits, done.reads)


def test_a_recorder_notes_what_was_expected_last() -> None:
    with Workers(1) as workers:
        stream = ExpertStream(FakeLoader(), slots=4, workers=workers)
        recorder = Recorder(stream)
        recorder.compute(1, [0], lambda expert: None, lambda: recorder.expect(2, [3, 1]))
        recorder.compute(2, [3], lambda expert: None)
        stream.close()
    assert recorder.requests == [Request(1, (0,), (2, (3, 1))), Request(2, (3,))]
