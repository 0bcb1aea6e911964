"""``moepack calibrate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from formats.errors import UsageError
from formats.spelling import counted
from packer.commands.common import EXIT_CODES, common_options, typed
from packer.commands.signals import interrupted_by_term
from packer.commands.size import parse_size
from packer.output import Output, human_bytes
from packer.progress import ProgressLine
from packer.version import VERSION

if TYPE_CHECKING:
    from packer.calibrate.coverage import Coverage
    from packer.calibrate.texts import Sample

MAX_WINDOW = 1 << 16


@click.command(epilog=EXIT_CODES, short_help="Count what each expert does with sample text.")
@click.argument("source", type=typed)
@click.option("--text", "texts", multiple=True, metavar="[LABEL=]FILE[,...]", help="Sample text, by label if you like.")
@click.option("--ids", multiple=True, metavar="[LABEL=]FILE[,...]", help="The same as files of token ids.")
@click.option("--out", required=True, type=typed, metavar="STATS", help="The statistics file to write.")
@click.option(
    "--window",
    type=click.IntRange(2, MAX_WINDOW),
    default=2048,
    show_default=True,
    metavar="N",
    help="Tokens that are seen together, the one that begins a text included.",
)
@click.option("--budget", metavar="SIZE", help="Ceiling of all memory for the model, e.g. 8GiB.")
@click.option("--threads", type=click.IntRange(1, 1 << 10), metavar="N", help="For arithmetic.")
@common_options
def calibrate(
    output: Output,
    *,
    source: Path,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    out: Path,
    window: int,
    budget: str | None,
    threads: int | None,
) -> int:
    """Push sample text through SOURCE, a checkpoint or a container, one layer at a time, and count what its experts do.

    The result tells `moepack prune` which experts a workload needs, and `moepack pack --stats` which columns carry the
    activations. Memory is one layer and the tokens at work; the tokens' states lie in a folder beside the result, and
    an interrupted run goes on behind its last layer. Windows of --window tokens are seen apart; what does not fill one
    is left out.

    \b
    Examples:
      moepack calibrate checkpoint/ --text novel.txt --out novel.stats
      moepack calibrate checkpoint/ --text code=src.txt,prose=book.txt --out both.stats --budget 8GiB
    """
    from packer.calibrate.coverage import coverage_of
    from packer.calibrate.folder import check_output
    from packer.calibrate.job import Job
    from packer.calibrate.job import calibrate as count
    from packer.calibrate.model import open_for_pass, sampled_model
    from packer.statistics.types import Provenance
    from runtime.opening import Options

    check_output(out)
    if bool(texts) == bool(ids):
        raise UsageError("sample text wanted", expected="--text or --ids", found="both" if ids else "neither")
    stamp, config = sampled_model(source)
    sample, vocabulary_bytes = _sample(source, config.vocab_size, texts, ids, window)
    options = Options(
        budget=None if budget is None else parse_size(budget, where="--budget"),
        threads=threads,
        reserved=vocabulary_bytes,
    )
    provenance = Provenance(model=stamp, labels=sample.labels, window=window, tool=f"moepack {VERSION}")
    with (
        interrupted_by_term(),
        ExitStack() as closing,
        ProgressLine(output, "calibrate", spell=lambda tokens: f"{tokens} token-layers") as progress,
    ):
        weights, group = open_for_pass(source, config, window, options, closing)
        output.detail(f"memory: {human_bytes(weights.plan.total)}, {counted(group, 'token')} through a layer's experts")
        statistics = count(
            Job(weights, sample, provenance, out, group),
            progress=progress,
            resumed=lambda layers: output.note(f"continued: {counted(layers, 'layer')} done before"),
        )
    coverage = coverage_of(statistics)
    if output.json:
        output.result(
            {
                "statistics": str(out),
                "blake3": statistics.blake3,
                "window": window,
                "coverage": [item.to_dict() for item in coverage],
            }
        )
    else:
        _print(output, coverage, out)
    return 0


def _sample(source: Path, vocabulary: int, texts: Sequence[str], ids: Sequence[str], window: int) -> tuple[Sample, int]:
    """The windows, and what the vocabulary takes in memory."""
    from packer.calibrate.texts import make_sample, parse_sources
    from packer.running.token_input import parse_ids
    from runtime.tokenizer import load_tokenizer

    if ids:

        def listed(text: str) -> list[int]:
            return parse_ids(text, vocabulary, where="--ids")

        sources = parse_sources(ids, where="--ids")
        return make_sample(sources, encode=listed, window=window, begin=None, where="--ids"), 0
    tokenizer = load_tokenizer(source, vocabulary)
    encode: Callable[[str], Sequence[int]] = tokenizer.encode
    sources = parse_sources(texts, where="--text")
    sample = make_sample(sources, encode=encode, window=window, begin=tokenizer.begin, where="--text")
    return sample, tokenizer.memory_bytes


def _print(output: Output, coverage: Sequence[Coverage], out: Path) -> None:
    rows = [
        (
            "all texts" if item.label is None else item.label,
            item.tokens,
            f"{item.never} of {item.experts}",
            item.hardly,
            ", ".join(f"{layer} ({never})" for layer, never in item.worst) or "-",
        )
        for item in coverage
    ]
    columns = ("text", ">tokens", ">never routed", ">hardly (1-15)", "layers with most never routed")
    output.table("experts by how often they were routed", columns, rows)
    if any(item.never for item in coverage):
        output.hint("an expert that no text needs would be dropped first: what the text lacks is what will be lost")
    output.line(f"statistics  {out}")
