"""Level ``logits``: every check of the bytes first, then both models on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import UsageError
from packer.progress import Progress
from packer.verify.findings import Problem
from packer.verify.report import VerifyReport
from packer.verify.verify import LOGITS, verify

if TYPE_CHECKING:
    from runtime.opening import Options

HELD_BYTES = 64 << 20  # of the source's layers, for one chunk

Report = Callable[[Progress], None]


def verify_logits(
    container: Path,
    source: Path,
    texts: Sequence[Sequence[int]],
    options: Options,
    *,
    max_kl: float | None = None,
    sample: float | None = None,
    jobs: int = 1,
    progress: Report | None = None,
    token_progress: Report | None = None,
) -> VerifyReport:
    """Verify a container up to its logits. Problems at a level before end it there: they explain themselves.

    Args:
        container: its directory.
        source: the checkpoint directory.
        texts: token ids, each text read with a fresh state.
        options: for each of the two models; ``budget`` is for both together.
        max_kl: a mean KL divergence above it, in nats, is a problem.
        sample, jobs, progress: as of :func:`packer.verify.verify.verify`.
        token_progress: told how many tokens are done.

    Raises:
        UsageError: a negative limit; a budget that is too small; an id out of range.
        FormatError: the container or the source cannot be opened, or the container is partial.
    """
    from packer.verify.logits_parity import compare_models
    from runtime.assets import read_config
    from runtime.session import open_session

    if max_kl is not None and not max_kl >= 0:
        raise UsageError("limit is negative or no number", where="--max-kl", found=max_kl)
    report = verify(container, level="parity", source=source, sample=sample, jobs=jobs, progress=progress)
    if not report.ok:
        return report
    config = read_config(container)
    row = 4 * config.hidden_layers * config.hidden_size
    chunk = max(1, min(options.chunk, HELD_BYTES // row))
    options = replace(options, models=2, chunk=chunk)
    with open_session(source, options) as theirs, open_session(container, options) as ours:
        found = compare_models(theirs, ours, texts, token_progress)
    problems = report.problems
    if max_kl is not None and found.kl_mean > max_kl:
        what = f"mean KL divergence is above the limit (expected at most {max_kl:g}, found {found.kl_mean:.6g})"
        problems = (*problems, Problem(LOGITS, what))
    return replace(report, level=LOGITS, problems=problems, logits=found)
