"""Recipes: which codec each tensor gets, with which parameters, and how large an error may become.

A recipe is a TOML file, bundled or the user's own. Rules for the trunk are ordered, and the first that takes a tensor
decides; a tensor that no rule takes is an error. What a recipe means for a given checkpoint, in bytes, is worked out
by ``packer.planning.plan``; the structs are in ``packer.recipe.types``, ``--set`` in ``packer.recipe.settings``.
"""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

import msgspec

from formats.errors import UsageError
from formats.files import named_bytes
from packer.documents import parsed_toml
from packer.recipe.settings import moved_limits, override, usual_limit, with_weighted_limit
from packer.recipe.types import (
    ColumnWeights,
    DropRule,
    ExpertCodec,
    Fitting,
    GroupInt,
    GroupIntRule,
    Mxfp4,
    Raw,
    RawRule,
    Recipe,
    Rvq,
    Source,
    SourceBytes,
    TrunkRule,
    plain,
    recipe_from_builtins,
)

__all__ = [
    "ColumnWeights",
    "DropRule",
    "ExpertCodec",
    "Fitting",
    "GroupInt",
    "GroupIntRule",
    "Mxfp4",
    "Raw",
    "RawRule",
    "Recipe",
    "Rvq",
    "Source",
    "SourceBytes",
    "TrunkRule",
    "bundled_recipes",
    "choose_rule",
    "default_recipe",
    "load_recipe",
    "moved_limits",
    "override",
    "plain",
    "recipe_from_builtins",
    "resolve",
    "usual_limit",
    "with_weighted_limit",
]

MAX_FILE_BYTES = 64 << 10  # the bundled ones have 3 KB


def bundled_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package, sorted."""
    files = importlib.resources.files("recipes").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: the name of a bundled recipe, or the path of a TOML file (``~`` stands for the home directory).

    Raises:
        UsageError: there is no such recipe, or it is malformed; the key is named.
        EnvironmentProblem: it cannot be read.

    Example:
        >>> load_recipe("kimi-k3").experts.codec
        'rvq'
    """
    if name_or_path in bundled_recipes():
        data = importlib.resources.files("recipes").joinpath(f"{name_or_path}.toml").read_bytes()
        return _from_toml(data, where=f"recipe {name_or_path}")
    try:
        path = Path(name_or_path).expanduser()
    except RuntimeError:  # nobody's home directory
        path = Path(name_or_path)
    hint = f"give the path of a TOML file, or one of {', '.join(bundled_recipes())}"
    if not os.path.lexists(path):
        a_path = "/" in name_or_path or name_or_path.endswith(".toml")
        raise UsageError("no such recipe file" if a_path else "no recipe of that name", where=name_or_path, hint=hint)
    return _from_toml(named_bytes(path, at_most=MAX_FILE_BYTES, what="recipe", hint=hint), where=str(path))


def default_recipe(family: str) -> Recipe:
    """The bundled recipe that a family is packed with unless the user says otherwise: the one of its own name.

    Raises:
        UsageError: the family has none.
    """
    name = family.replace("_", "-")
    if name not in bundled_recipes():
        raise UsageError(
            "no recipe is bundled for this family",
            where=family,
            hint="give one with --recipe, for example a copy of a bundled one: " + ", ".join(bundled_recipes()),
        )
    return load_recipe(name)


def resolve(recipe: Recipe, *, family: str, expert_format: str) -> Recipe:
    """Check that a recipe suits a checkpoint, and say ``mxfp4`` or ``raw`` where it says ``source``.

    Every other key of a loaded recipe is explicit already.

    Args:
        recipe: any recipe, also one that was put together in Python.
        family: the checkpoint's family, for example ``kimi_k3``.
        expert_format: ``mxfp4`` or ``dense``, how the checkpoint stores its experts.

    Raises:
        UsageError: the recipe is for other families, or asks for a codec that the experts' format rules out.
    """
    recipe = recipe_from_builtins(plain(recipe), where=f"recipe {recipe.name}")
    if family not in recipe.families:
        raise UsageError(
            "recipe is for another family",
            where=f"recipe {recipe.name}: families",
            expected=family,
            found=", ".join(recipe.families),
            hint=f"name a recipe for {family}, or add it to the families of your own",
        )
    own: Mxfp4 | Raw = Mxfp4() if expert_format == "mxfp4" else Raw()
    if isinstance(recipe.experts, SourceBytes):
        recipe = msgspec.structs.replace(recipe, experts=own)
    elif isinstance(recipe.experts, Rvq) and isinstance(recipe.experts.fallback, SourceBytes):
        recipe = msgspec.structs.replace(recipe, experts=msgspec.structs.replace(recipe.experts, fallback=own))
    codecs: list[tuple[str, ExpertCodec]] = [("experts", recipe.experts)]
    if isinstance(recipe.experts, Rvq) and recipe.experts.fallback is not None:
        codecs.append(("experts.fallback", recipe.experts.fallback))
    for key, coded in codecs:
        if isinstance(coded, Mxfp4) and expert_format != "mxfp4":
            raise UsageError(
                "mxfp4 copies MXFP4 bytes, which this checkpoint's experts do not have",
                where=f"recipe {recipe.name}: {key}.codec",
                found=expert_format,
                hint="source is the lossless codec for experts of any format",
            )
        if isinstance(coded, Raw) and expert_format == "mxfp4":
            raise UsageError(
                "raw holds one array a matrix, MXFP4 experts come as two",
                where=f"recipe {recipe.name}: {key}.codec",
                hint="source is the lossless codec for experts of any format",
            )
    return recipe


def choose_rule(recipe: Recipe, name: str, role: str, rank: int) -> tuple[int, TrunkRule]:
    """The first rule that takes a tensor, with its number.

    Raises:
        UsageError: no rule takes it (nothing is dropped or copied by accident).
    """
    for number, rule in enumerate(recipe.trunk):
        if rule.takes(name, role, rank):
            return number, rule
    raise UsageError(
        f"no rule of recipe {recipe.name} takes this tensor",
        where=name,
        found=f"role {role}, rank {rank}",
        hint='add a [[trunk]] rule that takes it, for example names = ["..."] with codec = "raw" or "drop"',
    )


def _from_toml(data: bytes, *, where: str) -> Recipe:
    document = parsed_toml(data, what="recipe", where=where)
    for key in ("prune", "statistics"):
        if key in document:
            raise UsageError(
                f"a recipe does not say {key}",
                where=f"{where}: {key}",
                hint="give a plan with --prune, statistics with --stats",
            )
    return recipe_from_builtins(document, where=where)
