"""Evaluating a model on given tokens: logits, losses, and what the layers hand on, saved as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from formats.families import TextConfig
from packer.progress import Progress
from packer.running.logits_file import LogitsFile, Table, new_logits_file
from runtime.models.observer import Observer
from runtime.perplexity import Loss, loss_of
from runtime.sampling import top

SHOWN = 5

Report = Callable[[Progress], None]
Single = NDArray[np.float32]


class EvaluatedModel(Protocol):
    """What evaluating needs of a session."""

    config: TextConfig

    def reset(self) -> None:
        """Forget all tokens."""

    def stream(self, ids: Sequence[int], *, observer: Observer | None = None) -> Iterator[tuple[int, Single]]:
        """(first position, logits [t, vocab]) chunk by chunk."""


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        tokens: given, in all texts.
        loss: of the tokens that were foreseen.
        top: the largest logits of the last position with their ids, descending.
    """

    tokens: int
    loss: Loss
    top: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return {
            "tokens": self.tokens,
            "predicted_tokens": self.loss.tokens,
            "loss": self.loss.mean,
            "perplexity": self.loss.perplexity,
            "top": [{"id": token, "logit": logit} for token, logit in self.top],
        }


def evaluate(
    model: EvaluatedModel,
    texts: Sequence[Sequence[int]],
    *,
    save: Path | None = None,
    layers: bool = False,
    progress: Report | None = None,
) -> Evaluation:
    """Run a model over texts, each with a fresh state. Of logits, only those of a chunk are held.

    Args:
        model: an open session.
        texts: ids, at least one text and one id in each.
        save: a new safetensors file for ``input_ids`` and ``logits``, a row a token.
        layers: save as well, for each layer L, ``layer.L.output`` and, where it has routed experts, the chosen ones
            (``layer.L.topk_idx``, ascending) and their weights (``layer.L.topk_weight``).
        progress: told how many tokens are done.

    Raises:
        UsageError: the file is there already.
        FormatError: weights are damaged.
    """
    if save is None:
        return _evaluate(model, texts, None, layers, progress)
    count = sum(map(len, texts))
    with new_logits_file(save, _tables(model.config, count, layers)) as file:
        row = 0
        for ids in texts:
            file.write("input_ids", row, np.asarray(ids, np.int64))
            row += len(ids)
        return _evaluate(model, texts, file, layers, progress)


def _evaluate(
    model: EvaluatedModel,
    texts: Sequence[Sequence[int]],
    file: LogitsFile | None,
    layers: bool,
    progress: Report | None,
) -> Evaluation:
    loss = Loss()
    total, row = sum(map(len, texts)), 0
    last: Single | None = None
    for number, ids in enumerate(texts):
        if number:
            model.reset()
        observer = _Saver(file, row) if file is not None and layers else None
        for first, logits in model.stream(ids, observer=observer):
            if file is not None:
                file.write("logits", row + first, logits)
            loss += loss_of(logits, first, ids)
            last = logits[-1].copy()
            if progress is not None:
                progress(Progress(row + first + len(logits), total, "tokens"))
        row += len(ids)
    assert last is not None  # there is at least one token
    return Evaluation(total, loss, tuple(top(last, SHOWN)))


def _tables(config: TextConfig, count: int, layers: bool) -> list[Table]:
    tables = [Table("input_ids", "I64", (count,)), Table("logits", "F32", (count, config.vocab_size))]
    for layer in range(config.hidden_layers if layers else 0):
        tables.append(Table(f"layer.{layer}.output", "F32", (count, config.hidden_size)))
        if layer in config.moe_layers:
            tables.append(Table(f"layer.{layer}.topk_idx", "I64", (count, config.experts_per_token)))
            tables.append(Table(f"layer.{layer}.topk_weight", "F32", (count, config.experts_per_token)))
    return tables


@dataclass(frozen=True)
class _Saver(Observer):
    """Writes what the layers hand on; ``row`` is where the present text begins."""

    file: LogitsFile
    row: int

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        self.file.write(f"layer.{layer}.output", self.row + first, values)

    def routes(self, layer: int, first: int, chosen: NDArray[np.int64], weights: Single) -> None:
        self.file.write(f"layer.{layer}.topk_idx", self.row + first, chosen)
        self.file.write(f"layer.{layer}.topk_weight", self.row + first, weights)
