"""One number for each expert of a model, counted over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from formats.errors import UsageError
from formats.layout import record_name


class Numbering:
    """Experts of layer 0 come first, then those of layer 1, and so on."""

    def __init__(self, layer_experts: Sequence[int]) -> None:
        """``layer_experts``: how many experts each layer has, 0 for dense layers."""
        self._counts = tuple(layer_experts)
        self._firsts = tuple(accumulate(self._counts, initial=0))

    def key(self, layer: int, expert: int) -> int:
        """The number of an expert.

        Raises:
            UsageError: there is no such expert.
        """
        if not 0 <= layer < len(self._counts) or not 0 <= expert < self._counts[layer]:
            raise UsageError("no such expert", where=record_name(layer, expert))
        return self._firsts[layer] + expert
