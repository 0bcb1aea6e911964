"""A stand-in for a session, whose logits follow from the last token by a rule that a test can work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class FakeModel:
    """Predicts ``follow[last token]``, or the token after it, with a logit of 1; all others have 0."""

    vocabulary: int = 300
    context: int = 64
    follow: dict[int, int] = field(default_factory=dict)
    fed: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return len(self.fed)

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last id."""
        self.fed += ids
        logits = np.zeros(self.vocabulary, np.float32)
        logits[self.follow.get(ids[-1], (ids[-1] + 1) % self.vocabulary)] = 1.0
        return logits
