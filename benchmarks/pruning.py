"""What pruning and weighted packing do to the bundled model: ``python -m benchmarks.pruning``.

The first half of each held-out text calibrates, the second half is read; none of it was trained on. Prints two tables
for the README: perplexity against the share of experts kept, by how they were ranked and on which text, and 3-bit
containers with and without activation statistics at the same bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.calibrate.job import Job, calibrate
from packer.calibrate.model import open_for_pass, sampled_model
from packer.calibrate.texts import Sample
from packer.demonstration import Bundle, bundled
from packer.model_stamp import ModelStamp
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.prune.plan import LayerKeep, PrunePlan
from packer.prune.ranking import Wish, choose, shares
from packer.recipe.recipe import default_recipe, load_recipe
from packer.statistics.file import Statistics
from packer.statistics.types import Provenance, SampleLabel
from packer.verify.logits_parity import compare_models
from runtime.assets import read_config
from runtime.machine import processors
from runtime.opening import Options
from runtime.perplexity import Loss, loss_of, windows
from runtime.session import open_session
from runtime.tokenizer import load_tokenizer

WINDOW = 256
Scores = Mapping[int, NDArray[np.float64]]
Windows = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Texts:
    """Windows of each label: to calibrate on, and to read."""

    seen: Mapping[str, Windows]
    read: Mapping[str, Windows]


def halves(bundle: Bundle, tokens: int) -> Texts:
    """Both halves of every held-out text, at most ``tokens`` tokens of each."""
    tokenizer = load_tokenizer(bundle.checkpoint, read_config(bundle.checkpoint).vocab_size)
    seen, read = {}, {}
    for name, path in bundle.texts.items():
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))
        middle = len(ids) // 2
        full = windows(ids[:middle][:tokens], WINDOW, tokenizer.begin)
        seen[name] = [window for window in full if len(window) == WINDOW]
        read[name] = windows(ids[middle:][:tokens], WINDOW, tokenizer.begin)
    return Texts(seen, read)


def statistics_of(bundle: Bundle, seen: Mapping[str, Windows], out: Path) -> Statistics:
    """Calibrate the bundled model on the windows of these labels."""
    stamp, config = sampled_model(bundle.checkpoint)
    labels = tuple(SampleLabel(name=name, tokens=sum(map(len, parts)), texts=()) for name, parts in seen.items())
    flat = tuple(window for parts in seen.values() for window in parts)
    label_of = tuple(number for number, parts in enumerate(seen.values()) for _ in parts)
    provenance = Provenance(model=stamp, labels=labels, window=WINDOW, tool="benchmark")
    with ExitStack() as closing:
        weights, group = open_for_pass(bundle.checkpoint, config, WINDOW, Options(), closing)
        return calibrate(Job(weights, Sample(labels, flat, label_of), provenance, out, group))


def rankings(statistics: Statistics, names: Sequence[str]) -> Iterator[tuple[str, str, Scores]]:
    """(method, text it knows of, scores) of everything that is compared."""
    layers = {layer: statistics.layer(layer) for layer in statistics.layers}
    chosen = {name: [number] for number, name in enumerate(names)}
    chosen["both"] = list(range(len(names)))
    for text, numbers in chosen.items():
        yield "REAP", text, {layer: shares(found.saliency, numbers) for layer, found in layers.items()}
        yield (
            "frequency",
            text,
            {layer: shares(found.tokens.astype(np.float64), numbers) for layer, found in layers.items()},
        )
    rng = np.random.default_rng(0)
    yield "random", "-", {layer: rng.random(found.tokens.shape[1]) for layer, found in layers.items()}


def perplexities(path: Path, texts: Mapping[str, Windows]) -> dict[str, float]:
    """Of each label's windows, each read with a fresh state."""
    found = {}
    with open_session(path, Options(context=WINDOW)) as session:
        for name, parts in texts.items():
            loss = Loss()
            for window in parts:
                session.reset()
                for first, logits in session.stream(window):
                    loss += loss_of(logits, first, window)
            assert loss.perplexity is not None
            found[name] = loss.perplexity
    return found


def packed(bundle: Bundle, out: Path, *, lossless: bool, prune: PrunePlan | None, statistics: Statistics | None) -> int:
    """Pack the bundled model; the container's bytes."""
    with open_checkpoint(bundle.checkpoint) as checkpoint:
        model = bind(checkpoint)
        family = model.architecture.family
        recipe = load_recipe("kimi-k3-lossless") if lossless else default_recipe(family)
        plan = make_plan(checkpoint, model, recipe, prune=prune, statistics=statistics)
        pack(checkpoint, model, plan, out, jobs=processors())
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def compare_rankings(bundle: Bundle, texts: Texts, statistics: Statistics, folder: Path) -> None:
    """Print perplexities against experts kept."""
    stamp = statistics.provenance.model
    names = list(texts.read)
    print(f"| experts kept of {stamp.experts} | ranked by | on | {' | '.join(f'perplexity, {n}' for n in names)} |")
    print(f"|---|---|---|{'---|' * len(names)}")
    whole = perplexities(bundle.checkpoint, texts.read)
    print(f"| all | - | - | {' | '.join(f'{whole[name]:.2f}' for name in names)} |", flush=True)
    model = ModelStamp(**{name: getattr(stamp, name) for name in ModelStamp.__struct_fields__})
    for share in (0.75, 0.5, 0.375):
        keep = round(share * stamp.experts)
        wish = Wish("uniform", keep, 0, stamp.experts_per_token)
        for number, (method, text, scores) in enumerate(rankings(statistics, names)):
            layers = tuple(LayerKeep(layer, kept.experts) for layer, kept in sorted(choose(scores, wish).items()))
            out = folder / f"pruned-{keep}-{number}"
            packed(bundle, out, lossless=True, prune=PrunePlan(model, None, layers), statistics=None)
            found = perplexities(out, texts.read)
            print(f"| {keep} | {method} | {text} | {' | '.join(f'{found[n]:.2f}' for n in names)} |", flush=True)


def compare_weighting(bundle: Bundle, texts: Texts, statistics: Statistics, folder: Path) -> None:
    """Print 3-bit containers with and without statistics."""
    print("\n| 3-bit container | bytes | text | KL divergence, nats | perplexity | of the source | same first choice |")
    print("|---|---|---|---|---|---|---|")
    for name, known in (("columns alike", None), ("with --stats", statistics)):
        out = folder / f"rvq-{known is not None}"
        size = packed(bundle, out, lossless=False, prune=None, statistics=known)
        for text, parts in texts.read.items():
            options = Options(context=WINDOW)
            with open_session(bundle.checkpoint, options) as source, open_session(out, options) as container:
                found = compare_models(source, container, parts)
            print(
                f"| {name} | {size} | {text} | {found.kl_mean:.4f} | {found.container.perplexity:.3f}"
                f" | {found.source.perplexity:.3f} | {found.top1:.1%} |",
                flush=True,
            )


def main() -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of each half of each text at the most")
    wanted = parser.parse_args()
    bundle = bundled()
    texts = halves(bundle, wanted.tokens)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        statistics = statistics_of(bundle, texts.seen, folder / "statistics")
        compare_rankings(bundle, texts, statistics, folder)
        compare_weighting(bundle, texts, statistics, folder)


if __name__ == "__main__":
    main()
