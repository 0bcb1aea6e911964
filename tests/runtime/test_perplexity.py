"""Losses and windows, by hand arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from formats.errors import UsageError
from runtime.perplexity import Loss, loss_of, windows


def test_loss_is_that_of_the_next_token() -> None:
    """Shares 1/2, 1/4, 1/4 at every position; the text 2 0 1 has losses ln 2 and ln 4 after its first token."""
    logits = np.log(np.array([[0.5, 0.25, 0.25]] * 3)).astype(np.float32)
    found = loss_of(logits, 0, (2, 0, 1))
    assert found.tokens == 2
    assert found.nats == pytest.approx(math.log(2) + math.log(4), abs=1e-6)
    assert found.perplexity == pytest.approx(math.sqrt(8), abs=1e-6)


def test_chunks_add_up_to_the_whole() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    ids = (3, 1, 4, 1, 5)
    parts = loss_of(logits[:2], 0, ids) + loss_of(logits[2:4], 2, ids) + loss_of(logits[4:], 4, ids)
    whole = loss_of(logits, 0, ids)
    assert parts.tokens == whole.tokens == 4
    assert parts.nats == pytest.approx(whole.nats, rel=1e-12)


def test_one_token_foresees_nothing() -> None:
    found = loss_of(np.zeros((1, 3), np.float32), 0, (1,))
    assert (found, found.mean, found.perplexity) == (Loss(0.0, 0), None, None)


def test_hopeless_models_have_an_infinite_perplexity() -> None:
    assert Loss(7001.0, 10).perplexity == math.inf


def test_windows_cover_the_text_once_and_begin_alike() -> None:
    assert windows((1, 2, 3), None, None) == [(1, 2, 3)]
    assert windows((1, 2, 3), None, 9) == [(9, 1, 2, 3)]
    assert windows((1, 2, 3, 4, 5), 3, 9) == [(9, 1, 2), (9, 3, 4), (9, 5)]
    assert windows((1, 2, 3, 4, 5), 3, None) == [(1, 2, 3), (4, 5)]


@pytest.mark.parametrize(("ids", "size"), [((), None), ((1, 2), 1), ((1, 2), 0)])
def test_windows_without_room_are_refused(ids: tuple[int, ...], size: int | None) -> None:
    with pytest.raises(UsageError):
        windows(ids, size, None)
