"""Which layers and experts to pack: parsing ``--layers 0-5,9`` and ``--experts 0-3``, and what they leave out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from formats.errors import UsageError
from formats.families import Architecture
from formats.spelling import spelled

_RANGE = re.compile(r"([0-9]{1,1000})(?:\s*-\s*([0-9]{1,1000}))?")
_SHOWN = 10
_OUTSIDE = "out of range, not in this model"


@dataclass(frozen=True)
class Selection:
    """Numbers to pack, ascending; None stands for all.

    Attributes:
        layers: decoder layers, dense ones included. What belongs to no layer is not packed then.
        experts: routed experts of each of these layers.
    """

    layers: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None


def parse_selection(layers: str | None, experts: str | None, architecture: Architecture) -> Selection | None:
    """Read the two options of the command line.

    Args:
        layers, experts: comma-separated numbers and ranges, both ends included, or None if the option was not given.
        architecture: of the checkpoint.

    Returns:
        The selection, or None if it leaves nothing out.

    Raises:
        UsageError: empty, reversed, malformed, or not in this model.
    """
    return normalised(
        Selection(
            None if layers is None else _numbers(layers, "--layers", architecture.hidden_layers),
            None if experts is None else _numbers(experts, "--experts", architecture.experts),
        ),
        architecture,
    )


def normalised(selection: Selection | None, architecture: Architecture) -> Selection | None:
    """A selection with its numbers checked and sorted and its layers spelled out, or None if it leaves nothing out.

    Raises:
        UsageError: a number that the model does not have, an empty list, or experts of layers that have none.
    """
    if selection is None:
        return None
    every_layer = tuple(range(architecture.hidden_layers))
    layers = experts = None
    if selection.layers is not None:
        layers = _known(selection.layers, "--layers", every_layer)
    if selection.experts is not None:
        experts = _known(selection.experts, "--experts", range(architecture.experts))
        if len(experts) == architecture.experts:
            experts = None
    if layers == every_layer and experts is None:
        layers = None
    if experts is None:
        return None if layers is None else Selection(layers, None)
    layers = architecture.moe_layers if layers is None else layers
    if not set(layers) & set(architecture.moe_layers):
        raise UsageError(
            "none of the selected layers has experts",
            where="--experts",
            expected=f"layers {spelled(architecture.moe_layers)}",
            found=f"layers {spelled(layers)}",
        )
    return Selection(layers, experts)


def _numbers(text: str, option: str, count: int) -> tuple[int, ...]:
    found: set[int] = set()
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise UsageError(
                "not a list of numbers and ranges", where=option, expected="for example 0-5,9", found=repr(text[:80])
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(
                "range runs backwards", where=option, expected=f"{last}-{first}"[:80], found=piece.strip()[:80]
            )
        if last >= count:  # before the range is spelled out: its end is whatever somebody typed
            raise UsageError(_OUTSIDE, where=option, expected=f"0 to {count - 1}", found=str(last)[:40])
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _known(numbers: Sequence[int], option: str, known: Sequence[int]) -> tuple[int, ...]:
    if not numbers:
        raise UsageError("nothing is selected", where=option)
    unknown = sorted(set(numbers) - set(known))
    if unknown:
        raise UsageError(
            _OUTSIDE,
            where=option,
            expected=f"0 to {len(known) - 1}",
            found=", ".join(map(str, unknown[:_SHOWN])) + (", ..." if len(unknown) > _SHOWN else ""),
        )
    return tuple(sorted(set(numbers)))
