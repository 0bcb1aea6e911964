"""KDA steps: all paths against the twin, the twin against exact fractions and a recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from formats import kernels
from formats.kernels.products import kda_steps
from tests.support import exact

PATHS = kernels.available_paths()
Single = NDArray[np.float32]
SHAPES = [(tokens, heads, dk, dv) for tokens in (0, 1, 2, 5) for heads, dk, dv in ((1, 1, 1), (3, 4, 15), (2, 7, 16))]
SHAPES += [(1, 2, 32, 64), (4, 2, 32, 64), (3, 1, 33, 97), (2, 2, 128, 128), (3, 2, 5, 200)]


@dataclass(frozen=True)
class Steps:
    """Arguments of ``kda_steps``."""

    state: Single
    q: Single
    k: Single
    v: Single
    decay: Single
    beta: Single

    def run(self, path: str, *, first: int = 0, stop: int | None = None) -> tuple[Single, Single]:
        """(state afterwards, outputs); both start as copies, outputs as NaN."""
        state, out = self.state.copy(), np.full(self.v.shape, np.nan, np.float32)
        kda_steps(state, self.q, self.k, self.v, self.decay, self.beta, out, first=first, stop=stop, path=path)
        return state, out

    def tokens(self, first: int, stop: int) -> Steps:
        """Some of the tokens."""
        parts = {name: np.ascontiguousarray(vars(self)[name][first:stop]) for name in ("q", "k", "v", "decay", "beta")}
        return replace(self, **parts)


def steps(tokens: int, heads: int, dk: int, dv: int) -> Steps:
    """Like those of a model: keys of length 1, decays and betas between 0 and 1."""
    rng = np.random.default_rng([tokens, heads, dk, dv])

    def normal(*shape: int) -> Single:
        return rng.standard_normal(shape).astype(np.float32)

    k = normal(tokens, heads, dk)
    k /= np.sqrt(np.square(k).sum(axis=2, keepdims=True) + np.float32(1e-6))
    return Steps(
        normal(heads, dk, dv),
        normal(tokens, heads, dk) / np.float32(dk),
        k,
        normal(tokens, heads, dv),
        rng.uniform(0, 1, (tokens, heads, dk)).astype(np.float32),
        rng.uniform(0, 1, (tokens, heads)).astype(np.float32),
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("tokens", "heads", "dk", "dv"), SHAPES)
def test_paths_differ(tokens: int, heads: int, dk: int, dv: int, path: str) -> None:
    given = steps(tokens, heads, dk, dv)
    for found, expected in zip(given.run(path), given.run("numpy"), strict=True):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_steps_differ_from_exact_fractions(path: str) -> None:
    given = steps(3, 2, 5, 19)
    state, out = given.run(path)
    for head in range(2):
        rows = [exact.exact_row(row) for row in given.state[head]]
        for token in range(3):
            q, k, v, decay = (exact.exact_row(part[token, head]) for part in (given.q, given.k, given.v, given.decay))
            outputs = exact.kda(rows, q, k, v, decay, Fraction(float(given.beta[token, head])))
            assert exact.exact_row(out[token, head]) == outputs
        assert [exact.exact_row(row) for row in state[head]] == rows


@pytest.mark.parametrize("path", PATHS)
def test_steps_are_far_from_float64(path: str) -> None:
    """No state and no output is off by more than a few units of float32 times the largest number that occurs."""
    given = steps(12, 3, 40, 70)
    s = given.state.astype(np.float64)
    outputs = []
    for t in range(12):
        q, k, v, decay = (part[t].astype(np.float64) for part in (given.q, given.k, given.v, given.decay))
        s = decay[:, :, None] * s
        gap = v - np.einsum("hi,hij->hj", k, s)
        s = s + k[:, :, None] * (given.beta[t].astype(np.float64)[:, None] * gap)[:, None, :]
        outputs.append(np.einsum("hi,hij->hj", q, s))
    state, out = given.run(path)
    assert np.abs(state - s).max() <= 40 * 2.0**-24 * np.abs(s).max()
    assert np.abs(out - np.stack(outputs)).max() <= 40 * 2.0**-24 * np.abs(s).max()


@pytest.mark.parametrize("path", PATHS)
def test_tokens_at_once_differ_from_tokens_one_by_one(path: str) -> None:
    given = steps(9, 2, 24, 50)
    state, out = given.run(path)
    step, parts = given, []
    for first, stop in ((0, 1), (1, 2), (2, 5), (5, 9)):
        after, part = replace(given.tokens(first, stop), state=step.state).run(path)
        step = replace(step, state=after)
        parts.append(part)
    assert step.state.tobytes() == state.tobytes()
    assert np.concatenate(parts).tobytes() == out.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_heads_outside_the_range_are_touched(path: str) -> None:
    given = steps(4, 5, 8, 33)
    whole_state, whole_out = given.run(path)
    state, out = given.run(path, first=1, stop=4)
    assert state[1:4].tobytes() == whole_state[1:4].tobytes()
    assert out[:, 1:4].tobytes() == whole_out[:, 1:4].tobytes()
    assert state[[0, 4]].tobytes() == given.state[[0, 4]].tobytes()
    assert np.isnan(out[:, [0, 4]]).all()


@pytest.mark.parametrize("path", PATHS)
def test_wrong_arguments_are_taken(path: str) -> None:
    given = steps(2, 3, 4, 5)
    for changed in (
        replace(given, q=given.q[:1].copy()),
        replace(given, v=given.v[..., :4].copy()),
        replace(given, beta=given.beta[..., None].copy()),
        replace(given, decay=given.decay.astype(np.float64)),
        replace(given, k=np.repeat(given.k, 2, axis=2)[..., ::2]),
    ):
        with pytest.raises(ValueError, match="wanted"):
            changed.run(path)
    for first, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="heads"):
            given.run(path, first=first, stop=stop)
    state, out = given.state.copy(), np.zeros(given.v.shape, np.float32)
    state.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        kda_steps(state, given.q, given.k, given.v, given.decay, given.beta, out, path=path)
