"""What the safety of a healthy pack costs: ``python -m benchmarks.safety``.

Whole experts of Kimi K3's size (``proxy.py``) are packed twice in each pair, once as ever, and once without flushing
(a ``System`` whose fsync does nothing), without reading back and without digests of the source's shards. Which one
goes first alternates, and each begins with a source that is not in the page cache. Digests of records and matrices,
which the container itself needs, are made by both; so are the journal and the renames.

The device counts: set TMPDIR to a folder on it. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from unittest.mock import patch

from benchmarks.end_to_end import checkpoint_of
from formats.checkpoint import open_checkpoint
from formats.families import bind
from formats.manifest import FILE_NAME
from formats.spelling import counted
from packer import pipeline
from packer.encoding import codebooks
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.recipe.recipe import load_recipe, override
from packer.storage import durable
from packer.storage.durable import Extent
from packer.storage.journal import ShardSeen
from packer.storage.system import SYSTEM, System


@dataclass(frozen=True)
class Spent:
    """Seconds of one pack: on the clock, and of all processors."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Pair:
    """The same pack with its safety and without."""

    safe: Spent
    bare: Spent

    @property
    def wall(self) -> float:
        """With over without, on the clock."""
        return self.safe.wall / self.bare.wall

    @property
    def processor(self) -> float:
        """With over without, of all processors."""
        return self.safe.processor / self.bare.processor


def _believed(path: Path, extents: Sequence[Extent], *, system: System = SYSTEM) -> bytes:
    """In place of ``durable.read_back``; the digest is only journalled."""
    return bytes(32)


def _unread(directory: Path, name: str, *, stop: Event, expected: str | None = None) -> ShardSeen:
    """In place of ``shards.hash_shard``."""
    found = (directory / name).stat()
    stamp = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    return ShardSeen(name, found.st_size, "0" * 64, stamp)


@contextmanager
def _without_safety() -> Iterator[System]:
    with patch.object(durable, "read_back", _believed), patch.object(pipeline, "hash_shard", _unread):
        yield replace(SYSTEM, fsync=lambda fd: None)


@contextmanager
def _with_safety() -> Iterator[System]:
    yield SYSTEM


def _forget(directory: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(source: Path, out: Path, *, effort: str, jobs: int, safe: bool) -> Spent:
    """Pack ``source`` once."""
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        plan = make_plan(checkpoint, model, override(load_recipe("kimi-k3"), [f"fitting.effort={effort}"]))
        _forget(source)
        with _with_safety() if safe else _without_safety() as system:
            wall, processor = time.monotonic(), time.process_time()
            pack(checkpoint, model, plan, out, jobs=jobs, system=system)
            return Spent(time.monotonic() - wall, time.process_time() - processor)


def measure_pairs(source: Path, pairs: int, *, effort: str, jobs: int) -> list[Pair]:
    """Pack ``source`` in pairs, after one pack that loads and fills what the first would have to.

    Raises:
        RuntimeError: the two of a pair differ by more than the digests of the shards.
    """
    places = {True: source.parent / "safe.moepack", False: source.parent / "bare.moepack"}
    found = []
    for number in range(-1, pairs):
        spent = {}
        for safe in (False, True) if number % 2 else (True, False):
            spent[safe] = measure(source, places[safe], effort=effort, jobs=jobs, safe=safe)
        _check_same(places[True], places[False])
        for place in places.values():
            shutil.rmtree(place)
        if number >= 0:
            found.append(Pair(spent[True], spent[False]))
    return found


def _check_same(safe: Path, bare: Path) -> None:
    files = {path.relative_to(safe) for path in safe.rglob("*") if path.is_file()} - {Path(FILE_NAME)}
    for name in sorted(files):
        if (safe / name).read_bytes() != (bare / name).read_bytes():
            raise RuntimeError(f"{name} depends on the safety that is measured")


def markdown(pairs: Sequence[Pair], what: str) -> str:
    """A table of one line: medians, and least and greatest ratio."""

    def ratio(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    cells = [
        what,
        f"{statistics.median(pair.safe.wall for pair in pairs):.2f}",
        f"{statistics.median(pair.bare.wall for pair in pairs):.2f}",
        ratio([pair.wall for pair in pairs]),
        ratio([pair.processor for pair in pairs]),
    ]
    titles = ["flush, read-back, shard digests", "with, s", "without, s", "ratio of time", "ratio of core time"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), cells))


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--experts", type=int, default=24, help="a pack of few is mostly the end of its bank")
    options.add_argument("--effort", default="default", choices=list(codebooks.EFFORTS))
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    if chosen.pairs < 1:
        options.error("--pairs must be at least 1")
    with checkpoint_of(chosen.experts, chosen.seed) as source:
        pairs = measure_pairs(source, chosen.pairs, effort=chosen.effort, jobs=chosen.jobs)
    numbers = (counted(chosen.jobs, "job"), counted(chosen.pairs, "pair"))
    what = ", ".join((counted(chosen.experts, "expert"), f"effort {chosen.effort}", *numbers))
    print(markdown(pairs, what))


if __name__ == "__main__":
    main()
