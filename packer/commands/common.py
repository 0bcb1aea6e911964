"""What all commands share: their common options, and paths as they are typed."""

from __future__ import annotations

import functools
import os
import platform
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import click
import numpy as np

from formats.errors import UsageError
from packer.commands.errors import guarded
from packer.output import make_output
from packer.version import VERSION

EXIT_CODES = """\b
Exit codes:
  0    done
  1    a check failed
  2    wrong usage
  3    bad or corrupt input
  4    trouble with the environment (disk, memory, lock)
  130  interrupted; the same command starts again where that makes sense
"""


def typed(text: str) -> Path:
    """A path as it was typed; the empty string, which would mean the current folder, is refused."""
    if not text:
        raise click.BadParameter("the path is empty")
    return Path(text)


def common_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add --json, --quiet, --verbose and --no-color, and call ``function`` with an :class:`Output` of them first."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document; sizes are in bytes.")
    @click.option("-q", "--quiet", is_flag=True, help="No notes, hints or progress.")
    @click.option("-v", "--verbose", is_flag=True, help="More details; tracebacks of internal errors.")
    @click.option("--no-color", is_flag=True, help="No colours (as with the variable NO_COLOR).")
    @functools.wraps(function)
    def wrapper(*, as_json: bool, quiet: bool, verbose: bool, no_color: bool, **arguments: Any) -> int:
        output = make_output(json=as_json, quiet=quiet, verbose=verbose, color=not no_color)
        output.detail(
            f"moepack {VERSION}, Python {platform.python_version()}, numpy {np.__version__},"
            f" BLAKE3 {blake3.__version__}, kernels: numpy"
        )
        arguments_typed = click.get_current_context().obj or ()
        return guarded(output, lambda: function(output, **arguments), arguments_typed)

    return wrapper


def jobs_option(what: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The option --jobs; ``what`` says what they do."""
    return click.option(
        "-j",
        "--jobs",
        type=click.IntRange(min=1),
        default=None,
        help=f"{what}; by default as many as there are processors.",
    )


def source_directory(source: Path) -> Path:
    """``source`` if it is a directory.

    Raises:
        UsageError: it is not; a repository's name gets a message of its own.
    """
    if source.is_dir():
        return source
    if os.path.lexists(source):
        raise UsageError(
            "source is not a directory", where=source, hint="give the checkpoint's folder, with its config.json"
        )
    repository = len(source.parts) == 2 and not source.is_absolute() and not source.parts[0].startswith(".")
    hint = (
        "this version does not download: fetch the repository first and give its local folder" if repository else None
    )
    raise UsageError("no such directory", where=source, expected="a local checkpoint directory", hint=hint)


def typed_path(path: Path) -> str:
    """A path as it can be typed into a shell, and is not taken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
