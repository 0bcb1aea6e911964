"""``moepack run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from formats.errors import UsageError
from packer.commands.common import EXIT_CODES, common_options, typed, typed_path
from packer.commands.model import (
    ModelOptions,
    context_option,
    gathered,
    model_options,
    open_model,
    prompt_text,
    show_notes,
)
from packer.commands.signals import interrupted_by_term
from packer.output import Output, is_terminal
from packer.running.writing_options import WritingOptions
from runtime.assets import is_container


def writing_options(function: Any) -> Any:
    """Add the options about what is written; ``function`` gets them together as ``writing``."""
    return gathered(
        function,
        "writing",
        WritingOptions,
        click.option("-n", "count", type=click.IntRange(min=0), default=64, show_default=True, help="Tokens, at most."),
        click.option("--temperature", type=float, default=0.8, show_default=True, help="0 (the likeliest) to 100."),
        click.option("--top-p", type=float, default=0.95, show_default=True, help="Draw from the top share, up to 1."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn, 0 or more."),
        click.option("--stop", "stops", multiple=True, metavar="S", help="End before this text; may be given again."),
    )


MAX_LINE_BYTES = 16 << 20


@click.command(epilog=EXIT_CODES, short_help="Let a model go on from a prompt.")
@click.argument("container", type=typed)
@click.argument("prompt", required=False)
@click.option("--ids", metavar="LIST", help="Token ids in place of a prompt.")
@click.option("--interactive", is_flag=True, help="Read prompts from stdin, a line each, and remember them.")
@writing_options
@context_option
@model_options
@common_options
def run(
    output: Output,
    *,
    container: Path,
    prompt: str | None,
    ids: str | None,
    interactive: bool,
    writing: WritingOptions,
    context: int | None,
    how: ModelOptions,
) -> int:
    """Let the model in CONTAINER go on from PROMPT. The text appears token by token.

    The same prompt, options and seed give the same text, whatever the budget, threads and reading are. --ids takes the
    place of a prompt where markers are needed that no text can spell, or where a model has no tokenizer; such a model
    answers with ids. CONTAINER may be a checkpoint as well. -v shows special tokens by their names.

    \b
    Examples:
      moepack run model.moepack "def fibonacci(n):" -n 100
      moepack run model.moepack "Once" --temperature 0 --budget 8GiB
      moepack run model.moepack --interactive --stop $'\\n\\n'
    """
    from packer.running.writing import make_writer

    if sum((prompt is not None, ids is not None, interactive)) != 1:
        raise UsageError(
            "one prompt wanted",
            expected="PROMPT, --ids or --interactive, and one of them only",
            hint=f'moepack run {typed_path(container)} "Once upon a time", or --interactive for prompts from stdin',
        )
    if prompt is not None and not os.path.lexists(container) and is_container(Path(prompt)):
        raise UsageError("the container comes first, then the prompt", where=prompt, expected="run CONTAINER PROMPT")
    if interactive and output.json:
        raise UsageError("--json prints one object, for one prompt", where="--interactive")
    text = None if prompt is None else prompt_text(prompt)
    writer = make_writer(container, writing, text=text, ids=ids, special=output.verbose)
    if writing.count == 0 and not interactive:  # nothing to compute, nothing to open
        _finish(output, writer.document())
        return 0
    needed = None if interactive else writer.needed
    options = how.options(context=context or needed, tokenizer=writer.tokenizer)
    with interrupted_by_term(), open_model(output, container, options) as session:
        begun = False  # a line of text that has not ended
        try:
            for line in _lines(output) if interactive else (None,):
                for piece in writer.write(session, line):
                    if not output.json:
                        output.text(piece)
                        begun = True
                if not output.json:
                    output.line()
                    begun = False
        finally:
            if begun:
                output.line()
            show_notes(output, session)
            if writer.has_written and not output.quiet:
                output.note(writer.summary(session.statistics()))
        _finish(output, writer.document(session))
    return 0


def _finish(output: Output, document: dict[str, Any]) -> None:
    if output.json:
        output.result(document)


def _lines(output: Output) -> Iterator[str]:
    """Prompts from stdin without their line ends; blank ones are passed over."""
    watched = is_terminal(sys.stdin)
    while True:
        if watched and not output.quiet:
            output.ask("> ")
        line = sys.stdin.buffer.readline(MAX_LINE_BYTES + 1)
        if not line:
            if watched and not output.quiet:
                output.note("")  # what follows does not stand behind the question
            return
        if len(line) > MAX_LINE_BYTES:
            raise UsageError("prompt is too long", where="stdin", expected=f"at most {MAX_LINE_BYTES} bytes a line")
        try:
            text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            if not watched:
                raise UsageError("prompt is not UTF-8", where="stdin") from None
            output.note("prompt is not UTF-8: what was typed is left out")
            continue
        if text.strip():
            yield text
