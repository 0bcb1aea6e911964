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

from formats import kernels
from formats.checkpoint import CONFIG_NAME
from formats.errors import FormatError, UsageError
from formats.manifest import FILE_NAME, WORK_DIR
from packer.commands.errors import guarded
from packer.output import make_output
from packer.planning.plan_types import MAX_JOBS
from packer.version import VERSION

EXIT_CODES = """\b
Exit codes:
  0    done
  1    a check failed
  2    wrong usage
  3    bad or corrupt input
  4    trouble with the environment (disk, memory, lock, network)
  130  interrupted; the same command starts again where that makes sense
"""


def typed(text: str) -> Path:
    """A path as it was typed; the empty string, which would mean the current folder, is refused."""
    if not text:
        raise click.BadParameter("the path is empty")
    return Path(text)


def typed_source(text: str) -> Path:
    """A folder or a repository as it was typed; with ``./`` before or ``/`` behind its name only a folder is meant."""
    path = typed(text)
    folder = text.startswith(f".{os.sep}") or text.endswith(os.sep)
    return path.absolute() if folder and not os.path.lexists(path) else path


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
            f" BLAKE3 {blake3.__version__}"
        )
        arguments_typed = click.get_current_context().obj or ()

        def action() -> int:
            chosen = kernels.selection()
            output.detail(f"kernels: {chosen.name} ({chosen.reason})")
            return function(output, **arguments)

        return guarded(output, action, arguments_typed)

    return wrapper


def jobs_option(what: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The option --jobs; ``what`` says what they do."""
    return click.option(
        "-j",
        "--jobs",
        metavar="N",
        type=click.IntRange(1, MAX_JOBS),
        default=None,
        help=f"{what}; by default as many as there are processors.",
    )


def source_directory(source: Path) -> Path:
    """``source`` if it is a directory.

    Raises:
        UsageError: it is not; a repository's name gets a message of its own.
        FormatError: it is a container.
    """
    if source.is_dir():
        if (source / FILE_NAME).is_file() and not (source / CONFIG_NAME).exists():
            raise FormatError(
                "this is a container, not a checkpoint", where=source, hint=f"moepack inspect {typed_path(source)}"
            )
        return source
    if os.path.lexists(source):
        raise UsageError(
            "source is not a directory", where=source, hint="give the checkpoint's folder, with its config.json"
        )
    hint = None
    if may_be_repository(source) and not source.parts[0].startswith("."):
        fetch = f"moepack fetch {shlex.quote(str(source))}, then give its local folder"
        hint = f"{missing_in_folder(source)}; a repository is fetched first: {fetch}".removeprefix("; ")
    raise UsageError("no such directory", where=source, expected="a local checkpoint directory", hint=hint)


def may_be_repository(source: Path) -> bool:
    """Whether ``source`` has the form ``owner/name``, and nothing here rules out that it means a repository."""
    two_parts = len(source.parts) == 2 and not source.is_absolute()
    return two_parts and not os.path.lexists(source) and (source.parent.is_dir() or not os.path.lexists(source.parent))


def missing_in_folder(source: Path) -> str:
    """What a slip in the name of a folder inside of one that is here should be told; empty if there is none."""
    return f"{typed_path(source.parent)} is a folder here and has no {source.name}" if source.parent.is_dir() else ""


def container_directory(path: Path) -> Path:
    """``path``, unless it is a checkpoint; whether it is a container shows when it is opened.

    Raises:
        UsageError: there is nothing of that name.
        FormatError: it is a checkpoint.
    """
    if not os.path.lexists(path):
        raise UsageError("no such directory", where=path, expected="a container")
    begun = (path / FILE_NAME, path / WORK_DIR)
    if (path / CONFIG_NAME).is_file() and not any(os.path.lexists(item) for item in begun):
        raise FormatError(
            "this is a checkpoint, not a container",
            where=path,
            hint=f"make a container of it: moepack pack {typed_path(path)} NAME.moepack",
        )
    return path


def typed_path(path: Path) -> str:
    """A path as it can be typed into a shell, and is not taken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
