"""``--set key=value``: changing a recipe from the command line without leaving its rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from formats.errors import UsageError
from formats.spelling import counted
from packer.documents import parsed_toml
from packer.recipe.types import MAX_SUMMARY, Recipe, Rvq, plain, recipe_from_builtins

WEIGHTED_LIMIT = 1.0  # of plain errors where columns are weighted: weights that say less than zeros would
_SHOWN = 6  # changed keys that a summary names


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Apply ``key=value`` settings, in order, and check the result as a whole.

    Keys are dotted (``experts.stages``, ``trunk.0.bits``, ``fitting.seed``); values are TOML values, and what is not
    one is a string. Two things follow a setting, because the old value would make no sense:

    * another ``codec`` starts its table anew, with that codec's defaults and none of the old one's parameters;
    * another number of bits, stages or entries moves ``max_rel_error`` to :func:`usual_limit`, unless it is set too.

    A recipe that changes gets ``+set`` behind its name and a summary that says what was changed: no container carries
    the name or the promise of a recipe it was not made by. Either can be set instead.

    Raises:
        UsageError: unknown key, wrong type or value out of range; the key is named.
    """
    document = plain(recipe)
    given: set[str] = set()
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not setting.isprintable():
            raise UsageError("setting has characters that cannot be printed", where=f"--set {setting!a}")
        if not equals or not key:
            raise UsageError("setting is not of the form key=value", where=f"--set {setting}")
        _assign(document, key, _toml_value(text.strip()))
        given.add(key)
    for key in given:
        table, _, last = key.rpartition(".")
        if last in ("codec", "bits", "stages", "entries") and f"{table}.max_rel_error" not in given:
            _reset_limit(document, table)
    changed = recipe_from_builtins(document, where="--set")
    differences = _differences(recipe, changed)
    if differences and "summary" not in given:
        before = recipe.summary if recipe.name.endswith("+set") else f"as {recipe.name}"
        changed = msgspec.structs.replace(changed, summary=f"changed: {differences}; otherwise {before}"[:MAX_SUMMARY])
    if changed == recipe or "name" in given or recipe.name.endswith("+set"):
        return changed
    return msgspec.structs.replace(changed, name=recipe.name[:60] + "+set")


def with_weighted_limit(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A recipe for experts whose columns are weighted: they may lose more where it counts less.

    Recorded errors, and limits of them, are plain ones. With mean squares spread by exp(N(0, 1)) the plain error at 3
    bits is 0.22 instead of 0.16, with exp(N(0, 4)) 0.40, while the weighted one falls. So the limit for ``rvq`` becomes
    :data:`WEIGHTED_LIMIT`, unless a setting says another.
    """
    experts = recipe.experts
    given = {setting.partition("=")[0].strip() for setting in settings}
    if not isinstance(experts, Rvq) or given & {"experts", "experts.max_rel_error"}:
        return recipe
    limit = max(experts.max_rel_error, WEIGHTED_LIMIT)
    return msgspec.structs.replace(recipe, experts=msgspec.structs.replace(experts, max_rel_error=limit))


def moved_limits(recipe: Recipe, changed: Recipe, settings: Iterable[str]) -> list[str]:
    """The error limits that :func:`override` moved without being told to, one sentence each."""
    given = {setting.partition("=")[0].strip() for setting in settings}
    before, after = dict(_leaves("", plain(recipe))), dict(_leaves("", plain(changed)))
    notes = []
    for key, limit in after.items():
        table, _, last = key.rpartition(".")
        if last == "max_rel_error" and before.get(key, limit) != limit and key not in given:
            codec = after[f"{table}.codec"]
            use = (
                f"{counted(after[f'{table}.stages'], 'stage')} of {after[f'{table}.entries']}"
                if codec == "rvq"
                else f"{after[f'{table}.bits']} bits"
                if codec == "group_int"
                else codec
            )
            notes.append(f"limit of {table}: {before[key]:g} -> {limit:g}, usual for {use}")
    return notes


def _differences(recipe: Recipe, changed: Recipe) -> str:
    """The settings that make one recipe of the other, but for name and summary; cut where there are many."""
    before, after = dict(_leaves("", plain(recipe))), dict(_leaves("", plain(changed)))
    found = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"[:80]
        for key, value in after.items()
        if key not in ("name", "summary") and (key not in before or before[key] != value)
    ]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _leaves(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a plain document with their values; lists of words or numbers are values."""
    tables = node.items() if isinstance(node, dict) else enumerate(node) if _is_tables(node) else None
    if tables is None:
        yield key, node
        return
    for name, item in tables:
        yield from _leaves(f"{key}.{name}" if key else str(name), item)


def _is_tables(node: Any) -> bool:
    return isinstance(node, list) and bool(node) and isinstance(node[0], dict)


def usual_limit(codec: str, *, bits: int = 8, stages: int = 3, entries: int = 256) -> float:
    """The error limit that the bundled recipes use for a codec: about a fourth above what it does to weights.

    rvq: normal, Laplace and Student (5) weights keep within 0.58^R of their norm at R = stages x log2(entries) / 8
    bits a weight (0.18 to 0.20 at R = 3, R from 1/8 to 4 measured); the limit is 1.25 x 0.585^R, 0.25 at R = 3.
    group_int: step / sqrt(12) at a step of amax / 7 or amax / 127. Groups of 128 normal weights give 0.118 and 0.0065,
    Laplace 0.160 and 0.0089, Student (5) 0.172 and 0.0096; one single group, as in a matrix of one short row, at most
    0.197 and 0.0108 in 3,000 draws. The limits are 0.2 and 0.012: above all of these, below one large outlier a group.
    """
    if codec == "rvq":
        return float(round(1.25 * 0.585 ** (stages * math.log2(entries) / 8), 3))
    if codec == "group_int":
        return 0.2 if bits == 4 else 0.012
    return 0.0


def _assign(document: dict[str, Any], key: str, value: Any) -> None:
    """Put ``value`` at a dotted key of the plain document; whether the last part exists is for the types to say."""
    node: Any = document
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1]):
        here = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            if not re.fullmatch(r"[0-9]{1,4}", part) or int(part) >= len(node):
                raise UsageError(
                    "no such rule", where=f"--set {here}", expected=f"0 to {len(node) - 1}", found=repr(part)
                )
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            if node[part] is None:
                node[part] = {}  # a table that may be absent, such as experts.fallback
            node = node[part]
        else:
            raise UsageError("unknown key", where=f"--set {here}", hint=_known(node))
    if not isinstance(node, dict):
        raise UsageError("unknown key", where=f"--set {key}", hint=_known(node))
    last = parts[-1]
    if last == "codec" and node.get("codec") not in (None, value):
        kept = {name: node[name] for name in ("roles", "names", "ranks") if node.get(name) is not None}
        node.clear()
        node.update(kept)
        node.update(_defaults_of(value))
    elif last != "codec" and last not in node and node:
        raise UsageError("unknown key", where=f"--set {key}", hint=_known(node))
    node[last] = value


def _defaults_of(codec: Any) -> dict[str, Any]:
    """Parameters for a table whose codec was changed by a setting."""
    if codec == "rvq":
        return {
            "stages": 3,
            "entries": 256,
            "codebooks": "expert",
            "max_rel_error": usual_limit("rvq"),
            "fallback": None,
        }
    if codec == "group_int":
        return {"bits": 8, "group": 128, "max_rel_error": usual_limit("group_int")}
    return {}


def _reset_limit(document: dict[str, Any], key: str) -> None:
    """Give the table at ``key`` its usual limit, if its parameters make sense; if not, the types will say so."""
    node: Any = document
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    parameters = {name: node[name] for name in ("bits", "stages", "entries") if name in node}
    if "max_rel_error" in node and all(type(value) is int and 1 <= value <= 256 for value in parameters.values()):
        node["max_rel_error"] = usual_limit(node["codec"], **parameters)


def _toml_value(text: str) -> Any:
    """``text`` as a TOML value, else as a string: 2, 0.1, true, "a", ["a", "b"], matrix."""
    try:
        parsed = parsed_toml(f"value = {text}".encode(), what="value", where="--set")
    except UsageError:  # also of what is too long to be parsed: the types say what should stand there
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _known(node: Any) -> str | None:
    return f"known here: {', '.join(node)}" if isinstance(node, dict) and node else None
