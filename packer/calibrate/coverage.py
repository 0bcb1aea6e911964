"""What a sample of text lacks: experts that were never or hardly ever routed, by label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packer.statistics.file import Statistics

HARDLY = 16  # tokens below which an expert's sums say little


@dataclass(frozen=True)
class Coverage:
    """Routed experts by how often they were.

    Attributes:
        label: its name, or None for all text together.
        tokens: that went through the model.
        never: experts of all layers without a token.
        hardly: those with 1 to 15 tokens.
        experts: of all layers.
        worst: (layer, experts without a token) of the layers with most of them, at most five.
    """

    label: str | None
    tokens: int
    never: int
    hardly: int
    experts: int
    worst: tuple[tuple[int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "label": self.label,
            "tokens": self.tokens,
            "experts": self.experts,
            "never_routed": self.never,
            "hardly_routed": self.hardly,
            "worst_layers": [{"layer": layer, "never_routed": never} for layer, never in self.worst],
        }


def coverage_of(statistics: Statistics) -> tuple[Coverage, ...]:
    """For each label, and last for all together if there are several."""
    labels = statistics.provenance.labels
    counts = {layer: statistics.tokens(layer) for layer in statistics.layers}
    rows: list[tuple[str | None, int, slice]] = [
        (label.name, label.tokens, slice(number, number + 1)) for number, label in enumerate(labels)
    ]
    if len(labels) > 1:
        rows.append((None, statistics.provenance.tokens, slice(None)))
    found = []
    for name, tokens, chosen in rows:
        routed = {layer: count[chosen].sum(axis=0) for layer, count in counts.items()}
        never = {layer: int((count == 0).sum()) for layer, count in routed.items()}
        hardly = sum(int(((count > 0) & (count < HARDLY)).sum()) for count in routed.values())
        worst = sorted(((layer, lost) for layer, lost in never.items() if lost), key=lambda item: (-item[1], item[0]))
        experts = sum(count.size for count in routed.values())
        found.append(Coverage(name, tokens, sum(never.values()), hardly, experts, tuple(worst[:5])))
    return tuple(found)
