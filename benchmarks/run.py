"""Error and speed of encoding an expert, side by side on the proxy expert: ``python -m benchmarks.run``.

Every row states processor seconds of one thread, the best of several runs where it is a kernel's, and the error of
the whole expert with float16 codebooks and scales. Kernels are also compared with the multiply-adds that the core
does at best, measured in the same run, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.end_to_end import checkpoint_of, pack_and_measure
from benchmarks.proxy import proxy_expert
from formats import kernels
from formats.codecs import mxfp4, rvq
from formats.layout import SectionKind
from packer.encoding import codebooks as fitting

Single = NDArray[np.float32]
_K3_EXPERTS: Final = 92 * 896
_PRODUCTS: Final = 3 * 256  # multiply-adds a weight that greedy search needs by its definition
_SAMPLE: Final = 1 << 15


@dataclass(frozen=True)
class Row:
    """One line of the table; what does not apply is None."""

    what: str
    error: float | None
    seconds: float
    weights_per_second: float
    parts: dict[str, float]


def clock(work: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """(least processor seconds of this thread, last result)."""
    best, result = float("inf"), None
    for _ in range(times):
        start = time.thread_time()
        result = work()
        best = min(best, time.thread_time() - start)
    return best, result


def sources(seed: int) -> list[Single]:
    """The proxy expert as float32 rows."""
    matrices = []
    for made in proxy_expert(seed).values():
        rows, pairs = made.packed.shape
        sections = {SectionKind.CODES: made.packed.tobytes(), SectionKind.SCALES: made.scale.tobytes()}
        matrices.append(mxfp4.decode(rows, 2 * pairs, mxfp4.Parameters(), sections, scale_exponent=0, where="proxy"))
    return matrices


def expert_error(matrices: list[Single], books: Single, codes: list[Any], scales: list[Any]) -> float:
    """||W - W'|| / ||W|| over all matrices, decoded from the blocked codes as a container holds them."""
    sums = np.zeros(4)
    for values, indices, scale in zip(matrices, codes, scales, strict=True):
        decoded = kernels.decode_rvq(kernels.pack_rvq(indices), books, scale.astype(np.float32), values.shape[1])
        sums += kernels.row_sums(values, decoded).sum(axis=0)
    return float(np.sqrt(sums[3] / sums[0]))


def effort_row(name: fitting.EffortName, matrices: list[Single], seed: int) -> Row:
    """All of an expert's encoding at an effort, from float32 rows to codes, without reading and writing."""
    effort = fitting.EFFORTS[name]
    parts = {}
    parts["scales"], stored = clock(lambda: [rvq.row_scales(values) for values in matrices])
    parts["vectors"], vectors = clock(
        lambda: [rvq.to_vectors(values, *scale) for values, scale in zip(matrices, stored, strict=True)]
    )
    parts["fit"], books = clock(lambda: fitting.fit_codebooks(vectors, rvq.Parameters(), seed=seed, effort=effort))
    parts["encode"], codes = clock(
        lambda: [fitting.choose_indices(part, books, width=effort.width) for part in vectors]
    )
    parts["refit"], books = clock(lambda: fitting.refit(books, vectors, codes))
    single = books.astype(np.float32)

    def scales() -> list[Any]:
        found = []
        for values, indices, (scale, exponent) in zip(matrices, codes, stored, strict=True):
            ones = np.ones(len(values), dtype=np.float32)
            plain = kernels.decode_rvq(kernels.pack_rvq(indices), single, ones, values.shape[1])
            found.append(fitting.fitted_scales(values, plain, scale, exponent)[0])
        return found

    parts["row scales"], fitted = clock(scales)
    parts["measure"], error = clock(lambda: expert_error(matrices, single, codes, fitted))
    total = sum(parts.values())
    return Row(f"effort {name}", error, total, sum(v.size for v in matrices) / total, parts)


def kernel_rows(vectors: Single, books: Single) -> list[tuple[str, int, float, float]]:
    """(path, width, weights a second, multiply-adds a second over the peak) of encoding a sample."""
    rows = []
    for path in kernels.available_paths():
        for width in (1, 4, 8, 16, 32):
            times = 20 if path in ("avx512", "avx2") else 1
            part = vectors if times > 1 else vectors[: _SAMPLE // 8]
            seconds = peak = float("inf")
            for _ in range(times):
                spent, done = clock(lambda: kernels.multiply_adds(1_000_000))
                peak = min(peak, spent / done) if done else peak
                seconds = min(seconds, clock(partial(kernels.encode, part, books, width=width, path=path))[0])
            rows.append(
                (path, width, part.size / seconds, part.size * _PRODUCTS / seconds * peak if times > 1 else 0.0)
            )
    return rows


def peers(vectors: Single, books: Single) -> list[Row]:
    """Greedy encoding of a sample by others: numpy's products, and scikit-learn and faiss where they are installed."""
    rows = []

    def staged(nearest: Callable[[Single, Single], NDArray[Any]]) -> None:
        left = vectors.copy()
        for book in books:
            left -= book[nearest(left, book)]

    def add(what: str, nearest: Callable[[Single, Single], NDArray[Any]]) -> None:
        start = time.process_time()  # all threads: some bring their own
        staged(nearest)
        seconds = time.process_time() - start
        rows.append(Row(what, None, seconds, vectors.size / seconds, {}))

    add("numpy greedy", lambda left, book: (np.square(book).sum(axis=1) / 2 - left @ book.T).argmin(axis=1))
    try:
        from sklearn.metrics import pairwise_distances_argmin  # type: ignore[import-not-found]
    except ImportError:
        print("scikit-learn is not installed: left out", file=sys.stderr)
    else:
        add("scikit-learn greedy", lambda left, book: pairwise_distances_argmin(left, book))
    try:
        import faiss  # type: ignore[import-not-found]
    except ImportError:
        print("faiss is not installed: left out", file=sys.stderr)
    else:
        add("faiss greedy", lambda left, book: faiss.knn(left, book, 1)[1][:, 0])
    return rows


def processor() -> str:
    """The machine's name, as its kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Print the table, or with --json one object."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--effort", nargs="*", default=list(fitting.EFFORTS), choices=list(fitting.EFFORTS))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cores", type=int, default=32, help="for the projection to Kimi K3")
    options.add_argument("--experts", type=int, default=4, help="packed end to end for each effort; 0 leaves it out")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    matrices = sources(chosen.seed)
    efforts = [effort_row(name, matrices, chosen.seed + 1) for name in chosen.effort]
    vectors = [rvq.to_vectors(values, *rvq.row_scales(values)) for values in matrices[:1]]
    books = fitting.fit_codebooks(vectors, rvq.Parameters(), seed=1, effort=fitting.EFFORTS["fast"]).astype(np.float32)
    sample = np.ascontiguousarray(vectors[0].reshape(-1, 8)[:_SAMPLE])
    table = kernel_rows(sample, books)
    others = peers(sample, books)
    packed = []
    if chosen.experts:
        with checkpoint_of(chosen.experts, chosen.seed) as source:
            packed = pack_and_measure(source, chosen.effort, jobs=chosen.jobs)
    spent, done = min((clock(lambda: kernels.multiply_adds(1_000_000)) for _ in range(20)), key=lambda pair: pair[0])
    if chosen.json:
        print(
            json.dumps(
                {
                    "processor": processor(),
                    "path": kernels.selection().name,
                    "peak_multiply_adds": done / spent,
                    "efforts": [asdict(row) for row in efforts],
                    "kernels": [
                        dict(zip(("path", "width", "weights_per_second", "peak_share"), r, strict=True)) for r in table
                    ],
                    "peers": [asdict(row) for row in others],
                    "packed": [asdict(row) for row in packed],
                }
            )
        )
        return
    print(
        f"{processor()}, kernels {kernels.selection().name}, peak {done / spent / 1e9:.1f} G multiply-adds/s a core\n"
    )
    print(
        "| one expert | error | core-s | M weights/s/core | K3 on",
        chosen.cores,
        "cores | parts |\n|---|---|---|---|---|---|",
    )
    for row in efforts:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.parts.items())
        hours = row.seconds * _K3_EXPERTS / chosen.cores / 3600
        print(
            f"| {row.what} | {row.error:.2%} | {row.seconds:.2f} | {row.weights_per_second / 1e6:.1f} | "
            f"{hours:.1f} h | {parts} |"
        )
    print("\n| kernel | width | M weights/s/core | 768 multiply-adds a weight, over the peak |\n|---|---|---|---|")
    for path, width, speed, share in table:
        print(f"| {path} | {width} | {speed / 1e6:.2f} | {f'{share:.0%}' if share else '-'} |")
    for row in others:
        print(f"| {row.what} | 1 | {row.weights_per_second / 1e6:.2f} | - |")
    print(
        "\n| packed end to end | error by verify, mean (max) | wall s an expert | core-s an expert | "
        f"K3 on {chosen.cores} cores |\n|---|---|---|---|---|"
    )
    for pack in packed:
        wall, spent = pack.seconds / pack.experts, pack.processor_seconds / pack.experts
        hours = spent * _K3_EXPERTS / chosen.cores / 3600
        print(
            f"| {pack.effort}, {pack.experts} experts, {pack.jobs} jobs "
            f"| {pack.mean_error:.2%} ({pack.max_error:.2%}) | {wall:.2f} | {spent:.2f} | {hours:.1f} h |"
        )


if __name__ == "__main__":
    main()
