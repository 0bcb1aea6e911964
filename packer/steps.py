"""In which order a pack goes through its units, so that each source shard is needed for a short while only.

A step is what is worked on together: the units of at most one bank, and the trunk's segments that come from the same
shards. Steps follow the order in which their last shard comes, so a shard can be fetched once, used by every unit that
needs it, and go. Neither the order nor the grouping has any influence on the container's bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from formats.families import Model
from formats.manifest import bank_name
from packer.planning.plan import Plan, Unit

Needs = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Step:
    """Units that are worked on together, and all shards that they are made from, in the order of first need.

    The last step may have no units: its shards hold dropped tensors only, and are read for their digests.
    """

    units: tuple[Unit, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    units: tuple[Unit, ...]
    shards: tuple[str, ...]
    is_bank: bool
    place: tuple[int, int, int]  # in the forward pass


def unit_shards(checkpoint: Checkpoint, model: Model, plan: Plan) -> dict[str, tuple[str, ...]]:
    """By name of unit, the shards that it is made from, sorted."""
    needs: dict[str, tuple[str, ...]] = {}
    templates = [template for names in model.expert_templates.values() for template in names]
    for unit in plan.units:
        if unit.layer is None:
            found = {tensor.shard for tensor in plan.tensors_of(unit)}
        else:
            of_layer = [template.replace("{layer}", str(unit.layer)) for template in templates]
            found = {
                checkpoint.weight_map[template.replace("{expert}", str(record.source_expert))]
                for record in plan.records_of(unit)
                for template in of_layer
            }
        needs[unit.name] = tuple(sorted(found))
    return needs


def consumers(plan: Plan, needs: Needs) -> dict[str, tuple[Unit, ...]]:
    """By name of shard, the units that need it; none where it holds dropped tensors only."""
    found: dict[str, list[Unit]] = {name: [] for name in plan.shard_lengths}
    for unit in plan.units:
        for shard in needs[unit.name]:
            found[shard].append(unit)
    return {name: tuple(units) for name, units in found.items()}


def make_steps(
    plan: Plan,
    needs: Needs,
    *,
    done: Collection[str] = (),
    hashed: Collection[str] = (),
    here: Collection[str] | None = None,
) -> tuple[Step, ...]:
    """The steps of what is left to do.

    Args:
        plan: what to pack.
        needs: from :func:`unit_shards`.
        done: names of units that are durable already.
        hashed: shards whose digest is known.
        here: shards that lie in a staging folder: steps that need no others come first, so that these can go.
    """
    pieces = _pieces(plan, needs)
    places = {shard: place for place, shard in enumerate(_order(pieces))}
    left = [piece for piece in pieces if any(unit.name not in done for unit in piece.units)]
    left.sort(
        key=lambda piece: (
            here is not None and not all(shard in here for shard in piece.shards),
            max((places[shard] for shard in piece.shards), default=0),
            piece.place,
        )
    )
    steps: list[Step] = []
    with_bank = False
    for piece in left:
        units = tuple(unit for unit in piece.units if unit.name not in done)
        shards = tuple(sorted({shard for unit in units for shard in needs[unit.name]}, key=places.__getitem__))
        if steps and not (with_bank and piece.is_bank) and set(shards) <= set(steps[-1].shards):
            steps[-1] = Step(steps[-1].units + units, steps[-1].shards)
            with_bank = with_bank or piece.is_bank
        else:
            steps.append(Step(units, shards))
            with_bank = piece.is_bank
    met = {shard for step in steps for shard in step.shards}
    rest = [name for name in plan.shard_lengths if name not in met and name not in hashed]
    return (*steps, *(Step((), (name,)) for name in rest))


def _order(pieces: Sequence[_Piece]) -> list[str]:
    """All shards in the order in which they should come: first those of banks, which take nearly all bytes, by layer.

    The others come by the last segment that needs them, so that none waits long for its last use.
    """
    pieces = sorted(pieces, key=lambda piece: piece.place)
    first = dict.fromkeys(shard for piece in pieces if piece.is_bank for shard in piece.shards)
    last = dict.fromkeys(shard for piece in reversed(pieces) if not piece.is_bank for shard in reversed(piece.shards))
    return [*first, *(shard for shard in reversed(last) if shard not in first)]


def _pieces(plan: Plan, needs: Needs) -> list[_Piece]:
    pieces = []
    for layer in plan.layers:
        units = plan.units_of(bank_name(layer.layer))
        pieces.append(_Piece(units, _shards(units, needs), is_bank=True, place=(1, layer.layer, 1)))
    for number, segment in enumerate(plan.segments):
        units = tuple(unit for unit in plan.units if unit.segment == segment.name)
        layer_number = segment.tensors[0].layer if segment.tensors else None
        if segment.name == "embedding":
            place = (0, 0, 0)
        else:
            place = (2, number, 0) if layer_number is None else (1, layer_number, 0)
        pieces.append(_Piece(units, _shards(units, needs), is_bank=False, place=place))
    return pieces


def _shards(units: Iterable[Unit], needs: Needs) -> tuple[str, ...]:
    return tuple(sorted({shard for unit in units for shard in needs[unit.name]}))


def least_staging(steps: Sequence[Step], lengths: Mapping[str, int], held: Mapping[str, int], *, release: bool) -> int:
    """The most bytes of shards that must lie in a staging folder at the same time: what a limit must at least be.

    Args:
        steps: what is left to do.
        lengths: of shards.
        held: bytes that lie there at the beginning, by shard: whole ones, and parts of others.
        release: whether a shard goes after the last step that needs it; else nothing ever goes.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for shard in step.shards:
            first.setdefault(shard, number)
            last[shard] = number
    change = [0] * (len(steps) + 1)
    for shard, size in held.items():
        if (
            shard in first or not release or size < lengths.get(shard, size + 1)
        ):  # whole ones that nobody needs go at once
            change[0] += size
    for shard, number in first.items():
        change[number] += lengths[shard] - held.get(shard, 0)
        if release:
            change[last[shard] + 1] -= lengths[shard]
    return _highest(change)


def peak_of_release(plan: Plan, steps: Sequence[Step], freed: Mapping[str, int], fixed: int, trunk: str) -> int:
    """The most bytes that a file system must have free for the output while the source on it shrinks.

    Args:
        plan: what to pack.
        steps: all of them.
        freed: bytes that come back when a shard goes, 0 if a hard link keeps them.
        fixed: bytes taken from the beginning: everything but banks and trunk.
        trunk: name of the trunk's file, whose space is taken whole at its first unit.
    """
    last = {shard: number for number, step in enumerate(steps) for shard in step.shards}
    change = [fixed] + [0] * len(steps)
    seen: set[str] = set()
    for number, step in enumerate(steps):
        for name in sorted({unit.file for unit in step.units} - seen):
            change[number] += plan.file_bytes(name)
            seen.add(name)
    if trunk not in seen:
        change[0] += plan.file_bytes(trunk)
    for shard, number in last.items():
        change[number + 1] -= freed.get(shard, 0)
    return _highest(change)


def _highest(change: Iterable[int]) -> int:
    total = highest = 0
    for item in change:
        total += item
        highest = max(highest, total)
    return highest
