"""What a look-ahead names, beside what the next layer then chooses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from runtime.models import kimi, moe
from runtime.opening import Options, open_weights
from runtime.stream.replay import Recorder, Request

DATA = Path(__file__).parents[1] / "data"
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3)


def requests(model: Path, chunk: int) -> tuple[list[Request], int]:
    """Of all layers, for tokens in chunks; and how many experts a token has."""
    with ExitStack() as closing:
        weights = open_weights(model, Options(context=len(TOKENS)), closing)
        recorder = Recorder(weights.store.experts)
        count = weights.store.config.experts_per_token
        decoder = kimi.Decoder(replace(weights.store, experts=recorder), weights.workers, count)
        state = kimi.new_state(weights.store.config, len(TOKENS))
        for first in range(0, len(TOKENS), chunk):
            decoder.step(TOKENS[first : first + chunk], state)
        return recorder.requests, count


def pairs(found: Sequence[Request]) -> list[tuple[set[int], set[int]]]:
    """What was expected of a layer and what it chose."""
    return [
        (set(request.expected[1]), set(following.chosen))
        for request, following in pairwise(found)
        if request.expected is not None and request.expected[0] == following.layer
    ]


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", ["k3-tiny", "k3-small", "kimi-linear-tiny"])
def test_it_is_right_where_nothing_comes_in_between(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without attention and routed experts the next layer sees just what the look-ahead takes it to see, at the ends of
    blocks of attention residuals as well."""
    attention, expert = kimi.Decoder._attention, moe.apply_expert

    def no_attention(self: kimi.Decoder, *arguments: object) -> np.ndarray:
        return np.zeros_like(attention(self, *arguments))  # type: ignore[arg-type]

    def no_expert(*arguments: object) -> tuple[np.ndarray, np.ndarray]:
        activated, outputs = expert(*arguments)  # type: ignore[arg-type]
        return activated, np.zeros_like(outputs)

    monkeypatch.setattr(kimi.Decoder, "_attention", no_attention)
    monkeypatch.setattr(moe, "apply_expert", no_expert)
    found, _ = requests(DATA / name, chunk)
    compared = pairs(found)
    assert len(compared) >= len(TOKENS) // chunk
    assert all(expected == chosen for expected, chosen in compared)


@pytest.mark.parametrize(("name", "least"), [("k3-tiny", 0.65), ("k3-small", 0.7), ("kimi-linear-tiny", 0.7)])
def test_most_of_what_it_names_is_chosen(name: str, least: float) -> None:
    """In random models; judging by what went into this layer's experts alone it would be 0.57, 0.54 and 0.68 of it."""
    found, count = requests(DATA / name, 1)
    shares = [len(expected & chosen) / count for expected, chosen in pairs(found)]
    assert sum(shares) / len(shares) > least


class Knowing(Recorder):
    """Says whether its experts are complete, as those of a run do."""

    @property
    def complete(self) -> bool:
        return self._experts.complete


@pytest.mark.parametrize("have_all", [False, True])
def test_nothing_is_guessed_where_all_experts_are_in_memory(have_all: bool) -> None:
    with ExitStack() as closing:
        weights = open_weights(DATA / "k3-tiny", Options(context=len(TOKENS)), closing)
        for layer, count in enumerate(weights.store.layer_experts):
            weights.store.experts.compute(layer, range(count if have_all else min(count, 1)), lambda expert: None)
        recorder = Knowing(weights.store.experts)
        decoder = kimi.Decoder(replace(weights.store, experts=recorder), weights.workers, 2)
        decoder.step(TOKENS[:1], kimi.new_state(weights.store.config, 1))
    assert any(request.expected for request in recorder.requests) != have_all
