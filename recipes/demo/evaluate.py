"""Perplexity of held-out text: ``python -m recipes.demo.evaluate``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from recipes.demo import bpe, release, shape
from recipes.demo.model import Model

_BATCH = 16  # windows
_STEP = shape.WINDOW - 1  # tokens a window, after its BOS


@dataclass(frozen=True)
class Score:
    """How well a text is predicted.

    Attributes:
        tokens, size: of the text; size in bytes.
        nats: negative log-likelihood of the whole text.
    """

    tokens: int
    size: int
    nats: float

    def __str__(self) -> str:
        loss = self.nats / self.tokens
        per_byte = self.nats / self.size
        return (
            f"loss {loss:.4f} nats a token, perplexity {math.exp(loss):.2f} a token and {math.exp(per_byte):.3f} "
            f"a byte ({per_byte / math.log(2):.3f} bits a byte), {self.tokens} tokens, {self.size} bytes"
        )


@torch.inference_mode()
def score(model: Model, tokenizer: bpe.Tokenizer, text: str) -> Score:
    """Predict every token of ``text`` once: it is cut into windows, each read after a BOS with a fresh state.

    ``moepack eval --text FILE --window 256`` measures the same.

    Args:
        model: in any dtype.
        tokenizer: the model's.
        text: encoded without special tokens.
    """
    ids = torch.tensor(tokenizer.encode([text])[0])
    targets = functional.pad(ids, (0, -len(ids) % _STEP), value=-1).view(-1, _STEP)
    inputs = functional.pad(targets[:, :-1].clamp(min=0), (1, 0), value=bpe.BOS)
    nats = 0.0
    for batch, expected in zip(inputs.split(_BATCH), targets.split(_BATCH), strict=True):
        logits = model(batch).float().flatten(0, 1)
        nats += float(functional.cross_entropy(logits, expected.flatten(), ignore_index=-1, reduction="sum"))
    return Score(len(ids), len(text.encode()), nats)


def main() -> None:
    """Score the shipped checkpoint on the shipped texts."""
    folder = Path(__file__).parent
    model, tokenizer = release.read(folder / "checkpoint"), bpe.read_tokenizer(folder / "checkpoint" / "tiktoken.model")
    for name in ("code", "prose"):
        print(f"{name}: {score(model, tokenizer, (folder / 'heldout' / f'{name}.txt').read_text(encoding='utf-8'))}")


if __name__ == "__main__":
    main()
