"""``moepack bench``."""

from __future__ import annotations

from pathlib import Path

import click

from packer.commands.common import EXIT_CODES, common_options, container_directory, typed
from packer.commands.model import ModelOptions, model_options
from packer.commands.signals import interrupted_by_term
from packer.output import Output
from packer.progress import Progress, ProgressLine

# After 4, ten records a token are read for the first time where a token chooses a third of all; after 32, hardly any.
WARM_TOKENS = 32


@click.command(epilog=EXIT_CODES, short_help="Measure how fast a container runs here.")
@click.argument("container", type=typed)
@click.option("-n", "tokens", type=click.IntRange(1, 1 << 20), default=16, show_default=True, help="Tokens to measure.")
@click.option(
    "--warm",
    type=click.IntRange(0, 1 << 20),
    default=WARM_TOKENS,
    show_default=True,
    help="Tokens before the measured ones: they fill the cache.",
)
@click.option("--seed", type=click.IntRange(0, 1 << 62), default=0, show_default=True, help="Of the tokens drawn.")
@model_options
@common_options
def bench(output: Output, *, container: Path, tokens: int, warm: int, seed: int, how: ModelOptions) -> int:
    """Measure CONTAINER on this machine: reading alone, computing alone, and both together.

    The model draws its own tokens. "reading alone" is plain reads of what a cache without look-ahead misses; "at once,
    but apart" the same reads while the same is computed, neither waiting for the other; "experts through the cache" its
    reads with no arithmetic, then "the same, plainly": alike for experts of megabytes, not for small ones.

    In JSON, read_bandwidth is that of the cache with nothing else to do, compute_seconds the arithmetic with all
    experts in memory, stall_seconds what arithmetic waited for bytes.

    \b
    Examples:
      moepack bench model.moepack
      moepack bench model.moepack -n 64 --budget 8GiB --json
      moepack bench model.moepack -n 4 --warm 4         quick, and with proofs of what is read for the first time
    """
    from packer.running.bench_text import bench_document, show_bench
    from runtime.bench import bench as measure

    container = container_directory(container)
    with interrupted_by_term(), ProgressLine(output, "bench", spell=str, moving=False) as line:
        found = measure(
            container,
            how.options(),
            tokens=tokens,
            warm=warm,
            seed=seed,
            tell=output.note,
            progress=lambda done, total, what: line(Progress(done, total, what)),
        )
    for note in found.notes:
        output.note(f"note: {note}")
    if found.computing_seconds is None:
        output.note("note: computing alone was not measured, for the trunk does not fit into free memory")
    if output.json:
        output.result(bench_document(found))
    else:
        show_bench(output, found)
    return 0
