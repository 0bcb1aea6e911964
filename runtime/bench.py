"""How fast a container runs here, and what holds it up: reading alone, computing alone, and both together.

The same tokens are decoded three times over:

1. Together: as ``run`` does it. The model chooses its own tokens, and which experts they need is noted.
2. Reading alone: what the noted experts make the cache read, once through the cache without any arithmetic, and once as
   plain parallel reads of the very same records. A streamed trunk is read as well.
3. Computing alone: the noted tokens with experts that are in memory. Where not all of them fit, those that do stand in
   for the others: the time is the same, the numbers mean nothing. The trunk is held in memory.

A few tokens before the measured ones warm the cache up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.container import Container, open_container
from formats.errors import FormatError, UsageError
from formats.layout import PAGE, align
from runtime.assets import is_container
from runtime.budget import RESIDENT, BudgetPlan
from runtime.models import kimi
from runtime.models.observer import Observer
from runtime.opening import Options, Weights, open_weights
from runtime.sampling import Sampling, choose
from runtime.store import Expert
from runtime.stream.container import ContainerExperts
from runtime.stream.direct import DirectReads, StreamFile
from runtime.stream.experts import ExpertStream, readers_for
from runtime.stream.memory import Area, Slots
from runtime.stream.statistics import StreamStatistics
from runtime.threads import Workers

WARM_TOKENS = 4
PIECE_BYTES = 16 << 20  # of a streamed trunk, in plain reads

Layers = dict[int, tuple[int, ...]]  # layer -> its chosen experts, of one token
Name = tuple[int, int]  # layer and expert


@dataclass(frozen=True)
class Together:
    """Decoding as it is: seconds of all measured tokens, and what was read meanwhile."""

    seconds: float
    stream: StreamStatistics
    trunk_bytes: int
    trunk_stall_seconds: float

    @property
    def bytes_read(self) -> int:
        """Of experts and trunk."""
        return self.stream.bytes_read + self.trunk_bytes

    @property
    def stall_seconds(self) -> float:
        """In which arithmetic waited for bytes."""
        return self.stream.stall_seconds + self.trunk_stall_seconds


@dataclass(frozen=True)
class Reading:
    """Reading alone: through the cache and plainly, the same records; and the trunk where it is streamed."""

    cached_seconds: float
    plain_seconds: float
    expert_bytes: int
    trunk_seconds: float
    trunk_bytes: int

    @property
    def seconds(self) -> float:
        """Plain reads of everything that is needed."""
        return self.plain_seconds + self.trunk_seconds


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        container_id: of the container.
        tokens: measured.
        threads: for arithmetic.
        plan: how the budget was divided.
        together, reading: see there.
        computing_seconds: arithmetic alone; None where the trunk does not fit into memory.
        notes: of the reading, for example that direct reads are not possible here.
    """

    container_id: str
    tokens: int
    threads: int
    plan: BudgetPlan
    together: Together
    reading: Reading
    computing_seconds: float | None
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Together, in proportion to the larger of reading alone and computing alone."""
        if self.computing_seconds is None:
            return None
        return self.together.seconds / max(self.reading.seconds, self.computing_seconds)


def bench(path: Path, options: Options, *, tokens: int, seed: int = 0, tell: Callable[[str], None] = print) -> Bench:
    """Measure a container.

    Args:
        path: the container.
        options: how it is run; the context is chosen here.
        tokens: how many are measured, at least one.
        seed: of the tokens that the model draws.
        tell: told what is being measured.

    Raises:
        UsageError: not a container, no tokens, or a budget that is too small.
        FormatError: the container is damaged or partial.
    """
    if tokens < 1:
        raise UsageError("nothing to measure", where="-n", expected="1 or more", found=tokens)
    if not is_container(path):
        raise FormatError("not a container", where=path, hint="make one with moepack pack")
    options = replace(options, context=WARM_TOKENS + tokens)
    tell("decoding")
    with ExitStack() as stack:
        weights = open_weights(path, options, stack)
        ids, trace, together = _together(weights, options, tokens, seed)
        plan, threads, notes = weights.plan, weights.workers.threads, weights.notes()
        container_id = weights.container_id or ""
    tell("reading alone")
    with open_container(path) as container, Workers(threads) as workers:
        reading = _reading(container, plan, trace, together.trunk_bytes, workers)
    tell("computing alone")
    seconds = _computing(path, options, plan, ids, trace)
    return Bench(container_id, tokens, threads, plan, together, reading, seconds, notes)


@dataclass
class _Routes(Observer):
    """Notes which experts were chosen, token by token."""

    tokens: list[Layers] = field(default_factory=list)

    def routes(self, layer: int, first: int, chosen: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        self.tokens[-1][layer] = tuple(int(expert) for expert in chosen[0])


def _steps(weights: Weights, options: Options, observer: Observer | None) -> Callable[[int], NDArray[np.float32]]:
    """A function that feeds one token and returns its logits [vocab]."""
    look_ahead = weights.store.config.experts_per_token if options.look_ahead else 0
    decoder = kimi.Decoder(weights.store, weights.workers, look_ahead)
    state = kimi.new_state(weights.store.config, options.context)

    def step(token: int) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):
            logits: NDArray[np.float32] = weights.store.trunk.head(decoder.step((token,), state, observer))[0]
        return logits

    return step


def _together(weights: Weights, options: Options, tokens: int, seed: int) -> tuple[list[int], list[Layers], Together]:
    sampling = Sampling(temperature=1.0, seed=seed)
    generator = sampling.generator()
    routes = _Routes()
    step = _steps(weights, options, routes)
    ids = [int(generator.integers(weights.store.config.vocab_size))]
    began, before, trunk = 0.0, StreamStatistics(), weights.trunk.statistics()
    for place in range(WARM_TOKENS + tokens):
        if place == WARM_TOKENS:
            before, trunk = weights.stream.statistics(), weights.trunk.statistics()
            began = time.perf_counter()
        routes.tokens.append({})
        ids.append(choose(step(ids[-1]), sampling, generator))
    seconds = time.perf_counter() - began
    after = weights.trunk.statistics()
    found = Together(
        seconds,
        weights.stream.statistics() - before,
        after.bytes_read - trunk.bytes_read,
        after.stall_seconds - trunk.stall_seconds,
    )
    return ids[:-1], routes.tokens, found


class _NotedReads(ContainerExperts):
    """Notes which records are read."""

    def __init__(self, container: Container, reads: DirectReads) -> None:
        super().__init__(container, reads, check=False)
        self._lock = threading.Lock()
        self.names: list[Name] = []

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        if part == 0:
            with self._lock:
                self.names.append((layer, expert))
        return super().read(layer, expert, part, slot)


def _reading(
    container: Container, plan: BudgetPlan, trace: Sequence[Layers], trunk_bytes: int, workers: Workers
) -> Reading:
    with ExitStack() as stack:
        reads = DirectReads()
        stack.callback(reads.close)
        loader = _NotedReads(container, reads)
        stream = ExpertStream(loader, slots=plan.slots, workers=workers)
        stack.callback(stream.close)
        began = time.perf_counter()
        for place, layers in enumerate(trace):
            if place == WARM_TOKENS:
                loader.names.clear()
                began = time.perf_counter()
            for layer, chosen in layers.items():
                stream.compute(layer, chosen, _nothing)
        cached = time.perf_counter() - began
        names = tuple(loader.names)

    with ExitStack() as stack:  # the slots of the cache are given back before buffers are taken
        reads = DirectReads()
        stack.callback(reads.close)
        banks = {
            info.layer: reads.open(container.open_again(info.file), info.file) for info in container.manifest.layers
        }
        rows = [container.row(*name) for name in names]
        pieces = [_Piece(banks[row.layer], row.offset, row.bytes) for row in rows]
        plain = _read_plainly(pieces, readers_for(loader.part_bytes))
        trunk_file = container.manifest.trunk.file
        trunk = reads.open(container.open_again(trunk_file), trunk_file)
        around = _pieces_around(trunk, container.manifest.trunk.bytes, trunk_bytes)
        return Reading(
            cached, plain, sum(row.bytes for row in rows), _read_plainly(around, readers_for(PIECE_BYTES)), trunk_bytes
        )


def _nothing(expert: Expert) -> None:
    """No work: only reading is measured."""


@dataclass(frozen=True)
class _Piece:
    """A range of a file."""

    file: StreamFile
    offset: int
    bytes: int


def _pieces_around(file: StreamFile, length: int, count: int) -> list[_Piece]:
    """Pieces of a file of ``length`` bytes that are ``count`` bytes together, whole pages, from its start again and
    again."""
    pieces = []
    offset = 0
    while count > 0:
        step = align(min(PIECE_BYTES, count, length - offset), PAGE)
        pieces.append(_Piece(file, offset, step))
        count -= step
        offset = 0 if offset + step >= length else offset + step
    return pieces


def _read_plainly(pieces: Sequence[_Piece], readers: int) -> float:
    """Read pieces with ``readers`` threads and buffers that are used again and again; returns the seconds."""
    if not pieces:
        return 0.0
    longest = max(piece.bytes for piece in pieces)
    buffers = [Area(longest) for _ in range(min(readers, len(pieces)))]
    for buffer in buffers:
        buffer.view[:] = bytes(buffer.bytes)  # so that no page is taken for the first time while it is measured
    waiting = iter(pieces)
    lock = threading.Lock()

    def work(buffer: Area) -> None:
        while True:
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            piece.file.read(piece.offset, buffer.view[: piece.bytes], where=piece.file.where)

    with ThreadPoolExecutor(len(buffers)) as pool:
        began = time.perf_counter()
        for done in [pool.submit(work, buffer) for buffer in buffers]:
            done.result()
        return time.perf_counter() - began


class _MemoryExperts:
    """Experts that are in memory: the first ones that fit, which stand in for all others."""

    def __init__(self, loader: ContainerExperts, names: Sequence[Name], slots: int, workers: Workers) -> None:
        kept = list(dict.fromkeys(names))[:slots]
        area = Slots(len(kept), loader.slot_bytes)
        for place, name in enumerate(kept):
            for part in range(loader.parts(*name)):
                loader.read(*name, part, area[place])
        self._experts = [loader.view(*name, area[place]) for place, name in enumerate(kept)]
        self._places = {name: place for place, name in enumerate(kept)}
        self._workers = workers

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
        """Everything is here."""

    def _expert(self, layer: int, expert: int) -> Expert:
        place = self._places.get((layer, expert), (layer + expert) % len(self._experts))
        return replace(self._experts[place], layer=layer, expert=expert)


def _computing(
    path: Path, options: Options, plan: BudgetPlan, ids: Sequence[int], trace: Sequence[Layers]
) -> float | None:
    """Seconds of the measured tokens' arithmetic; None where the trunk does not fit into memory."""
    held = replace(options, look_ahead=False, trunk=RESIDENT)
    if plan.trunk != RESIDENT:
        held = replace(held, budget=None)
    with ExitStack() as stack:
        try:
            weights = open_weights(path, held, stack)
        except UsageError:
            return None
        names = [(layer, expert) for layers in trace for layer, chosen in layers.items() for expert in chosen]
        if names:
            container = stack.enter_context(open_container(path))
            reads = DirectReads()
            stack.callback(reads.close)
            loader = ContainerExperts(container, reads, check=False)
            experts = _MemoryExperts(loader, names, plan.slots, weights.workers)
            weights = replace(weights, store=replace(weights.store, experts=experts))
        step = _steps(weights, held, None)
        began = 0.0
        for place, token in enumerate(ids):
            if place == WARM_TOKENS:
                began = time.perf_counter()
            step(token)
        return time.perf_counter() - began
