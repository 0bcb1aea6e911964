"""One layer for all tokens: windows go through its attention one by one, groups of windows through its experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from packer.calibrate.scratch import Scratch, StatesFile
from packer.calibrate.sums import Collector, LayerSums
from packer.calibrate.texts import Sample
from runtime.models import kimi
from runtime.models.kimi import Carry, Decoder
from runtime.models.observer import ExpertUse, Observer, Single, Whole
from runtime.store import Tensors


@dataclass(frozen=True)
class Group:
    """Windows that go through a layer's experts together: tokens ``first`` to before ``stop`` of the sample."""

    first: int
    stop: int
    windows: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    halves: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each window starts, counted from the group's first token, and last how many tokens there are."""
        return (0, *accumulate(len(window) for window in self.windows))


def groups_of(sample: Sample, most: int) -> Iterator[Group]:
    """All windows in order, in groups of at most ``most`` tokens, or of one window where that has more."""
    start = first = 0
    while start < len(sample.windows):
        stop, tokens = start, 0
        while stop < len(sample.windows) and (stop == start or tokens + len(sample.windows[stop]) <= most):
            tokens += len(sample.windows[stop])
            stop += 1
        windows = sample.windows[start:stop]
        halves = tuple(number % 2 for number in range(start, stop))
        yield Group(first, first + tokens, windows, sample.label_of[start:stop], halves)
        start, first = stop, first + tokens


def embed(decoder: Decoder, sample: Sample, most: int, target: StatesFile) -> None:
    """Write the states before layer 0."""
    for group in groups_of(sample, most):
        ids = [token for window in group.windows for token in window]
        target.write(group.first, decoder.begin(ids).total)


def pass_layer(
    decoder: Decoder,
    layer: int,
    sample: Sample,
    most: int,
    scratch: Scratch,
    target: StatesFile | None,
    sums: LayerSums | None,
    progress: Callable[[int], None],
) -> None:
    """Push all tokens through a layer.

    Args:
        most: tokens of a group.
        scratch: has the states before the layer.
        target: gets those after it; None behind the last layer that is counted.
        sums: of the layer's experts, None for a dense layer.
        progress: called with the tokens done, after each window's attention, each expert and each group: a group of a
            large model takes minutes. From several threads, one at a time.
    """
    tensors = decoder.store.trunk.layer(layer)
    with np.errstate(all="ignore"):  # as in a session: what is not finite shows in the sums, which are looked at
        for group in groups_of(sample, most):
            carry = _attend(decoder, layer, tensors, group, scratch, progress)
            observer = None
            if sums is not None:
                observer = _Telling(Collector(sums, group.starts, group.labels, group.halves), group, progress)
            if target is not None or sums is not None:
                carry = decoder.feed_forward(layer, tensors, carry, 0, observer)
            if target is not None:
                target.write(group.first, carry.total)
            progress(group.stop)


class _Telling(Observer):
    """Hands on to ``collector`` what a group's experts do, and tells after each what share of the routed work is done.

    A group's attention counts for nothing: how long it takes beside the experts depends on model and machine.
    """

    def __init__(self, collector: Collector, group: Group, progress: Callable[[int], None]) -> None:
        self._collector, self._group, self._progress = collector, group, progress
        self._lock = threading.Lock()
        self._routed = self._done = 0

    def routes(self, layer: int, first: int, chosen: Whole, weights: Single) -> None:
        self._routed = chosen.size

    def experts_input(self, layer: int, first: int, values: Single) -> None:
        self._collector.experts_input(layer, first, values)

    def expert(self, layer: int, first: int, seen: ExpertUse) -> None:
        self._collector.expert(layer, first, seen)
        with self._lock:  # held while it is told, so that the number never falls
            self._done += len(seen.tokens)
            tokens = (self._group.stop - self._group.first) * self._done // self._routed
            self._progress(self._group.first + tokens)


def _attend(
    decoder: Decoder,
    layer: int,
    tensors: Tensors,
    group: Group,
    scratch: Scratch,
    progress: Callable[[int], None],
) -> Carry:
    """The group behind the layer's attention; each window begins with an empty state."""
    total = scratch.read(layer, group.first, group.stop)
    blocks = [scratch.read(number, group.first, group.stop) for number in scratch.blocks(layer)]
    parts: list[Carry] = []
    start = 0
    for window in group.windows:
        stop = start + len(window)
        carry = Carry(total[start:stop], tuple(block[start:stop] for block in blocks))
        memory = kimi.new_layer_state(decoder.store.config, layer, len(window))
        parts.append(decoder.attend(layer, tensors, carry, memory, 0))
        start = stop
        progress(group.first)
    joined = [_joined([part.blocks[number] for part in parts]) for number in range(len(parts[0].blocks))]
    return Carry(_joined([part.total for part in parts]), tuple(joined))


def _joined(parts: Sequence[Single]) -> Single:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
