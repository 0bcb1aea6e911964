"""Speed of products on encoded weights beside numpy on decoded ones: ``python -m benchmarks.products``.

Every product runs in one thread on matrices as large as K3's, and on weights that no cache holds: calls go round a
pool of copies of ``--pool`` MiB. Numpy multiplies the decoded matrix in float32, in the same run and in turns with the
others, because the machine may be shared. Its library is asked for one thread, and the variables that would
force its choice of kernels or of cache size are refused. Figures are weights times inputs, a processor second.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from formats import encoded, kernels
from formats.encoded import EncodedMatrix, GroupIntMatrix, Mxfp4Matrix, RawMatrix, RvqMatrix

Single = NDArray[np.float32]
_INPUTS: Final = (1, 4, 16)
_SIDES: Final = (3072, 3584)  # rows and columns of K3's gate
_FORCING: Final = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


@dataclass(frozen=True)
class Case:
    """What is multiplied: copies of a matrix, or pairs of matrices that share codebooks."""

    name: str
    copies: tuple[tuple[EncodedMatrix, ...], ...]

    @property
    def weights(self) -> int:
        return sum(matrix.rows * matrix.cols for matrix in self.copies[0])


def arrays(matrix: EncodedMatrix) -> dict[str, NDArray[Any]]:
    """The parts of a matrix that weigh something."""
    return {name: part for name, part in vars(matrix).items() if isinstance(part, np.ndarray)}


def copies(*matrices: EncodedMatrix, pool: int) -> tuple[tuple[EncodedMatrix, ...], ...]:
    """As many copies as fill ``pool`` bytes; codebooks that matrices share stay shared."""
    size = sum(part.nbytes for matrix in matrices for part in arrays(matrix).values())
    made = []
    for _ in range(max(2, -(-pool // size))):
        books: dict[int, NDArray[Any]] = {}
        made.append(
            tuple(
                replace(
                    matrix,
                    **{
                        name: books.setdefault(id(part), part.copy()) if name == "codebooks" else part.copy()
                        for name, part in arrays(matrix).items()
                    },
                )
                for matrix in matrices
            )
        )
    return tuple(made)


def rvq(rng: np.random.Generator, rows: int, cols: int, codebooks: NDArray[np.float16]) -> RvqMatrix:
    """Random indices, three stages of 256 entries."""
    codes = rng.integers(0, 256, (-(-rows // 64), -(-cols // 8), len(codebooks), 64), dtype=np.uint8)
    return RvqMatrix(rows, cols, codes, codebooks, np.exp2(rng.uniform(-7, -5, rows)).astype(np.float16), 0)


def cases(rng: np.random.Generator, pool: int) -> Iterator[Case]:
    """The codecs, one after the other, so that only one pool is held."""
    rows, cols = _SIDES
    sizes = np.array([1.0, 0.45, 0.2])[:, None, None]
    books = (rng.standard_normal((3, 256, 8)) * sizes).astype(np.float16)
    yield Case("rvq 3 x 256, gate", copies(rvq(rng, rows, cols, books), pool=pool))
    yield Case("rvq 3 x 256, down", copies(rvq(rng, cols, rows, books), pool=pool))
    pair = (rvq(rng, rows, cols, books), rvq(rng, rows, cols, books))
    yield Case("rvq 3 x 256, gate and up", copies(*pair, pool=pool))
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    exponents = rng.integers(117, 122, (rows, cols // 32), dtype=np.uint8)
    yield Case("mxfp4", copies(Mxfp4Matrix(rows, cols, codes[:, ::2].copy(), exponents, 127), pool=pool))
    scales = np.exp2(rng.uniform(-12, -10, (rows, cols // 128))).astype(np.float16)
    for bits, stored in ((4, codes[:, ::2].copy()), (8, codes)):
        yield Case(
            f"group_int, {bits} bits", copies(GroupIntMatrix(rows, cols, bits, 128, stored, scales, 0), pool=pool)
        )
    values = (rng.standard_normal((rows, cols)) / 60).astype(np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    yield Case("raw BF16", copies(RawMatrix(rows, cols, "BF16", halves), pool=pool))
    yield Case("raw F16", copies(RawMatrix(rows, cols, "F16", values.astype(np.float16)), pool=pool))
    yield Case("raw F32", copies(RawMatrix(rows, cols, "F32", values), pool=pool))


def rate(work: Callable[[int], Any], start: int, calls: int, amount: float) -> float:
    """``amount`` a call over the processor seconds of a call, mean of ``calls`` calls on successive copies."""
    begin = time.thread_time()
    for call in range(start, start + calls):
        work(call)
    return amount * calls / (time.thread_time() - begin)


def encoded_work(case: Case, inputs: Single, path: str) -> Callable[[int], Any]:
    """The products of copy number ``call``."""

    def work(call: int) -> Any:
        matrices = case.copies[call % len(case.copies)]
        if len(matrices) == 2:
            return encoded.multiply_pair(matrices[0], matrices[1], inputs, path=path)
        return encoded.multiply(matrices[0], inputs, path=path)

    return work


def numpy_work(decoded: list[Single], inputs: Single) -> Callable[[int], Any]:
    """Numpy's product of decoded copy number ``call``."""

    def work(call: int) -> Any:
        weights = decoded[call % len(decoded)]
        return weights @ inputs[0] if len(inputs) == 1 else inputs @ weights.T

    return work


def measure(case: Case, paths: list[str], rounds: int, pool: int) -> Iterator[str]:
    """Lines of the table: the best of some rounds, in which all take turns.

    A round has every number of inputs, so that the rounds of each figure lie seconds apart: a machine that is shared
    is slower for seconds at a time, and not for all kinds of work alike.
    """
    first = case.copies[0]
    plain = [encoded.decode_rows(matrix, np.arange(matrix.rows)) for matrix in first]
    size = sum(values.nbytes for values in plain)
    decoded = [np.concatenate(plain) for _ in range(max(2, -(-pool // size)))]
    calls = max(2, len(decoded) // 3)
    rng = np.random.default_rng(1)
    columns = ("decoded", *paths)
    works: dict[tuple[int, str], Callable[[int], Any]] = {}
    for count in _INPUTS:
        inputs = rng.standard_normal((count, first[0].cols)).astype(np.float32)
        works[count, "decoded"] = numpy_work(decoded, inputs)
        works.update({(count, path): encoded_work(case, inputs, path) for path in paths})
    best = dict.fromkeys(works, 0.0)
    for turn in range(rounds):
        for (count, column), work in works.items():
            slow = column == "numpy"  # the twins, looked at once only
            if not slow or not turn:
                found = rate(work, turn * calls, 1 if slow else calls, case.weights * count)
                best[count, column] = max(best[count, column], found)
    for count in _INPUTS:
        base, *others = (best[count, column] for column in columns)
        cells = " | ".join(f"{value / 1e9:.2f} ({value / base:.2f})" for value in others)
        yield f"| {case.name} | {count} | {base / 1e9:.2f} | {cells} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pool", type=int, default=768, help="MiB of copies of each matrix")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--paths", nargs="+", default=list(kernels.available_paths()), help="kernel paths")
    options = parser.parse_args(arguments)
    forced = [name for name in _FORCING if name in os.environ]
    if forced:
        sys.exit(f"unset {' and '.join(forced)}: numpy would not choose for itself")
    pool = options.pool << 20
    with threadpool_limits(1):
        print("G weights x inputs a second and core, and in brackets the ratio to numpy's product in float32.")
        print(f"Machine {platform.machine()}, numpy {np.__version__}, pools of {options.pool} MiB.")
        print()
        print("| weights | inputs | numpy, float32 | " + " | ".join(options.paths) + " |")
        print("|---|---|---|" + "---|" * len(options.paths))
        for case in cases(np.random.default_rng(0), pool):
            if options.only in case.name:
                for line in measure(case, options.paths, options.rounds, pool):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
