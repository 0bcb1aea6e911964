"""The commands: each module parses, calls one function of ``packer`` and prints what it returns."""

from __future__ import annotations

from collections.abc import Sequence

import click

from packer.commands.bench import bench
from packer.commands.calibrate import calibrate
from packer.commands.common import EXIT_CODES
from packer.commands.demo import demo
from packer.commands.errors import forget_lost_streams, guarded
from packer.commands.eval import evaluate
from packer.commands.fetch import fetch
from packer.commands.inspect import inspect
from packer.commands.pack import pack
from packer.commands.plan import plan
from packer.commands.prune import prune
from packer.commands.run import run as run_model
from packer.commands.verify import verify
from packer.output import make_output, writing_results
from packer.version import VERSION

_USAGE = 2


@click.group(
    name="moepack",
    epilog=EXIT_CODES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, "--version", prog_name="moepack")
@click.pass_context
def moepack(context: click.Context) -> int:
    """Pack a mixture-of-experts checkpoint into one aligned container, prove it, browse it, run it.

    \b
    Example:
      moepack plan checkpoint/
      moepack pack checkpoint/ model.moepack
      moepack verify model.moepack --source checkpoint/
      moepack run model.moepack "def fibonacci(n):"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        return _USAGE
    return 0


for _command in (fetch, plan, pack, verify, inspect, evaluate, run_model, bench, calibrate, prune, demo):
    moepack.add_command(_command)


def run(arguments: Sequence[str], *, typed: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every error has been printed.

    Args:
        arguments: the command line.
        typed: what to give again to continue, where that is another one.
    """
    given = tuple(arguments if typed is None else typed)
    output = make_output(verbose="--verbose" in arguments, color="--no-color" not in arguments)

    def action() -> int:
        with writing_results():  # click's own, the help; commands meet their errors themselves
            code = moepack.main(args=list(arguments), prog_name="moepack", standalone_mode=False, obj=given)
        return code if isinstance(code, int) else 0

    code = guarded(output, action, given)
    return forget_lost_streams() or code
