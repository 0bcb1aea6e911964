"""What a container claims as a whole, checked against itself: files, index rows, coverage, recipe and limits.

Nothing here reads weights. Records and tensors one by one are the business of ``packer.verify.record_bytes``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from formats import manifest as manifests
from formats.container import Container, expected_files
from formats.errors import FormatError, MoepackError
from formats.index import IndexRow
from formats.layout import record_name
from formats.manifest import WORK_DIR, Manifest
from formats.spelling import counted
from packer.limits import expert_limit, over_limits, tensor_limit
from packer.recipe.recipe import recipe_from_builtins
from packer.recipe.types import DropRule, Recipe
from packer.storage import durable
from packer.verify.findings import Problem, problem_of
from packer.verify.pruning import numbering_problems, pruning_problems

MAX_UNLISTED = 10_000  # entries reported one by one; a folder of millions must not fill the memory

Rows = Mapping[int, tuple[IndexRow, ...]]


def readable_rows(container: Container) -> tuple[dict[int, tuple[IndexRow, ...]], list[Problem]]:
    """The index rows of every layer that can be proved, and a problem for each other one."""
    rows: dict[int, tuple[IndexRow, ...]] = {}
    problems = []
    for info in container.manifest.layers:
        try:
            rows[info.layer] = container.rows(info.layer)
        except MoepackError as error:
            what = f"{problem_of(error).what}; its {counted(info.records, 'record')} not checked"
            problems.append(Problem(f"layer {info.layer}", what))
    return rows, problems


def structure_problems(container: Container, rows: Rows) -> Iterator[Problem]:
    """Everything that manifest, index and directory say about each other."""
    manifest = container.manifest
    yield from unlisted_files(container.path, manifest)
    yield from _tensor_problems(manifest)
    yield from _coverage_problems(manifest, rows)
    yield from numbering_problems(manifest, rows)
    try:
        recipe = recipe_from_builtins(manifest.recipe, where="manifest.json: recipe", error=FormatError)
    except FormatError as error:
        yield problem_of(error)
        return
    yield from _recipe_problems(manifest, rows, recipe)
    yield from pruning_problems(manifest, rows, recipe)
    for item in over_limits(manifest, rows, recipe):
        yield Problem(
            item.where,
            f"relative error is above the recipe's limit (expected at most {item.limit:g}, found {item.error:.6g})",
        )


def unlisted_files(path: Path, manifest: Manifest) -> Iterator[Problem]:
    """Files, folders and links of the directory that no entry names; links are not followed."""
    listed = {manifests.FILE_NAME, *expected_files(manifest)}
    folders = {name.rsplit("/", depth)[0] for name in listed for depth in range(1, name.count("/") + 1)}
    count = 0
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(path / prefix) as entries:
                found = sorted(
                    (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries
                )
        except OSError as error:
            yield Problem(prefix or str(path), f"folder cannot be listed: {error.strerror}")
            continue
        for name, is_folder, is_link in found:
            full = prefix + name
            if is_folder and full in folders:
                pending.append(f"{full}/")
            elif is_folder or full not in listed:
                count += 1
                if count > MAX_UNLISTED:
                    yield Problem(str(path), f"more than {MAX_UNLISTED} files that the manifest does not list")
                    return
                yield Problem(full, _unlisted(full, is_folder, is_link))


def _unlisted(name: str, is_folder: bool, is_link: bool) -> str:
    if name.split("/")[0] == WORK_DIR or name.endswith(durable.SUFFIX):
        return "left over from an unfinished pack; the manifest does not list it"
    kind = "folder" if is_folder else "link" if is_link else "file"
    return f"{kind} that the manifest does not list"


def _tensor_problems(manifest: Manifest) -> Iterator[Problem]:
    """What is stored unchanged has the source's digest and no error."""
    for info in manifest.tensors:
        if info.codec == "raw" and (info.rel_error or info.blake3 != info.source_blake3):
            yield Problem(info.name, "stored unchanged, yet its source digest or its error says otherwise")


def _coverage_problems(manifest: Manifest, rows: Rows) -> Iterator[Problem]:
    """Every source tensor has a fate: count the fates and compare their names (SPEC section 4.5)."""
    where = "manifest.json: coverage"
    coverage = manifest.coverage
    a_expert = sum(len(templates) for templates in manifest.experts.tensors.values())
    copied = sum(info.codec == "raw" for info in manifest.tensors)
    counted = {
        "packed": len(manifest.tensors) - copied + a_expert * manifest.experts.count,
        "copied": copied,
        "dropped": len(manifest.dropped) + a_expert * sum(len(info.dropped_experts) for info in manifest.layers),
    }
    for fate, count in counted.items():
        stated = getattr(coverage, fate)
        if stated != count:
            yield Problem(where, f"{fate} is not the number of such tensors (expected {count}, found {stated})")
    if set(rows) != {info.layer for info in manifest.layers}:
        return  # without all rows the names cannot be told; the layer is a problem already
    sources = {layer: [row.source_expert for row in found] for layer, found in rows.items()}
    names = manifests.covered_names(manifest, sources)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        yield Problem(where, f"{len(twice)} source tensors have two fates, for example {twice[0]}")
    digest = manifests.names_digest(names)
    if digest != coverage.names_blake3:
        yield Problem(where, f"digest of the covered names differs (expected {coverage.names_blake3}, found {digest})")


def _recipe_problems(manifest: Manifest, rows: Rows, recipe: Recipe) -> Iterator[Problem]:
    """What was stored against what the recipe says about it."""
    for item in manifest.dropped:
        if not 0 <= item.rule < len(recipe.trunk) or not isinstance(recipe.trunk[item.rule], DropRule):
            yield Problem(item.name, f"dropped by rule {item.rule}, which drops nothing")
    for tensor in manifest.tensors:
        if tensor_limit(recipe, tensor) is None:
            yield Problem(tensor.name, f"no rule of the recipe stores it as {tensor.codec}")
    for layer, layer_rows in rows.items():
        for row in layer_rows:
            if expert_limit(recipe, row.codec.label) is None:
                yield Problem(record_name(layer, row.expert), f"the recipe stores no expert as {row.codec.label}")
