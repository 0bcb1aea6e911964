"""What ``eval``, ``run``, ``bench`` and ``verify`` share: how a model is run, and which tokens it is given."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import UsageError
from formats.spelling import counted
from packer.commands.common import typed
from packer.commands.size import parse_size
from packer.output import Output, human_bytes
from packer.running.token_input import TokenInput, read_tokens

if TYPE_CHECKING:  # commands that run no model do not load the runtime
    from runtime.opening import Options
    from runtime.session import Session
    from runtime.tokenizer import Tokenizer

MAX_CONTEXT = 1 << 24
MAX_CHUNK = 1 << 12
MAX_THREADS = 1 << 10


@dataclass(frozen=True)
class ModelOptions:
    """How a model is run, as it was typed."""

    budget: str | None
    chunk: int
    threads: int | None
    trunk: str
    no_look_ahead: bool
    no_read_ahead: bool
    no_record_check: bool

    def options(self, *, context: int | None = None, tokenizer: Tokenizer | None = None) -> Options:
        """The runtime's options.

        Args:
            context: positions that the state can hold.
            tokenizer: its memory is part of the budget.
        """
        from runtime.opening import DEFAULT_CONTEXT, Options

        return Options(
            budget=None if self.budget is None else parse_size(self.budget, where="--budget"),
            context=context or DEFAULT_CONTEXT,
            chunk=self.chunk,
            threads=self.threads,
            look_ahead=not self.no_look_ahead,
            read_ahead=not self.no_read_ahead,
            trunk=self.trunk,
            check_records=not self.no_record_check,
            reserved=0 if tokenizer is None else tokenizer.memory_bytes,
        )


def model_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options about running a model; ``function`` gets them together as ``how``."""
    return gathered(
        function,
        "how",
        ModelOptions,
        click.option("--budget", metavar="SIZE", help="Ceiling of all memory for the model, e.g. 8GiB."),
        click.option(
            "--chunk",
            type=click.IntRange(1, MAX_CHUNK),
            default=64,
            show_default=True,
            metavar="N",
            help="Tokens of a prompt that are computed together.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1, MAX_THREADS),
            metavar="N",
            help="For arithmetic; by default as many as there are processors.",
        ),
        click.option(
            "--trunk",
            type=click.Choice(("auto", "resident", "streamed")),
            default="auto",
            show_default=True,
            help="Hold all but the routed experts in memory, or read it layer by layer; auto holds it if it fits.",
        ),
        click.option("--no-look-ahead", is_flag=True, help="Do not read experts that are only likely to be chosen."),
        click.option("--no-read-ahead", is_flag=True, help="Do not read the next layer of a streamed trunk early."),
        click.option(
            "--no-record-check", is_flag=True, help="Do not compare what is read with its digest the first time."
        ),
    )


def context_option(function: Callable[..., int]) -> Callable[..., int]:
    """Add the option about the length of a conversation."""
    option: Callable[[Callable[..., int]], Callable[..., int]] = click.option(
        "--context",
        type=click.IntRange(1, MAX_CONTEXT),
        metavar="N",
        help="Tokens that the state can hold; by default as many as are asked for, or 4096.",
    )
    return option(function)


def token_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options that name tokens; ``function`` gets them together as ``tokens``."""
    return gathered(
        function,
        "tokens",
        TokenInput,
        click.option("--ids", metavar="LIST|FILE", help="Token ids: 1,2,3, or a file with such a list."),
        click.option("--ids-file", type=typed, metavar="FILE", help="A file with token ids."),
        click.option("--text", type=typed, metavar="FILE", help="A text in UTF-8; the model's own tokenizer reads it."),
        click.option(
            "--window",
            type=click.IntRange(2, MAX_CONTEXT),
            metavar="N",
            help="Read the tokens in pieces of N, each with a fresh state and, of a text, the token that begins one.",
        ),
    )


def gathered(function: Callable[..., int], name: str, kind: type, *options: Callable[[Any], Any]) -> Callable[..., int]:
    """Add options, and hand them to ``function`` as one value of the dataclass ``kind`` under ``name``."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> int:
        value = kind(**{item.name: named.pop(item.name) for item in fields(kind)})
        return function(*arguments, **{name: value}, **named)

    decorated: Callable[..., int] = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def texts_of(model: Path, tokens: TokenInput) -> tuple[list[tuple[int, ...]], Tokenizer | None]:
    """The token sequences that were asked for, each to be read with a fresh state, and the tokenizer if one was needed.

    Raises:
        UsageError: none or two kinds of input, an id out of range, an empty text.
        FormatError: no tokenizer, or a malformed one.
    """
    from runtime.assets import read_config
    from runtime.perplexity import windows
    from runtime.tokenizer import load_tokenizer

    vocabulary = read_config(model).vocab_size
    tokenizer = load_tokenizer(model, vocabulary) if tokens.text is not None else None
    ids = read_tokens(tokens, vocabulary, None if tokenizer is None else tokenizer.encode)
    begin = None if tokenizer is None else tokenizer.begin
    return windows(ids, tokens.window, begin), tokenizer


def open_model(output: Output, path: Path, options: Options) -> Session:
    """Open a model and say how its memory is divided."""
    from runtime.session import open_session

    session = open_session(path, options)
    plan = session.plan
    output.detail(
        f"memory: {human_bytes(plan.total)}, trunk {plan.trunk}, room for {counted(plan.slots, 'expert')}; "
        + ", ".join(f"{part.name} {human_bytes(part.bytes)}" for part in plan.parts)
    )
    if options.budget is None:
        output.detail("budget: chosen by what is free; --budget sets it")
    if not options.check_records:
        output.note("note: what is read is not compared with its digests")
    return session


def show_notes(output: Output, session: Session) -> None:
    """What the runtime found out about this machine, once it has read."""
    for note in session.notes:
        output.note(f"note: {note}")


def prompt_text(typed_text: str) -> str:
    """A prompt as it was typed, decoded as UTF-8 whatever the locale says.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return os.fsencode(typed_text).decode("utf-8")
    except UnicodeError:
        raise UsageError("prompt is not UTF-8", where="PROMPT") from None
