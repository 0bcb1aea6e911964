"""How close the stream comes to the device: ``python -m benchmarks.stream [CONTAINER]``.

Reads the same records, in the same order, first as plainly as possible (threads that read aligned and direct into
buffers of their own, nothing else) and then through :class:`~runtime.stream.experts.ExpertStream`, layer by layer as a
model asks for them, in the same run and by turns, because the machine may be shared. Both have had a first token before
the clock runs, so that their memory is there. No work is done on the experts. Without a container a synthetic one with
records of Kimi K3's size is made in a temporary folder (about 5 GB).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import synthetic
from benchmarks.errors import told
from formats.container import Container, open_container
from runtime.store import Expert
from runtime.stream.container import ContainerExperts
from runtime.stream.direct import DirectReads
from runtime.stream.experts import ExpertStream
from runtime.stream.plain import Piece, PlainReader
from runtime.threads import Workers

Token = list[tuple[int, list[int]]]  # layer and the experts that it asks for


@dataclass(frozen=True)
class Way:
    """One way to read: plainly, or by the stream with or without checks."""

    name: str
    check: bool | None  # None: plainly


WAYS = (Way("plain reads", None), Way("stream", False), Way("stream, digests proved", True))


def routes(container: Container, tokens: int, seed: int) -> list[Token]:
    """What tokens ask for: experts a layer at random, so that nothing comes again soon."""
    rng = np.random.default_rng(seed)
    count = container.manifest.architecture.experts_per_token
    return [
        [
            (info.layer, sorted(int(e) for e in rng.choice(info.experts, count, replace=False)))
            for info in container.manifest.layers
        ]
        for _ in range(tokens)
    ]


def read_plainly(container: Container, tokens: Sequence[Token], readers: int) -> float:
    """Seconds for ``readers`` threads to read all records, each into a buffer of its own."""
    reads = DirectReads()
    files = {info.layer: reads.open(container.open_again(info.file), info.file) for info in container.manifest.layers}
    rows = [container.row(layer, expert) for token in tokens for layer, chosen in token for expert in chosen]
    with closing(reads), closing(PlainReader(readers, max(row.bytes for row in rows))) as reader:
        return reader.read([Piece(files[row.layer], row.offset, row.bytes) for row in rows])


@contextmanager
def stream_of(container: Container, readers: int, slots: int, check: bool) -> Iterator[ExpertStream]:
    """A stream, closed afterwards."""
    reads = DirectReads()
    stream = ExpertStream(
        ContainerExperts(container, reads, check=check), slots=slots, workers=Workers(1), readers=readers
    )
    try:
        yield stream
    finally:
        stream.close()
        reads.close()


def read_by_stream(container: Container, tokens: Sequence[Token], readers: int, slots: int, check: bool) -> float:
    """Seconds for the stream to deliver all experts; the next layer is expected while one is asked for.

    Expectations are right here: whether they would be is a matter of the model, and what is measured is the device.
    """

    def work(expert: Expert) -> None:
        """Nothing."""

    steps = [step for token in tokens for step in token]
    with stream_of(container, readers, slots, check) as stream:
        for info in container.manifest.layers:
            stream.compute(info.layer, range(min(info.experts, -(-slots // len(container.manifest.layers)))), work)
        began = time.perf_counter()
        for number, (layer, chosen) in enumerate(steps):
            following = steps[number + 1] if number + 1 < len(steps) else None

            def meanwhile(following: tuple[int, list[int]] | None = following) -> None:
                if following is not None:
                    stream.expect(*following)

            stream.compute(layer, chosen, work, meanwhile)
        return time.perf_counter() - began


def measure(container: Container, readers: Sequence[int], slots: int, tokens: int, passes: int) -> None:
    """Print a table of GB/s."""
    size = max(container.largest_record(info.layer) for info in container.manifest.layers)
    asked = sum(len(chosen) for _, chosen in routes(container, 1, 0)[0])
    print(f"{tokens} tokens of {asked} records of {size:,} bytes, {slots} slots, median of {passes} passes\n")
    print("| readers | " + " | ".join(way.name for way in WAYS) + " | stream / plain |")
    print("|---" * (len(WAYS) + 2) + "|")
    for count in readers:
        rates: dict[str, list[float]] = {way.name: [] for way in WAYS}
        for number in range(passes):
            chosen = routes(container, tokens, number)
            total = sum(container.row(layer, e).bytes for token in chosen for layer, all_ in token for e in all_)
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                if way.check is None:
                    seconds = read_plainly(container, chosen, count)
                else:
                    seconds = read_by_stream(container, chosen, count, slots, way.check)
                rates[way.name].append(total / seconds / 1e9)
        ratios = [one / other for one, other in zip(rates["stream"], rates["plain reads"], strict=True)]
        cells = [f"{statistics.median(values):.2f} GB/s" for values in rates.values()]
        print(
            f"| {count} | " + " | ".join(cells) + f" | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |",
            flush=True,
        )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("container", type=Path, nargs="?")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--slots", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--passes", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.container
        if path is None:
            path = Path(folder) / "synthetic.moepack"
            synthetic.make(path, synthetic.Size(layers=9))  # more would take room and time and change nothing
        with told(parser), open_container(path) as container:
            measure(container, given.readers, given.slots, given.tokens, given.passes)


if __name__ == "__main__":
    main()
