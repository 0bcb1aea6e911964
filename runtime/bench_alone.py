"""Parts of decoding by themselves: plain reads of what is needed, arithmetic on what is in memory, a cache alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from formats.container import Container
from runtime.budget import BudgetPlan
from runtime.store import Expert
from runtime.stream.container import ContainerExperts
from runtime.stream.direct import DirectReads, readers_for
from runtime.stream.experts import ExpertStream
from runtime.stream.plain import Piece, PlainReader, pieces_around
from runtime.stream.policy import Frequency
from runtime.stream.replay import Cache, Request
from runtime.threads import Workers

TRUNK_PIECE_BYTES = 16 << 20  # of a streamed trunk, in plain reads

Layers = Mapping[int, tuple[int, ...]]  # layer -> its chosen experts, of one token
Name = tuple[int, int]  # layer and expert


class PresentExperts:
    """The experts that a stream has in memory, which stand in for all others; it must not be asked meanwhile."""

    def __init__(self, stream: ExpertStream, workers: Workers) -> None:
        self._stream, self._workers = stream, workers
        self._present: dict[Name, Expert] = {}
        self._any: list[Expert] = []

    def renew(self) -> None:
        """See what is there now; to be called whenever the stream was asked for something."""
        self._any = self._stream.present()
        self._present = {(expert.layer, expert.expert): expert for expert in self._any}

    @property
    def complete(self) -> bool:
        """Everything is here."""
        return True

    def compute(
        self,
        layer: int,
        chosen: Sequence[int],
        work: Callable[[Expert], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """As in :class:`runtime.store.Experts`."""
        if meanwhile is not None:
            meanwhile()
        self._workers.run([partial(work, self._expert(layer, expert)) for expert in chosen])

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """It makes no difference."""

    def _expert(self, layer: int, expert: int) -> Expert:
        found = self._present.get((layer, expert)) or self._any[(7 * layer + expert) % len(self._any)]
        return replace(found, layer=layer, expert=expert)


class PlainReads:
    """Plain reads of what tokens need, from files of its own. Close it."""

    def __init__(self, container: Container, slots: int) -> None:
        """``slots`` of the cache without look-ahead that says what has to be read."""
        self._container, self._reads = container, DirectReads()
        self._banks = {
            info.layer: self._reads.open(container.open_again(info.file), info.file)
            for info in container.manifest.layers
        }
        trunk = container.manifest.trunk
        self._trunk = self._reads.open(container.open_again(trunk.file), trunk.file)
        loader = ContainerExperts(container, self._reads)
        self._cache = Cache(loader.layer_experts, slots, Frequency(loader.layer_experts))
        self._reader = PlainReader(readers_for(loader.slot_bytes), max(loader.slot_bytes, TRUNK_PIECE_BYTES))

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
        self._reads.close()

    def needed(self, layers: Layers) -> list[Piece]:
        """The records that the cache has to read for the next token."""
        missing = {layer: self._cache.play(Request(layer, chosen)) for layer, chosen in layers.items()}
        return self.records([(layer, expert) for layer, experts in missing.items() for expert in experts])

    def records(self, names: Sequence[Name]) -> list[Piece]:
        """Whole records."""
        rows = [self._container.row(*name) for name in names]
        return [Piece(self._banks[row.layer], row.offset, row.bytes) for row in rows]

    def trunk(self, count: int) -> list[Piece]:
        """As many bytes of the trunk, from its start again and again."""
        return pieces_around(self._trunk, self._container.manifest.trunk.bytes, count, TRUNK_PIECE_BYTES)

    def begin(self, pieces: Sequence[Piece]) -> list[Future[None]]:
        """Read all; results to wait for."""
        return self._reader.begin(pieces)

    def read(self, pieces: Sequence[Piece]) -> float:
        """Read all; the seconds."""
        return self._reader.read(pieces)


@dataclass(frozen=True)
class Caching:
    """Experts of all measured tokens through a cache without arithmetic, and the same records plainly."""

    seconds: float
    plain_seconds: float
    bytes: int


def measure_cache(
    container: Container,
    plan: BudgetPlan,
    trace: Sequence[Layers],
    warm: int,
    workers: Workers,
    made: Callable[[], None],
) -> Caching:
    """Ask a cache for the experts of all tokens, and read plainly what it read, token by token.

    Args:
        trace: of all tokens; the first ``warm`` of them are not counted.
        made: called after each token.
    """
    seconds = plain_seconds = 0.0
    count = 0
    with ExitStack() as stack:
        reads = DirectReads()
        stack.callback(reads.close)
        loader = _NotedReads(container, reads)
        stream = ExpertStream(loader, slots=plan.slots, workers=workers)
        stack.callback(stream.close)
        plain = stack.enter_context(closing(PlainReads(container, plan.slots)))
        for place, layers in enumerate(trace):
            loader.names.clear()
            began = time.perf_counter()
            for layer, chosen in layers.items():
                stream.compute(layer, chosen, _nothing)
            ended = time.perf_counter()
            pieces = plain.records(loader.names)
            if place >= warm:
                seconds += ended - began
                plain_seconds += plain.read(pieces)
                count += sum(piece.bytes for piece in pieces)
            made()
    return Caching(seconds, plain_seconds, count)


class _NotedReads(ContainerExperts):
    """Notes which records are read."""

    def __init__(self, container: Container, reads: DirectReads) -> None:
        super().__init__(container, reads, check=False)
        self._noting = threading.Lock()
        self.names: list[Name] = []

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        if part == 0:
            with self._noting:
                self.names.append((layer, expert))
        return super().read(layer, expert, part, slot)


def _nothing(expert: Expert) -> None:
    """No work: only reading is measured."""
