"""Train the demo model: ``python -m recipes.demo.train --out DIR [--minutes 40]``.

The learning rate falls with the time that is left, so that a run of any length on any machine ends with its schedule;
the number of steps depends on the machine, and with it the result. Data, order and initial weights do not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from recipes.demo import bpe, corpus, evaluate, fused, optimizer, release, shape
from recipes.demo.model import Model, initialize

SEED = 1
THREADS = 2  # each with its part of every batch; no operation is split
BATCH = 8  # windows a step
RATE = 4e-3
DECAY = 0.1  # of weights
WARM_UP = 20  # steps
BIAS_RATE = 2e-2  # of the routers' balance; it falls with the learning rate
_SAVE_EVERY = 300.0  # seconds
_REPORT_EVERY = 10  # steps


def batches(stream: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless [BATCH, WINDOW + 1]: each round of the stream is cut anew, from a random offset, and shuffled."""
    while True:
        offset = int(torch.randint(shape.WINDOW, (1,), generator=generator))
        starts = torch.arange(offset, len(stream) - shape.WINDOW, shape.WINDOW)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts[: len(starts) // BATCH * BATCH].view(-1, BATCH):
            yield stream[chosen.unsqueeze(1) + torch.arange(shape.WINDOW + 1)]


def differentiate(model: Model, batch: Tensor, pool: Executor) -> tuple[float, tuple[Tensor | None, ...]]:
    """Loss and gradients of a batch [windows, WINDOW + 1], each thread with an equal part of it."""
    weights = tuple(model.parameters())

    def part(windows: Tensor) -> tuple[float, tuple[Tensor | None, ...]]:
        loss = fused.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        return loss.item(), torch.autograd.grad(loss / THREADS, weights, allow_unused=True)

    losses, gradients = zip(*pool.map(part, batch.chunk(THREADS)), strict=True)
    summed = (None if parts[0] is None else sum(parts) for parts in zip(*gradients, strict=True))
    return sum(losses) / THREADS, tuple(summed)


def train(model: Model, stream: Tensor, tokenizer: bpe.Tokenizer, out: Path, seconds: float) -> None:
    """Train for ``seconds``, write ``out/checkpoint`` every few minutes and at the end.

    Args:
        model: in bfloat16.
        stream: int64 token ids of all documents.
        tokenizer: written along.
        out: a directory.
        seconds: of wall time.
    """
    generator = torch.Generator().manual_seed(SEED)
    initialize(model, generator)
    slots = optimizer.prepare(model.train())
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_flush_denormal, initargs=(True,))
    every = batches(stream, generator)
    with ThreadPoolExecutor(1) as one:  # compiles, which must not happen in two threads at once
        differentiate(model, next(every), one)
    for router in model.routers():
        router.loads.clear()
    losses = list[float]()
    start = saved = time.monotonic()
    for number, batch in enumerate(every, 1):
        spent = (time.monotonic() - start) / seconds
        if spent >= 1:
            break
        loss, gradients = differentiate(model, batch, pool)
        losses.append(loss)
        rate = RATE * min(1.0, number / WARM_UP, 1 - spent)
        norm = optimizer.step(slots, gradients, number, rate, DECAY, pool)
        excess = max(router.balance(BIAS_RATE * rate / RATE) for router in model.routers())
        if number % _REPORT_EVERY == 0:
            mean = sum(losses[-_REPORT_EVERY:]) / _REPORT_EVERY
            print(
                f"step {number} tokens {number * BATCH * shape.WINDOW} time {spent * seconds:.0f} s loss {mean:.4f} "
                f"rate {rate:.2e} norm {norm:.2f} load {excess:.2f}",
                flush=True,
            )
        if time.monotonic() - saved > _SAVE_EVERY:
            release.write(model, tokenizer, out / "checkpoint")
            saved = time.monotonic()
    release.write(model, tokenizer, out / "checkpoint")


def main() -> None:
    """Collect the text, train tokenizer and model, and score the result on the held-out text."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.train", description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory for checkpoint/ and heldout/")
    parser.add_argument("--minutes", type=float, default=40.0, help="wall time of the training itself (default: 40)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    torch.set_num_threads(1)
    text = corpus.collect()
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    held = {
        name: "".join(d.text for d in documents) for name, documents in (("code", text.code), ("prose", text.prose))
    }
    for name, content in held.items():
        (out / "heldout" / f"{name}.txt").write_text(content, encoding="utf-8")
    tokenizer = bpe.train(document.text for document in text.documents)
    encoded = tokenizer.encode(document.text for document in text.documents)
    stream = torch.tensor([token for ids in encoded for token in (bpe.BOS, *ids, bpe.EOS)])
    model = Model(shape.text_config(shape.CONFIG), torch.bfloat16)
    print(f"{len(stream)} tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, stream, tokenizer, out, arguments.minutes * 60)
    stored = release.read(out / "checkpoint")
    for name, content in held.items():
        print(f"{name}: {evaluate.score(stored, tokenizer, content)}", flush=True)


if __name__ == "__main__":
    main()
