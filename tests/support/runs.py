"""Running a model and keeping all that the runtime shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.session import Observer, Options, open_session

Single = NDArray[np.float32]

# Agreement with the released code's goldens and with the float64 pass: logits are of the order of 5, their spread is 1.
TOLERANCE = 5e-4


@dataclass
class Recorder(Observer):
    """Keeps what is shown of layers and routes, and insists that positions come without gap or repetition."""

    outputs: dict[int, list[Single]] = field(default_factory=dict)
    chosen: dict[int, list[NDArray[np.int64]]] = field(default_factory=dict)
    weights: dict[int, list[Single]] = field(default_factory=dict)

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        """As :class:`Observer` says."""
        _append(self.outputs, layer, first, values)

    def routes(self, layer: int, first: int, chosen: NDArray[np.int64], weights: Single) -> None:
        """As :class:`Observer` says."""
        _append(self.chosen, layer, first, chosen)
        _append(self.weights, layer, first, weights)


def _append(kept: dict[int, list[Any]], layer: int, first: int, values: NDArray[Any]) -> None:
    parts = kept.setdefault(layer, [])
    assert sum(map(len, parts)) == first
    parts.append(values.copy())


@dataclass(frozen=True)
class Run:
    """What one pass over some ids gave: logits [tokens, vocab], and by layer what an observer saw of all tokens."""

    logits: Single
    outputs: dict[int, Single]
    chosen: dict[int, NDArray[np.int64]]
    weights: dict[int, Single]

    def bits(self) -> dict[str, bytes]:
        """Everything as bytes, to be compared with another run's."""
        parts: dict[str, NDArray[Any]] = {"logits": self.logits}
        for name, values in (("output", self.outputs), ("chosen", self.chosen), ("weights", self.weights)):
            parts |= {f"{name} of layer {layer}": array for layer, array in values.items()}
        return {name: array.tobytes() for name, array in parts.items()}


def run(path: Path, ids: Sequence[int], **options: Any) -> Run:
    """Feed ``ids`` to the model at ``path``, a container or a checkpoint, with ``Options(**options)``."""
    recorder = Recorder()
    logits: list[Single] = []
    with open_session(path, Options(**options)) as session:
        for first, values in session.stream(ids, observer=recorder):
            assert first == sum(map(len, logits))
            assert values.dtype == np.float32
            logits.append(values.copy())
        assert session.position == len(ids)
    return Run(
        np.concatenate(logits),
        *({layer: np.concatenate(parts) for layer, parts in kept.items()} for kept in _kept(recorder)),
    )


def _kept(recorder: Recorder) -> tuple[dict[int, list[Any]], ...]:
    return recorder.outputs, recorder.chosen, recorder.weights


def continuation(path: Path, ids: Sequence[int], count: int, **options: Any) -> tuple[list[int], Single]:
    """``count`` greedy tokens after ``ids``, one at a time, and the logits [count, vocab] after each of them."""
    tokens: list[int] = []
    logits: list[Single] = []
    with open_session(path, Options(**options)) as session:
        latest = session.feed(ids)
        for _ in range(count):
            tokens.append(int(latest.argmax()))
            latest = session.feed(tokens[-1:])
            logits.append(latest.copy())
    return tokens, np.stack(logits)
