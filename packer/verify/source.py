"""A container's manifest against its source as a whole: model, tensor names and their fates, shards, assets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence

from blake3 import blake3

from formats.checkpoint import Checkpoint
from formats.errors import EnvironmentProblem
from formats.families import Model, Role
from formats.files import file_bytes, read_exactly
from formats.manifest import ASSETS_DIR, AssetInfo, Manifest, ShardInfo
from formats.spelling import counted
from packer.verify.findings import CHUNK_BYTES, Problem, problem_of
from packer.verify.structure import Rows

_OTHER = "not the source that the container was packed from"
_SHOWN_FIELDS = 3  # of an architecture that differs
_SHOWN = 20  # tensors named one by one when many have no fate

Step = Callable[[int], None]


def model_problems(manifest: Manifest, checkpoint: Checkpoint, model: Model) -> Iterator[Problem]:
    """What the manifest says about model and source against what the checkpoint says."""
    there, here = model.architecture, manifest.architecture
    for name in here.__struct_fields__:
        yield from _differs(f"manifest.json: architecture.{name}", getattr(there, name), getattr(here, name))
    where = "manifest.json: experts"
    yield from _differs(f"{where}.shapes", there.expert_shapes, manifest.experts.shapes)
    for matrix, templates in model.expert_templates.items():
        yield from _differs(f"{where}.tensors.{matrix}", templates, manifest.experts.tensors[matrix])
    for info in manifest.layers:
        yield from _differs(f"layer {info.layer}: source_experts", there.experts, info.source_experts)
    yield from _differs("manifest.json: source.tensors", len(checkpoint.tensors), manifest.source.tensors)
    total = sum(tensor.bytes for tensor in checkpoint.tensors.values())
    yield from _differs("manifest.json: source.bytes", total, manifest.source.bytes)


def other_source(
    manifest: Manifest, checkpoint: Checkpoint, model: Model, covered: set[str], problems: Sequence[Problem]
) -> Iterator[Problem]:
    """One finding if the checkpoint is not the container's source at all, so that it explains the others.

    A source whose shards all match is the right one, whatever else is wrong. Else it is another one if its
    architecture differs, if it lacks most of the tensors, or if no shard matches.

    Args:
        manifest, checkpoint, model: of the container and of the source.
        covered: names of the source tensors that the container covers.
        problems: what is known about the source's shards and more; a shard without a problem matches.
    """
    shards = [shard.name for shard in manifest.source.shards]
    matching = len(set(shards) - {problem.where for problem in problems})
    if matching == len(shards):
        return
    there, here = model.architecture, manifest.architecture
    differing = [name for name in here.__struct_fields__ if getattr(there, name) != getattr(here, name)]
    common = len(covered & checkpoint.tensors.keys())
    if not differing and 2 * common >= len(covered) and matching:
        return
    facts = [f"{name} {getattr(there, name)}, not {getattr(here, name)}" for name in differing[:_SHOWN_FIELDS]]
    facts.append(f"{common} of {counted(len(covered), 'tensor name')} in common")
    facts.append(f"{matching} of {counted(len(shards), 'shard')} the same")
    yield Problem("source", f"{_OTHER}: {'; '.join(facts)}")


def is_other_source(problems: Sequence[Problem]) -> bool:
    """Whether findings begin with that of :func:`other_source`."""
    return bool(problems) and problems[0].what.startswith(_OTHER)


def _differs(where: str, source: object, container: object) -> Iterator[Problem]:
    if source != container:
        yield Problem(where, f"differs from the source (source {source}, container {container})")


def unaccounted_tensors(
    manifest: Manifest, covered: set[str], checkpoint: Checkpoint, model: Model
) -> tuple[list[str], list[Problem]]:
    """Source tensors without a fate: neither packed, copied, dropped by a rule nor outside a partial selection.

    Args:
        manifest: of the container.
        covered: from :func:`formats.manifest.covered_names`.
        checkpoint, model: the source.

    Returns:
        Their names, and the findings; names that the source does not have are findings too.
    """
    problems = [
        Problem(name, "covered by the container, yet the source has no such tensor")
        for name in sorted(covered - checkpoint.tensors.keys())[:_SHOWN]
    ]
    outside = [name for name in checkpoint.tensors if name not in covered]
    missing = [name for name in outside if not is_omitted(manifest, model.role(name))]
    problems += [
        Problem(name, "source tensor has no fate: not packed, copied, dropped or omitted") for name in missing[:_SHOWN]
    ]
    if len(missing) > _SHOWN:
        problems.append(Problem("source", f"{len(missing)} tensors have no fate, {_SHOWN} of them are listed"))
    omitted = len(outside) - len(missing)
    if omitted != manifest.coverage.omitted:
        problems.append(
            Problem(
                "manifest.json: coverage", f"omitted differs (expected {omitted}, found {manifest.coverage.omitted})"
            )
        )
    return missing, problems


def is_omitted(manifest: Manifest, role: Role | None) -> bool:
    """Whether the selection of a partial container leaves out a tensor of this role."""
    partial = manifest.partial
    if partial is None or role is None:
        return False
    if role.layer not in partial.layers:
        return True
    return role.kind == "expert" and partial.experts is not None and role.expert not in partial.experts


def covered_by(manifest: Manifest, rows: Rows) -> dict[int, list[int]]:
    """The source experts of each layer whose rows could be read."""
    return {info.layer: [row.source_expert for row in rows.get(info.layer, ())] for info in manifest.layers}


def shard_list_problems(manifest: Manifest, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Names and lengths of the source files."""
    there = {shard.name: shard.bytes for shard in checkpoint.shards}
    here = {shard.name: shard.bytes for shard in manifest.source.shards}
    for name, length in here.items():
        if name not in there:
            yield Problem(name, "the container was made from this file, the source does not have it")
        elif there[name] != length:
            yield Problem(name, f"length differs (source {there[name]}, recorded {length})")
    if manifest.partial is None:
        for name in there.keys() - here.keys():
            yield Problem(name, "file of the source that the container was not made from")


def shard_problems(checkpoint: Checkpoint, shard: ShardInfo, step: Step) -> list[Problem]:
    """SHA-256 of a whole source file."""
    hasher = hashlib.sha256()
    try:
        fd = os.open(checkpoint.directory / shard.name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return [Problem(shard.name, f"cannot be read: {error.strerror}")]
    try:
        length = file_bytes(fd)
        for start in range(0, length, CHUNK_BYTES):
            piece = read_exactly(fd, start, min(CHUNK_BYTES, length - start), where=shard.name)
            hasher.update(piece)
            step(len(piece))
    except EnvironmentProblem as error:
        return [problem_of(error, shard.name)]
    finally:
        os.close(fd)
    if hasher.hexdigest() == shard.sha256:
        return []
    return [Problem(shard.name, f"SHA-256 differs (recorded {shard.sha256}, found {hasher.hexdigest()})")]


def asset_problems(manifest: Manifest, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The files that go along: the same set, the same bytes."""
    here: dict[str, AssetInfo] = {asset.path: asset for asset in manifest.assets}
    there = {f"{ASSETS_DIR}/{name}": name for name in checkpoint.assets}
    for path in sorted(here.keys() - there.keys()):
        yield Problem(path, "the source has no such file")
    for path, name in sorted(there.items()):
        if path not in here:
            yield Problem(path, "file of the source that the container lacks")
            continue
        try:
            digest = blake3((checkpoint.directory / name).read_bytes()).hexdigest()
        except OSError as error:
            yield Problem(path, f"the source's file cannot be read: {error.strerror}")
            continue
        if digest != here[path].blake3:
            yield Problem(path, f"bytes differ from the source's (recorded {here[path].blake3}, source {digest})")
