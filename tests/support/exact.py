"""Float32 arithmetic by exact fractions, and the products of ``products.md`` one number at a time.

Written from the page alone, without a kernel, numpy's rounding or a second float type: what twins and kernels are
compared with on small matrices. Numbers are finite Fractions; the sign of zero is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

Numbers = Sequence[Fraction]
LANES = 16
E2M1 = [Fraction(size, 2) for size in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(value: Fraction) -> Fraction:
    """The float32 number next to ``value``, ties to even; beyond float32 is an error of the test."""
    if value == 0:
        return value
    power = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** power:
        power -= 1
    step = Fraction(2) ** max(power - 23, -149)
    rounded = round(value / step) * step  # Python rounds halves to even
    assert abs(rounded) < Fraction(2) ** 128
    return rounded


def fma(a: Fraction, b: Fraction, c: Fraction) -> Fraction:
    return nearest(a * b + c)


def add(a: Fraction, b: Fraction) -> Fraction:
    return nearest(a + b)


def times(a: Fraction, b: Fraction) -> Fraction:
    return nearest(a * b)


def tree(lanes: Numbers) -> Fraction:
    sums = list(lanes)
    for step in (8, 4, 2, 1):
        for i in range(step):
            sums[i] = add(sums[i], sums[i + step])
    return sums[0]


def exact_row(values: object) -> list[Fraction]:
    """A row of numbers as fractions."""
    return [Fraction(float(value)) for value in values]  # type: ignore[attr-defined]


def raw(weights: Numbers, inputs: Numbers) -> Fraction:
    lanes = [Fraction(0)] * LANES
    for column, (w, x) in enumerate(zip(weights, inputs, strict=True)):
        lanes[column % LANES] = fma(w, x, lanes[column % LANES])
    return tree(lanes)


def mxfp4(halves: Sequence[int], scales: Sequence[int], bias: int, inputs: Numbers) -> Fraction:
    """``halves``: the 4-bit codes of the columns."""
    lanes = [Fraction(0)] * LANES
    for group, scale in enumerate(scales):
        for lane in range(LANES):
            sizes = []
            for column in (group * 32 + 2 * lane, group * 32 + 2 * lane + 1):
                inside = column < len(inputs)
                m = E2M1[halves[column] & 7] * (-1 if halves[column] & 8 else 1) if inside else Fraction(0)
                sizes.append((m, inputs[column] if inside else Fraction(0)))
            (even, x_even), (odd, x_odd) = sizes
            p = fma(odd, x_odd, times(even, x_even))
            lanes[lane] = fma(p, Fraction(2) ** (scale - bias), lanes[lane])
    return tree(lanes)


def group_int(codes: Sequence[int], scales: Numbers, group: int, exponent: int, inputs: Numbers) -> Fraction:
    """``codes``: the integers of the columns."""
    lanes = [Fraction(0)] * LANES
    for number, scale in enumerate(scales):
        sums = [Fraction(0)] * LANES
        for j, column in enumerate(range(number * group, min((number + 1) * group, len(inputs)))):
            sums[j % LANES] = fma(Fraction(codes[column]), inputs[column], sums[j % LANES])
        for lane in range(LANES):
            lanes[lane] = fma(sums[lane], scale * Fraction(2) ** exponent, lanes[lane])
    return tree(lanes)


def rvq(entry: Callable[[int, int], Numbers], vectors: int, stages: int, factor: Fraction, inputs: Numbers) -> Fraction:
    """``entry(vector, stage)``: the codebook entry that the row's index names; ``factor``: scale x 2**e."""
    padded = [*inputs, *[Fraction(0)] * (8 * vectors - len(inputs))]
    acc = Fraction(0)
    for v in range(vectors):
        terms = []
        for stage in range(stages):
            c, x = entry(v, stage), padded[8 * v : 8 * v + 8]
            t = times(c[0], x[0])
            for d in range(1, 8):
                t = fma(c[d], x[d], t)
            terms.append(t)
        total = terms[0]
        for t in terms[1:]:
            total = add(total, t)
        acc = add(acc, total)
    return times(acc, factor)


def transposed(weights: Sequence[Numbers], inputs: Numbers) -> list[Fraction]:
    """Sums over the rows of ``weights``, each column's by itself."""
    sums = [Fraction(0)] * len(weights[0])
    for row, x in zip(weights, inputs, strict=True):
        sums = [fma(x, w, y) for w, y in zip(row, sums, strict=True)]
    return sums


def kda(
    state: list[list[Fraction]], q: Numbers, k: Numbers, v: Numbers, decay: Numbers, beta: Fraction
) -> list[Fraction]:
    """One token and head: changes the state [dk][dv] and returns o [dv]."""
    outputs = []
    for c in range(len(v)):
        u = Fraction(0)
        for i in range(len(k)):
            state[i][c] = times(decay[i], state[i][c])
            u = fma(k[i], state[i][c], u)
        d = times(beta, add(v[c], -u))
        o = Fraction(0)
        for i in range(len(k)):
            state[i][c] = fma(k[i], d, state[i][c])
            o = fma(q[i], state[i][c], o)
        outputs.append(o)
    return outputs
