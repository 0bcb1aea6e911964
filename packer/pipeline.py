"""From a plan to a published container: units in parallel, one journal, every file durable before it has its name.

The order is fixed: units write into a file's temporary and are journalled once flushed; when all units of a file are
done it is read back, announced in the journal, renamed, and recorded as done; the manifest is the last file. A run that
finds a journal checks what stands on the disk against it and does the rest. Nothing here decides a byte.

Units go step by step (``packer.steps``), so that shards may come one after another and go as they are used up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from threadpoolctl import threadpool_limits

from formats.checkpoint import Checkpoint
from formats.container import open_container
from formats.errors import Interrupted
from formats.families import Model
from formats.index import pack_index
from formats.manifest import FILE_NAME, WORK_DIR, Manifest, decode, encode
from packer import assemble
from packer.commit import check_files, copy_asset, open_output, publish, write
from packer.job import Job, Releasable, Report
from packer.limits import OverLimit, over_limits
from packer.outcome import read_outcome
from packer.planning.plan import Plan, Unit
from packer.pool import Pool
from packer.preflight import (
    JOURNAL_NAME,
    LOCK_NAME,
    check_output,
    check_same_source,
    check_shards,
    check_space,
    check_staging_space,
    finished,
    remove_work_dir,
    reset,
)
from packer.progress import Progress
from packer.release import release_used, settle_releases
from packer.shards import hash_again, hash_shard, is_same_file
from packer.staging import Supply
from packer.steps import Step, consumers, make_steps, unit_shards
from packer.storage import durable
from packer.storage.durable import Output
from packer.storage.journal import Entry, ShardSeen, open_or_create
from packer.storage.lock import exclusive
from packer.storage.system import SYSTEM, System
from packer.units import run_unit


@dataclass(frozen=True)
class PackResult:
    """What a pack came to. ``released`` are the shards that this run deleted, ``freed_bytes`` what that gave back.

    ``weighted_errors`` are those of the experts whose columns statistics weigh; a container does not hold them.
    """

    path: Path
    container_id: str
    container_bytes: int
    records: int
    resumed_units: int
    already_complete: bool
    over_limit: tuple[OverLimit, ...]
    released: tuple[str, ...] = ()
    freed_bytes: int = 0
    weighted_errors: tuple[float, ...] = ()


def pack(
    checkpoint: Checkpoint,
    model: Model,
    plan: Plan,
    out: Path,
    *,
    jobs: int,
    progress: Report | None = None,
    restart: bool = False,
    stop: threading.Event | None = None,
    expected: Mapping[str, str] = MappingProxyType({}),
    supply: Supply | None = None,
    release: Releasable | None = None,
    system: System = SYSTEM,
) -> PackResult:
    """Write the container that ``plan`` describes, or continue writing it.

    Args:
        checkpoint, model: the source.
        plan: from ``packer.planning.plan.make_plan`` for this source.
        out: the container's directory; its parent must exist.
        jobs: units that run at the same time; the bytes do not depend on it.
        progress: called with numbers as the work goes on, from this thread.
        restart: forget an unfinished pack of this output and begin anew; a finished container is never touched.
        stop: set it to stop: running units are abandoned, what is journalled stays.
        expected: SHA-256 in hex of shards, as their repository says it (``packer.fetch.provenance``).
        supply: brings shards that are not here; it must serve the checkpoint's folder.
        release: deletes shards once everything made from them is durable; without it nothing of the source ever is.
        system: the system calls.

    Raises:
        UsageError: the output is in the way, or was begun with other settings; or a limit is too small.
        FormatError: the source is damaged, or shards that are still needed were released.
        EnvironmentProblem: disk, permissions, network, or another process at work.
        Interrupted: ``stop`` was set; the same call continues.
    """
    check_output(checkpoint.directory, out)
    stop = stop or threading.Event()
    manifest = finished(out, plan)
    if manifest is not None:
        hashes = _hash_all(checkpoint, manifest, expected, jobs, progress or _silent, stop)
        check_same_source(checkpoint.directory, manifest, hashes)
        remove_work_dir(out, system=system)  # a run that was killed after its last rename leaves it
        return _result(out, plan, resumed=0, complete=True)
    staged = 0 if supply is None else sum(supply.held().values())
    if supply is not None and plan.staging_apart:
        check_staging_space(supply.directory, plan.staging_bytes, staged, system=system)
    if not restart:
        check_space(out, plan, staged=staged, system=system)  # before anything is written
    elif supply is None:
        check_shards(checkpoint.directory, plan.shard_lengths, expected)  # what is gone cannot be begun anew
    for directory in (out, out / WORK_DIR):
        durable.make_directory(directory, system=system)
    with exclusive(out / WORK_DIR / LOCK_NAME, system=system), ExitStack() as stack:
        if restart:
            reset(out, plan, system=system)
            check_space(out, plan, staged=staged, system=system)
        journal = open_or_create(out / WORK_DIR / JOURNAL_NAME, dict(plan.identity), system=system)
        stack.callback(journal.close)
        # One thread a job: sums of BLAS depend on how many threads share them.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        needs = unit_shards(checkpoint, model, plan)
        job = Job(
            checkpoint,
            model,
            plan,
            out,
            journal,
            read_outcome(journal.entries, plan),
            progress or _silent,
            stop,
            threading.Event(),
            stack.enter_context(Pool(jobs, "pack")),
            system,
            expected,
            needs,
            consumers(plan, needs),
            supply,
            release,
        )
        resumed = len(job.outcome.units)
        _run(job)
    remove_work_dir(out, system=system)
    result = _result(out, plan, resumed=resumed, complete=False, freed=job.freed)
    errors = (record.weighted_error for record in job.outcome.records.values())
    return replace(result, weighted_errors=tuple(error for error in errors if error is not None))


def _silent(progress: Progress) -> None:
    """Nobody asked."""


def _hash_all(
    checkpoint: Checkpoint,
    manifest: Manifest,
    expected: Mapping[str, str],
    jobs: int,
    report: Report,
    stop: threading.Event,
) -> list[ShardSeen]:
    """The digests of all shards that a finished container names: as they are now, or as their repository has them."""
    total = sum(shard.bytes for shard in manifest.source.shards)
    done: list[ShardSeen] = []

    def digest(name: str, length: int) -> ShardSeen:
        if name in expected and not os.path.lexists(checkpoint.directory / name):
            return ShardSeen(name, length, expected[name], (0, 0, 0, 0))
        return hash_shard(checkpoint.directory, name, stop=stop, expected=expected.get(name))

    with Pool(jobs, "hash") as pool:
        for seen in pool.in_order(lambda shard: digest(shard.name, shard.bytes), manifest.source.shards):
            done.append(seen)
            report(Progress(sum(item.bytes for item in done), total, f"comparing {seen.name}"))
    return done


def _result(
    out: Path, plan: Plan, *, resumed: int, complete: bool, freed: Mapping[str, int] = MappingProxyType({})
) -> PackResult:
    with open_container(out) as container:
        rows = {info.layer: container.rows(info.layer) for info in container.manifest.layers}
        return PackResult(
            out,
            container.container_id,
            plan.container_bytes,
            container.manifest.experts.count,
            resumed,
            complete,
            tuple(over_limits(container.manifest, rows, plan.recipe)),
            tuple(sorted(freed)),
            sum(freed.values()),
        )


def _run(job: Job) -> None:
    """All steps under the lock."""
    check_files(job)
    if job.supply is not None:
        job.supply.adopt(job.stop)
    _publish_complete(job, job.plan.unit_files)  # as in a run without interruptions, before the shards go
    settle_releases(job)
    _hash_changed(job)
    here = None if job.supply is None else job.supply.here()
    steps = make_steps(job.plan, job.needs, done=job.outcome.units, hashed=job.outcome.shards, here=here)
    if job.supply is not None:
        job.supply.begin(steps, here or ())
    else:
        check_shards(job.checkpoint.directory, {name for step in steps for name in step.shards}, job.expected)
    for number, step in enumerate(steps):
        _take_step(job, number, step)
    for asset in job.plan.draft.assets:
        if asset.path not in job.outcome.files:
            copy_asset(job, asset.path, asset.bytes)
    _finish(job)


def _hash_changed(job: Job) -> None:
    """Shards that were touched since an earlier run hashed them are hashed again."""
    directory = job.checkpoint.directory
    for name, seen in sorted(job.outcome.shards.items()):
        known_gone = job.supply is not None or name in job.outcome.released
        if known_gone and not os.path.lexists(directory / name):
            continue
        if not is_same_file(directory, seen):
            job.note(hash_again(directory, seen, stop=job.stop, expected=job.expected.get(name)))


def _take_step(job: Job, number: int, step: Step) -> None:
    """The units of a step, the publication of files that are complete with it, the release of shards used up."""
    if job.supply is not None:
        job.supply.require(number, step, stop=job.stop, tell=job.tell)
    with ExitStack() as stack:
        outputs: dict[str, Output] = {}
        for name in dict.fromkeys(unit.file for unit in step.units):
            outputs[name] = open_output(job, name)
            # Kept: what is journalled is durable in it.
            stack.callback(durable.close, outputs[name], system=job.system)
        tasks = [
            (shard, _hash_task(job, shard))
            for shard in step.shards
            if shard not in job.outcome.shards
            or (job.supply is not None and not is_same_file(job.checkpoint.directory, job.outcome.shards[shard]))
        ]
        tasks += [(unit.label, _unit_task(job, unit, outputs[unit.file])) for unit in step.units]
        for name in outputs:
            job.tell(name)
        _run_tasks(job, tasks)
    _publish_complete(job, outputs)
    release_used(job, step.shards)


def _publish_complete(job: Job, names: Iterable[str]) -> None:
    """Publish those of the files ``names`` all of whose units are done."""
    for name in names:
        units = job.plan.units_of(name)
        if name not in job.outcome.files and all(unit.name in job.outcome.units for unit in units):
            publish(job, name)


def _run_tasks(job: Job, tasks: list[tuple[str, Callable[[], Entry]]]) -> None:
    """Run labelled tasks, as many at a time as there are threads and in order, and journal what each brings."""
    tasks = tasks[::-1]
    running: dict[Future[Entry], str] = {}
    try:
        while tasks or running:
            while tasks and len(running) < job.pool.threads:
                label, task = tasks.pop()
                running[job.pool.submit(task)] = label
            for future in job.pool.some_done(running):
                label = running.pop(future)
                job.note(future.result())
                job.tell(label)
            if job.stop.is_set():
                raise Interrupted("stopped before the container was complete", where=job.out)
    finally:
        job.abandon.set()  # after an error the other units need not finish what will not be used
        job.pool.settle(running)
        job.abandon.clear()


def _hash_task(job: Job, shard: str) -> Callable[[], Entry]:
    """The digest of a shard; one that came a second time must be what it was."""
    directory, expected = job.checkpoint.directory, job.expected.get(shard)
    before = job.outcome.shards.get(shard)
    if before is not None:
        return lambda: hash_again(directory, before, stop=job.abandon, expected=expected)
    return lambda: hash_shard(directory, shard, stop=job.abandon, expected=expected)


def _unit_task(job: Job, unit: Unit, output: Output) -> Callable[[], Entry]:
    return lambda: run_unit(job.checkpoint, job.model, job.plan, unit, output, stop=job.abandon, system=job.system)


def _finish(job: Job) -> None:
    """Index and manifest, the manifest last."""
    if job.stop.is_set():
        raise Interrupted("stopped before the container was complete", where=job.out)
    draft, outcome = job.plan.draft, job.outcome
    rows = assemble.index_rows(job.plan.layers, outcome.records)
    manifest = assemble.complete_manifest(
        draft,
        rows,
        tensors=outcome.tensors,
        shards={name: seen.sha256 for name, seen in outcome.shards.items()},
        assets={asset.path: outcome.files[asset.path][1] for asset in draft.assets},
    )
    data = encode(manifest)
    decode(data)  # what a reader would refuse must never get its name
    write(job, manifest.index.file, [pack_index(rows)])
    write(job, FILE_NAME, [data])
    job.tell("complete")
