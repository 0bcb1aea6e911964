"""``moepack demo``."""

from __future__ import annotations

import errno
import io
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import click

from formats.errors import EnvironmentProblem, UsageError
from packer.commands.common import EXIT_CODES, common_options, typed
from packer.commands.errors import command_line
from packer.commands.signals import interrupted_by_term
from packer.output import Output
from packer.progress import ProgressLine

_RECIPES = {"lossless": ("--recipe", "kimi-k3-lossless"), "3-bit": ()}


@click.command(epilog=EXIT_CODES, short_help="Take the bundled model the whole way.")
@click.option("--dir", "folder", type=typed, metavar="DIR", help="Keep the containers here; by default they go again.")
@common_options
def demo(output: Output, *, folder: Path | None) -> int:
    """Plan, pack, verify, inspect and run the bundled model, a small Kimi K3 trained on code and prose.

    Ends with the perplexity of source, lossless container and 3-bit container on text that the model has never seen.
    Takes a few minutes. Every command is shown as it can be typed.

    \b
    Examples:
      moepack demo
      moepack demo --dir build/demo
    """
    from packer import demonstration as bundle

    model = bundle.bundled()
    with ExitStack() as stack:
        stack.enter_context(interrupted_by_term())
        home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moepack-demo-")))
        _make(home)
        containers = {name: home / f"demo-{name}.moepack" for name in _RECIPES}
        source, packed = _typed(model.checkpoint), {name: _typed(path) for name, path in containers.items()}
        excerpt = bundle.write_excerpt(model, home)
        steps = [["plan", source]]
        steps += [["pack", source, packed[name], *options] for name, options in _RECIPES.items()]
        steps += [["verify", path, "--source", source] for path in packed.values()]
        steps += [
            ["verify", packed["lossless"], "--source", source, "--text", _typed(excerpt), "--max-kl", "0"],
            ["inspect", packed["3-bit"]],
            ["inspect", packed["3-bit"], "--layer", "1", "--expert", "0"],
            ["plan", packed["3-bit"], "--context", "4096"],
            ["run", packed["3-bit"], bundle.PROMPT, "-n", "120"],
        ]
        for arguments in steps:
            code = _step(output, arguments)
            if code:
                if folder is None:
                    output.note("the folder of this demo goes now, and the next one starts anew; with --dir it stays")
                return code
        texts = bundle.read_texts(model)
        with ProgressLine(output, "logits", spell=str) as progress:
            readings = bundle.read_along(model, containers, texts, progress)
        sizes = {
            name: bundle.directory_bytes(path) for name, path in (("source", model.checkpoint), *containers.items())
        }
        rows = bundle.table_document(readings, sizes)
    if output.json:
        output.result({"directory": None if folder is None else str(folder), "models": rows})
    else:
        bundle.show_table(output, rows)
    if folder is not None:
        output.hint(command_line(["run", packed["3-bit"], "--interactive"]))
    return 0


def _make(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        kind = UsageError if error.errno == errno.ENAMETOOLONG else EnvironmentProblem
        raise kind(f"cannot make the folder: {error.strerror}", where=home) from None


def _typed(path: Path) -> str:
    """A path that is not taken for an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def _step(output: Output, arguments: Sequence[str]) -> int:
    """Show a command and run it; with ``--json`` what it prints is left out, for there is one document alone."""
    from packer.commands import run

    typed_by_user = click.get_current_context().obj or ()
    if output.json:
        output.note(command_line(arguments))
        with redirect_stdout(io.StringIO()):
            return run([*arguments, "--quiet"], typed=typed_by_user)
    output.line(f"$ {command_line(arguments)}")
    code = run([*arguments, "--quiet"] if output.quiet else arguments, typed=typed_by_user)
    output.line()
    return code
