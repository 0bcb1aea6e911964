"""What ``run`` is asked to write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WritingOptions:
    """What is written, as it was typed."""

    count: int
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
