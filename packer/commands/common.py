"""What all commands share: their common options, and the one table from exception to message and exit code."""

from __future__ import annotations

import errno
import functools
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import blake3
import click
import numpy as np

from formats.errors import Interrupted, MoepackError, UsageError
from packer.output import Output, escape, make_output
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

_USAGE, _ENVIRONMENT, _INTERRUPTED = 2, 4, 130


class PathType(click.ParamType[Path]):
    """A path as it was typed; the empty string, which would mean the current folder, is refused."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Make a :class:`Path`."""
        if not str(value):
            self.fail("the path is empty", param, ctx)
        return Path(value)


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
        typed = click.get_current_context().obj or ()
        return guarded(output, lambda: function(output, **arguments), typed)

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


def command_line(arguments: Sequence[str], *, without: Sequence[str] = ()) -> str:
    """The command as it can be typed again."""
    return shlex.join(["moepack", *(item for item in arguments if item not in without)])


def typed_path(path: Path) -> str:
    """A path as it can be typed into a shell, and is not taken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def guarded(output: Output, action: Callable[[], int], arguments: Sequence[str]) -> int:
    """Run ``action`` and turn whatever it raises into a message and an exit code."""
    try:
        return action()
    except click.exceptions.NoArgsIsHelpError as error:
        output.stderr.write(error.format_message() + "\n")  # our own help, nothing from outside
        return _USAGE
    except click.ClickException as error:
        output.failure(error.format_message())
        context = error.ctx if isinstance(error, click.UsageError) else None
        output.hint(f"{context.command_path if context else 'moepack'} --help")
        return _USAGE
    except MoepackError as error:
        output.error(error)
        if isinstance(error, Interrupted) and not error.hint:
            output.hint(f"continue with: {command_line(arguments, without=['--restart'])}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.failure("interrupted")
        output.hint(f"start again with: {command_line(arguments, without=['--restart'])}")
        return _INTERRUPTED
    except MemoryError:
        output.failure("not enough memory")
        output.hint("use fewer --jobs")
        return _ENVIRONMENT
    except BrokenPipeError:
        return _silence()
    except OSError as error:
        if error.errno == errno.EPIPE:
            return _silence()
        return _internal(output, error)
    except Exception as error:  # the last resort: what nobody foresaw is still one line, not a stack trace
        return _internal(output, error)


def _silence() -> int:
    """Whoever read our output has gone: say nothing, and keep the interpreter from failing when it flushes."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return _ENVIRONMENT


def _internal(output: Output, error: Exception) -> int:
    output.failure(f"internal error: {type(error).__name__}: {error}")
    if output.verbose:
        for line in "".join(traceback.format_exception(error)).split("\n"):
            output.stderr.write(escape(line) + "\n")
    else:
        output.hint("--verbose shows where; please report it")
    return _ENVIRONMENT
