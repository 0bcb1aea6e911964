"""``moepack inspect``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from formats.errors import UsageError
from packer.commands.common import EXIT_CODES, common_options, container_directory, typed
from packer.inspect.reading import inspect_expert, inspect_layer, inspect_matrix, inspect_summary
from packer.inspect.text import show_expert, show_layer, show_matrix, show_summary, show_trunk
from packer.inspect.trunk import inspect_trunk
from packer.output import Output


class _HasDict(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


_View = TypeVar("_View", bound=_HasDict)


@click.command(epilog=EXIT_CODES, short_help="Show a container: the whole, its trunk, a layer, an expert, a matrix.")
@click.argument("container", type=typed)
@click.option("--layer", type=click.IntRange(min=0), metavar="N", help="Show the records and tensors of one layer.")
@click.option("--expert", type=click.IntRange(min=0), metavar="M", help="Show one record of the layer.")
@click.option("--matrix", type=click.Choice(["gate", "up", "down"]), help="Decode and show one matrix of the expert.")
@click.option("--trunk", is_flag=True, help="Show all tensors of the trunk.")
@common_options
def inspect(
    output: Output, *, container: Path, layer: int | None, expert: int | None, matrix: str | None, trunk: bool
) -> int:
    """Show what is in CONTAINER: the whole, its trunk, a layer, an expert, a matrix. An unfinished pack can be shown,
    too.

    \b
    Examples:
      moepack inspect model.moepack
      moepack inspect model.moepack --trunk
      moepack inspect model.moepack --layer 3
      moepack inspect model.moepack --layer 3 --expert 17 --matrix down
    """
    if expert is not None and layer is None:
        raise UsageError("an expert is one of a layer", where="--expert", hint="add --layer N")
    if matrix is not None and expert is None:
        raise UsageError("a matrix is one of an expert", where="--matrix", hint="add --layer N --expert M")
    if trunk and layer is not None:
        raise UsageError("the trunk or a layer", where="--trunk", hint="--layer N shows the tensors of that layer")
    container = container_directory(container)
    if trunk:
        return _show(output, inspect_trunk(container), partial(show_trunk, output))
    if layer is None:
        return _show(output, inspect_summary(container), partial(show_summary, output, container))
    if expert is None:
        return _show(output, inspect_layer(container, layer), partial(show_layer, output))
    if matrix is None:
        return _show(output, inspect_expert(container, layer, expert), partial(show_expert, output))
    return _show(output, inspect_matrix(container, layer, expert, matrix), partial(show_matrix, output))


def _show(output: Output, view: _View, show: Callable[[_View], None]) -> int:
    if output.json:
        output.result(view.to_dict())
    else:
        show(view)
    return 0
