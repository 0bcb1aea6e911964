"""Looking on while a model runs: what layers hand on, what routers choose, what experts do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class ExpertUse:
    """What one expert did in a step.

    Attributes:
        expert: its number.
        tokens: int64 [m], rows of the step that use it.
        weights: float32 [m], what its output counts for them.
        inputs: float32 [m, width], of gate and up.
        activated: float32 [m, expert width], of down.
        outputs: float32 [m, width], not yet weighted.
    """

    expert: int
    tokens: Whole
    weights: Single
    inputs: Single
    activated: Single
    outputs: Single


class Observer:
    """Who wants to see something overrides some of these; arrays are not to be changed, nor kept without a copy.

    ``first`` is always the position of the first of the step's tokens.
    """

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        """What a layer hands on (for K3 the running sum): float32 [n, hidden]."""

    def routes(self, layer: int, first: int, chosen: Whole, weights: Single) -> None:
        """Experts int64 [n, k], ascending in each row, and their weights float32 [n, k]."""

    def experts_input(self, layer: int, first: int, values: Single) -> None:
        """What the routed experts of a layer work on, the latent if there is one: float32 [n, width]."""

    def expert(self, layer: int, first: int, seen: ExpertUse) -> None:
        """What one expert did; called from several threads, in any order."""


@dataclass(frozen=True)
class Watch:
    """An observer of one layer's mixture in one step."""

    observer: Observer
    layer: int
    first: int

    def routed(self, chosen: Whole, weights: Single, inputs: Single) -> None:
        """The router has chosen."""
        self.observer.routes(self.layer, self.first, chosen, weights)
        self.observer.experts_input(self.layer, self.first, inputs)

    def expert(self, seen: ExpertUse) -> None:
        """An expert has worked."""
        self.observer.expert(self.layer, self.first, seen)
