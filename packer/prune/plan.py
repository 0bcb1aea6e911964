"""The file of a prune plan: which experts of each layer stay, and in what tier. TOML that people can read and change.

    format = "moepack-prune-plan"
    version = 1

    [model]                     # the one model that the plan is for
    family = "kimi_k3"
    ...
    config_blake3 = "..."       # of its config.json

    [made]                      # how the plan came about; may be absent
    ...

    [[layers]]                  # a layer that is not named keeps all of its experts
    layer = 1
    keep = "0-3,7,9-12"         # source numbers
    lossless = "5"              # these stay too, with the source's own bytes; all others are dropped

What a plan means for a checkpoint is worked out by ``packer.prune.pruning``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from formats.errors import MoepackError, UsageError
from formats.files import named_bytes
from formats.spelling import spelled
from packer.documents import converted, parsed_toml
from packer.model_stamp import ModelStamp
from packer.number_lists import parse_numbers
from packer.recipe.pruned import KeptExperts, Made
from packer.statistics.recognise import is_statistics

FORMAT = "moepack-prune-plan"
VERSION = 1
MAX_FILE_BYTES = 2 << 20  # a plan for K3 that keeps every other expert has 170 KB


@dataclass(frozen=True)
class LayerKeep:
    """The source experts of one layer that stay, ascending: ``keep`` in the recipe's codec, ``lossless`` unchanged."""

    layer: int
    keep: tuple[int, ...]
    lossless: tuple[int, ...] = ()


@dataclass(frozen=True)
class PrunePlan:
    """A plan.

    Attributes:
        model: that it is for.
        made: how it came about, or None.
        layers: ascending; those that are not here keep all of their experts.
    """

    model: ModelStamp
    made: Made | None
    layers: tuple[LayerKeep, ...]

    @property
    def blake3(self) -> str:
        """BLAKE3 of the plan as it is written, in hex: comments and blanks of an edited file do not count."""
        return blake3(prune_plan_bytes(self)).hexdigest()


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as TOML gives it."""

    format: str
    version: int
    model: ModelStamp
    made: Made | None = None
    layers: tuple[KeptExperts, ...] = ()


def read_prune_plan(path: Path) -> PrunePlan:
    """Read a plan.

    Raises:
        UsageError: there is no such file, or it is no plan; key, expected and found are named.
        EnvironmentProblem: it cannot be read.
    """
    where = str(path)
    if is_statistics(path):  # before it is read: that of a large model is longer than any plan may be
        raise UsageError(
            "this is a statistics file, not a prune plan",
            where=where,
            hint=f"make a plan with moepack prune {shlex.quote(where)}",
        )
    data = named_bytes(path, at_most=MAX_FILE_BYTES, what="prune plan")
    values = parsed_toml(data, what="prune plan", where=where)
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        found = values.get(key)
        if found != expected or type(found) is not type(expected):
            raise UsageError(
                "not a prune plan that this version reads",
                where=f"{where}: {key}",
                expected=expected,
                found="nothing" if found is None else repr(found)[:80],
            )
    document = converted(values, _Document, where=where)
    return PrunePlan(document.model, document.made, tuple(_layers(document, where)))


def _layers(document: _Document, where: str) -> Iterator[LayerKeep]:
    previous = -1
    for entry in document.layers:
        place = f"{where}: layer {entry.layer}"
        if entry.layer <= previous:
            raise UsageError(
                "layers do not ascend, or one stands twice",
                where=place,
                expected=f"above {previous}",
                found=entry.layer,
            )
        yield layer_keep(entry, document.model.experts, place)
        previous = entry.layer


def layer_keep(entry: KeptExperts, experts: int, where: str, error: type[MoepackError] = UsageError) -> LayerKeep:
    """The numbers that an entry spells.

    Args:
        entry: of a plan or of a resolved recipe.
        experts: routed experts of the layer in the source.
        where: for messages.
        error: what to raise.

    Raises:
        MoepackError: malformed, out of range, or an expert in both lists.
    """
    keep = parse_numbers(entry.keep, count=experts, where=f"{where}: keep", error=error)
    lossless = parse_numbers(entry.lossless, count=experts, where=f"{where}: lossless", error=error)
    both = sorted(set(keep) & set(lossless))
    if both:
        raise error(
            "an expert stands in both lists", where=where, expected="keep or lossless", found=spelled(both)[:80]
        )
    return LayerKeep(entry.layer, keep, lossless)


def kept_entry(layer: LayerKeep) -> KeptExperts:
    """The inverse of :func:`layer_keep`."""
    return KeptExperts(layer=layer.layer, keep=spelled(layer.keep), lossless=spelled(layer.lossless))


def prune_plan_bytes(plan: PrunePlan) -> bytes:
    """The file of a plan; the same plan always gives the same bytes."""
    lines = [f"format = {_text(FORMAT)}", f"version = {VERSION}", "", "[model]"]
    lines += [f"{name} = {_value(getattr(plan.model, name))}" for name in plan.model.__struct_fields__]
    if plan.made is not None:
        made = {name: getattr(plan.made, name) for name in plan.made.__struct_fields__}
        lines += ["", "[made]", *(f"{name} = {_value(value)}" for name, value in made.items() if value is not None)]
    for layer in plan.layers:
        lines += ["", "[[layers]]", f"layer = {layer.layer}", f"keep = {_text(spelled(layer.keep))}"]
        if layer.lossless:
            lines.append(f"lossless = {_text(spelled(layer.lossless))}")
    return ("\n".join(lines) + "\n").encode()


def _value(value: str | int | float | tuple[str, ...]) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _text(text: str) -> str:
    """A string; without control characters those of JSON are those of TOML."""
    return json.dumps(text, ensure_ascii=False)
