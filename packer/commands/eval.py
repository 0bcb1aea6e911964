"""``moepack eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from formats.errors import UsageError
from formats.spelling import counted
from packer.commands.common import EXIT_CODES, common_options, typed
from packer.commands.model import (
    ModelOptions,
    context_option,
    model_options,
    open_model,
    show_notes,
    texts_of,
    token_options,
)
from packer.commands.signals import interrupted_by_term
from packer.output import Output, human_number
from packer.progress import ProgressLine
from packer.running.token_input import TokenInput

if TYPE_CHECKING:
    from packer.running.logits import Evaluation
    from runtime.tokenizer import Tokenizer


@click.command("eval", epilog=EXIT_CODES, short_help="Compute a model's logits of given tokens.")
@click.argument("model", type=typed)
@token_options
@click.option("--save-logits", type=typed, metavar="F", help="A new safetensors file for input_ids and logits.")
@click.option("--layers", is_flag=True, help="Save what every layer hands on, and the experts it chose, as well.")
@context_option
@model_options
@common_options
def evaluate(
    output: Output,
    *,
    model: Path,
    tokens: TokenInput,
    save_logits: Path | None,
    layers: bool,
    context: int | None,
    how: ModelOptions,
) -> int:
    """Compute the logits of MODEL, a container or a checkpoint, after each of the given tokens.

    Shows the likeliest next tokens, and the perplexity where there are two tokens or more. The file has logits
    [tokens, vocabulary] and, with --layers, layer.L.output [tokens, width], layer.L.topk_idx and layer.L.topk_weight.
    None of the options about memory, threads and reading changes a bit of the result.

    \b
    Examples:
      moepack eval model.moepack --ids 1,2,3 --save-logits logits.safetensors
      moepack eval checkpoint/ --ids-file ids.txt --layers --save-logits all.safetensors
      moepack eval model.moepack --text novel.txt --budget 8GiB
    """
    from packer.running.logits import evaluate as evaluate_model
    from packer.storage.new_file import check_free

    if layers and save_logits is None:
        raise UsageError("there is no file to save layers in", where="--layers", hint="add --save-logits F")
    if save_logits is not None:
        check_free(save_logits)
    texts, tokenizer = texts_of(model, tokens)
    options = how.options(context=context or max(map(len, texts)), tokenizer=tokenizer)
    with (
        interrupted_by_term(),
        open_model(output, model, options) as session,
        ProgressLine(output, "eval", spell=str) as progress,
    ):
        found = evaluate_model(session, texts, save=save_logits, layers=layers, progress=progress)
        show_notes(output, session)
        container_id = session.container_id
    if output.json:
        saved = None if save_logits is None else str(save_logits)
        output.result({"container_id": container_id, **found.to_dict(), "texts": len(texts), "saved": saved})
    else:
        _print(output, found, len(texts), tokenizer, save_logits)
    return 0


def _print(output: Output, found: Evaluation, texts: int, tokenizer: Tokenizer | None, saved: Path | None) -> None:
    pieces = "" if texts == 1 else f" in {counted(texts, 'piece')}"
    output.line(f"tokens       {found.tokens}{pieces}")
    if found.loss.tokens:
        loss = human_number(found.loss.mean, 5)
        output.line(f"perplexity   {human_number(found.loss.perplexity, 5)} ({loss} nats a token)")
    rows = [
        (token, f"{logit:.4f}", *(() if tokenizer is None else (repr(tokenizer.decode([token])),)))
        for token, logit in found.top
    ]
    output.table("", ("next token", ">logit", *(() if tokenizer is None else ("text",))), rows)
    if saved is not None:
        output.line(f"saved        {saved}")
