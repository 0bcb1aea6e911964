"""The one table from exception to message and exit code."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from formats.errors import Interrupted, MoepackError
from packer.output import Output, escape

_USAGE, _ENVIRONMENT, _INTERRUPTED = 2, 4, 130


def guarded(output: Output, action: Callable[[], int], arguments: Sequence[str]) -> int:
    """Run ``action`` and turn whatever it raises into a message and an exit code."""
    try:
        return action()
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
    except SystemExit:  # how click and rich leave when they find a closed pipe
        return _ENVIRONMENT
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read our output has gone: say nothing
            return _ENVIRONMENT
        if isinstance(error.filename, (str, bytes)):  # the system refuses a file or folder, wherever it was needed
            output.failure(f"{os.fsdecode(error.filename)}: {error.strerror}")
            return _USAGE if error.errno == errno.ENAMETOOLONG else _ENVIRONMENT  # the former on any machine
        return _internal(output, error)
    except Exception as error:  # the last resort: what nobody foresaw is still one line, not a stack trace
        return _internal(output, error)


def forget_lost_streams() -> int:
    """Keep the interpreter from failing at its end because of a stream that takes nothing more.

    Returns:
        The exit code for results that were lost, 0 if all were written.
    """
    code = 0
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
            code = code or (_ENVIRONMENT if stream is sys.stdout else 0)
    os.close(null)
    return code


def _internal(output: Output, error: Exception) -> int:
    output.failure(f"internal error: {type(error).__name__}: {error}")
    if output.verbose:
        for line in "".join(traceback.format_exception(error)).split("\n"):
            output.stderr.write(escape(line) + "\n")
    else:
        output.hint("--verbose shows where; please report it")
    return _ENVIRONMENT


def command_line(arguments: Sequence[str], *, without: Sequence[str] = ()) -> str:
    """The command as it can be typed again."""
    return shlex.join(["moepack", *(item for item in arguments if item not in without)])
