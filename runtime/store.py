"""Where a model's weights come from, as the forward pass sees it: a trunk and experts, both encoded.

A container and a source checkpoint are two ways to serve the same two protocols; how much of them is in memory, and
when it is read, is decided behind them and never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix
from formats.families.kimi_config import TextConfig

Single = NDArray[np.float32]


@dataclass(frozen=True)
class Expert:
    """One expert's weights, encoded. Views of a buffer that others may reuse once the caller is done with it."""

    layer: int
    expert: int
    gate: EncodedMatrix
    up: EncodedMatrix
    down: EncodedMatrix


@dataclass(frozen=True)
class Tensors:
    """Tensors of one segment of the trunk, by their name within it (for example ``self_attn.q_proj.weight``).

    Attributes:
        matrices: linear maps, encoded.
        vectors: everything else, float32, decoded, in its source shape.
    """

    matrices: Mapping[str, EncodedMatrix]
    vectors: Mapping[str, Single]


class Trunk(Protocol):
    """Everything but the routed experts. Not for several threads at once."""

    def embed(self, ids: NDArray[np.int64]) -> Single:
        """Rows of the embedding: float32 [len(ids), hidden]."""

    def layer(self, layer: int) -> Tensors:
        """The tensors of a decoder layer; valid until the next call. Layers are asked for in ascending order, again
        and again, and the next one may be read ahead."""

    def router(self, layer: int) -> Tensors | None:
        """The tensors of a layer with a router for a look ahead, or None if they are not in memory now."""

    def output(self) -> Tensors:
        """Final norm and, with attention residuals, the output mix; small, always in memory."""

    def head(self, inputs: Single) -> Single:
        """Logits float32 [n, vocab] of normed states float32 [n, hidden]."""


class Experts(Protocol):
    """The routed experts."""

    @property
    def complete(self) -> bool:
        """Whether they are all in memory or on their way there, so that expecting some makes no difference."""

    def compute(
        self,
        layer: int,
        chosen: Sequence[int],
        work: Callable[[Expert], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Call ``work`` once for each chosen expert, and return when all calls have.

        All reads are asked for first; ``meanwhile`` then runs once on the calling thread. Calls of ``work`` come from
        several threads, in the order in which weights arrive; its results must not depend on that order.

        Raises:
            MoepackError: of the first expert that could not be read; no other weights take its place.
        """

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Experts that will probably be chosen next, best first: read them when nothing else is to be read."""


@dataclass(frozen=True)
class WeightStore:
    """A model's weights and its configuration.

    Attributes:
        family: ``kimi_k3`` or ``kimi_linear``.
        config: the text tower's.
        layer_experts: routed experts that each layer has here, 0 for dense layers; fewer than configured if pruned.
        trunk: everything else.
        experts: the routed experts.
    """

    family: str
    config: TextConfig
    layer_experts: tuple[int, ...]
    trunk: Trunk
    experts: Experts
