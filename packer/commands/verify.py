"""``moepack verify``."""

from __future__ import annotations

from pathlib import Path

import click

from formats.errors import UsageError
from packer.commands.common import EXIT_CODES, common_options, container_directory, jobs_option, source_directory, typed
from packer.commands.model import texts_of, token_options
from packer.commands.signals import interrupted_by_term
from packer.commands.size import parse_share, parse_size
from packer.output import Output
from packer.progress import ProgressLine
from packer.report.plots import check_plots
from packer.running.token_input import TokenInput
from packer.storage.new_file import check_free
from packer.verify.report import VerifyReport
from packer.verify.text import show_report
from packer.verify.verify import LEVELS, LOGITS
from packer.verify.verify import verify as verify_container
from runtime.machine import processors


@click.command(epilog=EXIT_CODES, short_help="Prove that a container is whole and undamaged.")
@click.argument("container", type=typed)
@click.option("--source", metavar="DIR", type=typed, help="The checkpoint directory, for levels parity and logits.")
@click.option(
    "--level",
    type=click.Choice((*LEVELS, LOGITS)),
    help="By default hashes, parity if a source is given, and logits if text or a limit of them is.",
)
@click.option(
    "--sample",
    metavar="P",
    help="Look at this share of the records only, e.g. 0.01 or 1%; at one of each layer at the least.",
)
@click.option("--max-kl", type=float, metavar="X", help="At level logits: the most mean KL divergence, in nats.")
@click.option("--budget", metavar="SIZE", help="At level logits: ceiling of all memory for both models, e.g. 8GiB.")
@click.option("--html", metavar="F", type=typed, help="Write a page with plots of errors as well.")
@token_options
@jobs_option("Threads")
@common_options
def verify(
    output: Output,
    *,
    container: Path,
    source: Path | None,
    level: str | None,
    sample: str | None,
    max_kl: float | None,
    budget: str | None,
    html: Path | None,
    tokens: TokenInput,
    jobs: int | None,
) -> int:
    """Prove that CONTAINER is whole, undamaged and, given its source, what the source says.

    \b
    Levels, each includes the one before:
      structure  files, headers, padding, counts, error limits
      hashes     every byte against its digest
      parity     every source tensor against the container
      logits     both models on the same tokens: KL divergence, agreement, perplexity, differences by layer

    Damage that can be listed is a failed check: exit code 1, and each problem is named. Exit code 3 means that nothing
    could be checked: the container is too damaged to be opened, or the source is no sound checkpoint.

    \b
    Examples:
      moepack verify model.moepack
      moepack verify model.moepack --source checkpoint/ --html report.html
      moepack verify model.moepack --level structure --json
      moepack verify model.moepack --level logits --source checkpoint/ --text novel.txt --max-kl 0.05
    """
    share = None if sample is None else parse_share(sample, where="--sample")
    level = level or (LOGITS if tokens.options or max_kl is not None else "parity" if source is not None else "hashes")
    container = container_directory(container)
    if level != LOGITS:
        unused_source = None if level == "parity" else source
        options = {"--source": unused_source, "--budget": budget, "--max-kl": max_kl}
        given = [option for option, value in options.items() if value is not None]
        for option in (*given, *tokens.options):
            output.note(f"note: {option} is not used at level {level}")
    source = None if source is None else source_directory(source)
    if html is not None:  # what would go wrong only at the end
        check_free(html)
        check_plots()
    if level == LOGITS:
        report = _logits(output, container, source, tokens, max_kl, budget, share, jobs or processors())
    else:
        with ProgressLine(output, "verify") as progress:
            report = verify_container(
                container,
                level=level,
                source=source if level == "parity" else None,
                sample=share,
                jobs=jobs or processors(),
                progress=progress,
            )
    if output.json:
        output.result(report.to_dict())
    else:
        show_report(output, report)
    if html is not None:
        from packer.report.verify_page import write_verify_page

        with interrupted_by_term():
            write_verify_page(html, container, report)
    return 0 if report.ok else 1


def _logits(
    output: Output,
    container: Path,
    source: Path | None,
    tokens: TokenInput,
    max_kl: float | None,
    budget: str | None,
    sample: float | None,
    jobs: int,
) -> VerifyReport:
    from packer.verify.logits import verify_logits
    from runtime.opening import Options

    if source is None:
        raise UsageError("level logits compares with a source, and none is given", hint="add --source SOURCE")
    size = None if budget is None else parse_size(budget, where="--budget")
    texts, _ = texts_of(container, tokens)
    options = Options(budget=size, context=max(map(len, texts)), threads=jobs)
    with (
        interrupted_by_term(),
        ProgressLine(output, "verify") as progress,
        ProgressLine(output, "logits", spell=str) as token_progress,
    ):
        report = verify_logits(
            container,
            source,
            texts,
            options,
            max_kl=max_kl,
            sample=sample,
            jobs=jobs,
            progress=progress,
            token_progress=token_progress,
        )
    if report.logits is None:
        output.note("logits were not compared: what was found before would explain them")
    return report
