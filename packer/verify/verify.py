"""Proving a container: that it is whole (``structure``), undamaged (``hashes``), and what its source said (``parity``).

Each level includes the one before. Damage never stops a verification, it becomes a finding; only a container that
cannot be opened at all is refused. The order of the findings does not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.container import Container, open_container
from formats.errors import FormatError, UsageError
from formats.families import Model, bind
from formats.index import IndexRow
from formats.manifest import Manifest, ShardInfo, TensorInfo, covered_names
from packer.progress import Progress
from packer.recipe.recipe import recipe_from_builtins
from packer.recipe.types import Recipe
from packer.verify.findings import Problem, Work
from packer.verify.headers import batches, check_headers
from packer.verify.parity import Compared, Source, compare_record, compare_tensor
from packer.verify.record_bytes import check_range, check_record, check_trunk_padding
from packer.verify.report import ErrorSummary, LeftOut, Parity, VerifyReport
from packer.verify.source import (
    asset_problems,
    covered_by,
    is_other_source,
    model_problems,
    other_source,
    shard_list_problems,
    shard_problems,
    unaccounted_tensors,
)
from packer.verify.structure import Rows, readable_rows, structure_problems

LEVELS = ("structure", "hashes", "parity")
LOGITS = "logits"  # one more level, in packer.verify.logits: it runs the model

Report = Callable[[Progress], None]


def verify(
    container_path: Path | str,
    *,
    level: str = "hashes",
    source: Path | str | None = None,
    sample: float | None = None,
    jobs: int = 1,
    progress: Report | None = None,
) -> VerifyReport:
    """Verify a container.

    Args:
        container_path: its directory.
        level: ``structure`` (files, headers, padding, counts, limits), ``hashes`` (every byte against its digest) or
            ``parity`` (every source tensor against the container); each includes the one before.
        source: the checkpoint directory, for ``parity``.
        sample: share of the records to look at, above 0 and at most 1, spread evenly: at least one of each layer, and
            always the last of the last layer. Then the digests of whole shards are left out too.
        jobs: threads.
        progress: called with numbers as the work goes on, from any of the threads.

    Raises:
        UsageError: an unknown level, a sample of nothing, ``parity`` without a source.
        FormatError: too damaged to be opened (the container), or not a sound checkpoint (the source).

    Example:
        >>> verify("model.moepack").ok  # doctest: +SKIP
        True
    """
    if level not in LEVELS:
        raise UsageError("unknown level", where="level", expected=", ".join(LEVELS), found=repr(level))
    if level == "parity" and source is None:
        raise UsageError("level parity compares with a source, and none is given", hint="add --source SOURCE")
    if sample is not None and not 0.0 < sample <= 1.0:
        what = "sample selects nothing" if sample <= 0 else "sample is no share"
        raise UsageError(what, where="sample", expected="above 0 and at most 1", found=sample)
    if jobs < 1:
        raise UsageError("no thread to work with", where="jobs", expected="1 or more", found=jobs)
    with _open(container_path) as container:
        if level != "parity" or source is None:
            return _verify(container, None, level, sample, jobs, progress)
        with open_checkpoint(source) as checkpoint:
            return _verify(container, checkpoint, level, sample, jobs, progress)


def _open(path: Path | str) -> Container:
    """Open the container; damage that prevents it is refused with a hint that says so."""
    try:
        return open_container(path)
    except FormatError as error:
        error.hint = error.hint or "the container is too damaged to be checked: fetch or pack it again"
        raise


@dataclass(frozen=True)
class _Run:
    """What the steps of one verification share."""

    container: Container
    source: Source | None
    deep: bool
    jobs: int
    work: Work


def _verify(
    container: Container,
    checkpoint: Checkpoint | None,
    level: str,
    sample: float | None,
    jobs: int,
    progress: Report | None,
) -> VerifyReport:
    manifest = container.manifest
    model = None if checkpoint is None else bind(checkpoint)  # before the long part: it may refuse
    rows, problems = readable_rows(container)
    chosen = [row for part in choose_records(rows, sample) for row in part]
    total = _work_bytes(manifest, chosen, level, checkpoint, whole=sample is None)
    source = None if checkpoint is None else Source(checkpoint, _recipe(manifest))
    run = _Run(container, source, level != "structure", jobs, Work(total, progress))
    problems += structure_problems(container, rows)
    records = _records(run, chosen)
    tensors = _tensors(run)
    problems += [problem for result in (*records, *tensors) for problem in result.problems]
    problems += _files(run)
    parity = None
    if checkpoint is not None and model is not None:
        parity, more = _parity(run, checkpoint, model, rows, records, tensors, whole=sample is None)
        problems = more[:1] + problems + more[1:] if is_other_source(more) else problems + more
    left_out = None
    if sample is not None:
        shards = len(manifest.source.shards) if parity else 0
        left_out = LeftOut(manifest.experts.count - len(chosen), shards, tuple(_not_chosen(rows, chosen)))
    return VerifyReport(
        level,
        container.container_id,
        len(chosen),
        len(manifest.tensors),
        tuple(dict.fromkeys(problems)),
        left_out,
        parity,
    )


def choose_records(rows: Rows, sample: float | None) -> list[tuple[IndexRow, ...]]:
    """The records to look at, layer by layer: all, or a share of each layer spread evenly, at least one.

    The last record of the last layer is always among them.
    """
    if sample is None:
        return list(rows.values())
    chosen = []
    for number, part in enumerate(rows.values()):
        count = max(1, math.ceil(sample * len(part)))
        places = {(2 * place + 1) * len(part) // (2 * count) for place in range(count)}
        if number == len(rows) - 1:
            places.add(len(part) - 1)
        chosen.append(tuple(part[place] for place in sorted(places)))
    return chosen


def _not_chosen(rows: Rows, chosen: Sequence[IndexRow]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The experts of each layer that a sample leaves out."""
    taken = {(row.layer, row.expert) for row in chosen}
    for layer, part in rows.items():
        experts = tuple(row.expert for row in part if (layer, row.expert) not in taken)
        if experts:
            yield layer, experts


def _recipe(manifest: Manifest) -> Recipe | None:
    """The recipe of the manifest; one that cannot be read is a finding of the structure."""
    try:
        return recipe_from_builtins(manifest.recipe, where="manifest.json: recipe", error=FormatError)
    except FormatError:
        return None


def _work_bytes(
    manifest: Manifest, chosen: Sequence[IndexRow], level: str, checkpoint: Checkpoint | None, *, whole: bool
) -> int:
    """Bytes that will be read, for progress: an estimate at ``structure``, where hardly any are."""
    total = sum(row.bytes for row in chosen)
    if level != "structure":
        total += sum(info.bytes for info in manifest.tensors) + manifest.index.bytes
        total += sum(asset.bytes for asset in manifest.assets)
    if checkpoint is not None:
        source = sum(tensor.bytes for tensor in checkpoint.tensors.values())
        total += source + (sum(shard.bytes for shard in manifest.source.shards) if whole else 0)
    return total


def _records(run: _Run, chosen: Sequence[IndexRow]) -> list[Compared]:
    if not run.deep:
        return _headers(run, chosen)

    def one(row: IndexRow) -> Compared:
        what = f"layer {row.layer}"

        def step(count: int) -> None:
            run.work.done(count, what)

        problems = check_record(run.container, row, deep=True, step=step)
        if run.source is None:
            return Compared(tuple(problems))
        compared = compare_record(run.container, run.source, row, step)
        return Compared((*problems, *compared.problems), compared.errors, compared.exact)

    return run.work.in_order(one, chosen, run.jobs)


def _headers(run: _Run, chosen: Sequence[IndexRow]) -> list[Compared]:
    """The records at level ``structure``: K3 has so many that a task for each would cost more than it."""

    def some(rows: Sequence[IndexRow]) -> list[Compared]:
        what = f"layer {rows[0].layer}"
        problems = check_headers(run.container, rows, step=lambda count: run.work.done(count, what))
        return [Compared(tuple(found)) for found in problems]

    return [result for part in run.work.in_order(some, batches(chosen), run.jobs) for result in part]


def _tensors(run: _Run) -> list[Compared]:
    trunk = run.container.manifest.trunk.file

    def one(info: TensorInfo) -> Compared:
        def step(count: int) -> None:
            run.work.done(count, info.name)

        problems: list[Problem] = []
        if run.deep:
            problems = check_range(run.container, trunk, info.offset, info.bytes, info.blake3, info.name, step)
        if run.source is None:
            return Compared(tuple(problems))
        compared = compare_tensor(run.container, run.source, info, step)
        return Compared((*problems, *compared.problems), compared.errors, compared.exact)

    padding = Compared(tuple(check_trunk_padding(run.container)))
    return [padding, *run.work.in_order(one, run.container.manifest.tensors, run.jobs)]


def _files(run: _Run) -> list[Problem]:
    """The index as a whole, and the assets."""
    if not run.deep:
        return []
    manifest = run.container.manifest
    whole = [(manifest.index.file, manifest.index.bytes, manifest.index.blake3)]
    whole += [(asset.path, asset.bytes, asset.blake3) for asset in manifest.assets]

    def one(item: tuple[str, int, str]) -> list[Problem]:
        name, length, digest = item
        return check_range(run.container, name, 0, length, digest, name, lambda count: run.work.done(count, name))

    return [problem for part in run.work.in_order(one, whole, run.jobs) for problem in part]


def _parity(
    run: _Run,
    checkpoint: Checkpoint,
    model: Model,
    rows: Rows,
    records: Sequence[Compared],
    tensors: Sequence[Compared],
    *,
    whole: bool,
) -> tuple[Parity, list[Problem]]:
    """What only the source as a whole can show, another source before all, and the figures of the comparison."""
    manifest = run.container.manifest
    problems = list(model_problems(manifest, checkpoint, model))
    covered = set(covered_names(manifest, covered_by(manifest, rows)))
    unaccounted, more = unaccounted_tensors(manifest, covered, checkpoint, model)
    problems += more
    problems += shard_list_problems(manifest, checkpoint)
    problems += asset_problems(manifest, checkpoint)
    if whole:
        present = {shard.name for shard in checkpoint.shards}
        shards = [shard for shard in manifest.source.shards if shard.name in present]

        def one(shard: ShardInfo) -> list[Problem]:
            return shard_problems(checkpoint, shard, lambda count: run.work.done(count, shard.name))

        problems += [problem for part in run.work.in_order(one, shards, run.jobs) for problem in part]
    figures = Parity(
        _summary(records),
        _summary(tensors),
        sum(result.exact for result in (*records, *tensors)),
        len(checkpoint.tensors),
        len(unaccounted),
        manifest.coverage.dropped,
        manifest.coverage.omitted,
    )
    return figures, [*other_source(manifest, checkpoint, model, covered, problems), *problems]


def _summary(results: Sequence[Compared]) -> ErrorSummary:
    errors = [error for result in results for error in result.errors if math.isfinite(error)]
    return ErrorSummary(math.fsum(errors) / len(errors), max(errors)) if errors else ErrorSummary(None, None)
