"""From a plan to a published container: units in parallel, one journal, every file durable before it has its name.

The order is fixed: units write into a file's temporary and are journalled once flushed; when all units of a file are
done it is read back, announced in the journal, renamed, and recorded as done; the manifest is the last file. A run that
finds a journal checks what stands on the disk against it and does the rest. Nothing here decides a byte.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_limits

from formats import layout
from formats.checkpoint import Checkpoint
from formats.container import open_container
from formats.errors import FormatError, Interrupted, UsageError
from formats.families import Model
from formats.index import pack_index
from formats.manifest import ASSETS_DIR, FILE_NAME, TRUNK_NAME, Manifest, decode, encode
from packer import assemble, durable
from packer.durable import Extent, Output
from packer.journal import Entry, FileBegun, FileDone, FileIntent, Journal, ShardSeen, open_or_create
from packer.limits import OverLimit, over_limits
from packer.lock import exclusive
from packer.outcome import Outcome, read_outcome
from packer.plan import Plan, Unit
from packer.preflight import (
    JOURNAL_NAME,
    LOCK_NAME,
    WORK_DIR,
    check_output,
    check_same_source,
    check_space,
    finished,
    inside,
    remove_work_dir,
    reset,
)
from packer.progress import Progress
from packer.shards import changed_shards, hash_shard, shards_of
from packer.system import SYSTEM, System, WriteLost
from packer.units import run_unit

COPY_BYTES = 8 << 20

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class PackResult:
    """What a pack came to."""

    path: Path
    container_id: str
    container_bytes: int
    records: int
    resumed_units: int
    already_complete: bool
    over_limit: tuple[OverLimit, ...]


@dataclass(frozen=True)
class _Job:
    """Everything that the steps of one pack share. ``abandon`` tells the units of this pack to end at once."""

    checkpoint: Checkpoint
    model: Model
    plan: Plan
    out: Path
    journal: Journal
    outcome: Outcome
    report: Report
    stop: threading.Event
    abandon: threading.Event
    executor: Executor
    jobs: int
    system: System

    def tell(self, what: str) -> None:
        """Report how far the pack is."""
        self.report(Progress(self.outcome.durable_bytes(self.plan), self.plan.container_bytes, what))


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
    executor: Executor | None = None,
    system: System = SYSTEM,
) -> PackResult:
    """Write the container that ``plan`` describes, or continue writing it.

    Args:
        checkpoint, model: the source.
        plan: from ``packer.plan.make_plan`` for this source.
        out: the container's directory; its parent must exist.
        jobs: units that run at the same time; the bytes do not depend on it.
        progress: called with numbers as the work goes on, from this thread.
        restart: forget an unfinished pack of this output and begin anew; a finished container is never touched.
        stop: set it to stop: running units are abandoned, what is journalled stays.
        executor: runs the units instead of a pool of ``jobs`` threads.
        system: the system calls.

    Raises:
        UsageError: the output is in the way, or was begun with other settings.
        FormatError: the source is damaged.
        EnvironmentProblem: disk, permissions, or another process at work.
        Interrupted: ``stop`` was set; the same call continues.
    """
    check_output(checkpoint.directory, out)
    stop = stop or threading.Event()
    manifest = finished(out, plan)
    if manifest is not None:
        hashes = _hash_all(checkpoint, manifest, jobs, progress or _silent, stop)
        check_same_source(checkpoint.directory, manifest, hashes)
        remove_work_dir(out, system=system)  # a run that was killed after its last rename leaves it
        return _result(out, plan, resumed=0, complete=True)
    if not restart:
        check_space(out, plan, system=system)  # before anything is written
    for directory in (out, out / WORK_DIR):
        durable.make_directory(directory, system=system)
    with exclusive(out / WORK_DIR / LOCK_NAME, system=system), ExitStack() as stack:
        if restart:
            reset(out, plan, system=system)
            check_space(out, plan, system=system)
        journal = open_or_create(out / WORK_DIR / JOURNAL_NAME, dict(plan.identity), system=system)
        stack.callback(journal.close)
        # One thread a job: sums of BLAS depend on how many threads share them.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        job = _Job(
            checkpoint,
            model,
            plan,
            out,
            journal,
            read_outcome(journal.entries, plan),
            progress or _silent,
            stop,
            threading.Event(),
            executor or stack.enter_context(ThreadPoolExecutor(jobs, thread_name_prefix="pack")),
            jobs,
            system,
        )
        resumed = len(job.outcome.units)
        _run(job)
    remove_work_dir(out, system=system)
    return _result(out, plan, resumed=resumed, complete=False)


def _silent(progress: Progress) -> None:
    """Nobody asked."""


def _hash_all(
    checkpoint: Checkpoint, manifest: Manifest, jobs: int, report: Report, stop: threading.Event
) -> list[ShardSeen]:
    """The digests of all shards that a finished container names, as they are now."""
    total = sum(shard.bytes for shard in manifest.source.shards)
    done: list[ShardSeen] = []
    with ThreadPoolExecutor(jobs, thread_name_prefix="hash") as pool:
        for seen in pool.map(
            lambda shard: hash_shard(checkpoint.directory, shard.name, stop=stop), manifest.source.shards
        ):
            done.append(seen)
            report(Progress(sum(item.bytes for item in done), total, f"comparing {seen.name}"))
    return done


def _result(out: Path, plan: Plan, *, resumed: int, complete: bool) -> PackResult:
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
        )


def _run(job: _Job) -> None:
    """All steps under the lock."""
    _check_files(job)
    for seen in changed_shards(job.checkpoint, job.outcome.shards, stop=job.stop):
        job.journal.append(seen)
    for name in job.plan.unit_files:
        if name not in job.outcome.files:
            _pack_file(job, name)
    _run_tasks(job, _hash_tasks(job, job.plan.shard_lengths))  # those that hold nothing but dropped tensors
    for asset in job.plan.draft.assets:
        if asset.path not in job.outcome.files:
            _copy_asset(job, asset.path, asset.bytes)
    _finish(job)


def _check_files(job: _Job) -> None:
    """Keep what stands on the disk as the journal says; forget the rest, so that it is made again."""
    for name, (length, digest) in list(job.outcome.files.items()):
        path = inside(job.out, name)
        job.tell(f"checking {name}")
        if not path.is_file() or path.is_symlink():
            job.outcome.forget(job.plan, name, keep_units=name in job.outcome.intents)
        elif durable.file_digest(path, system=job.system) != (length, bytes.fromhex(digest)):
            job.system.unlink(path)
            job.outcome.forget(job.plan, name)
        elif name in job.outcome.intents:
            durable.flush_directory(path.parent, system=job.system)
            job.journal.append(FileDone(name, length, digest))
    for name in job.plan.unit_files:
        path = job.out / name
        if name not in job.outcome.files and os.path.lexists(path):
            raise UsageError("file is in the way, and the journal does not know it", where=path, hint="remove it")


def _pack_file(job: _Job, name: str) -> None:
    """All units of one bank or of the trunk, then its publication."""
    path = job.out / name
    length = job.plan.file_bytes(name)
    if path.parent != job.out:
        durable.make_directory(path.parent, system=job.system)
    output = _continued(job, name, length) or _begun(job, name, length)
    try:
        tasks = _hash_tasks(job, shards_of(job.checkpoint, job.model, job.plan, name))
        tasks += [
            (unit.label, _unit_task(job, unit, output))
            for unit in job.plan.units_of(name)
            if unit.name not in job.outcome.units
        ]
        job.tell(name)
        _run_tasks(job, tasks)
    finally:
        durable.close(output, system=job.system)  # kept: what is journalled is durable in it
    _publish(job, name)


def _continued(job: _Job, name: str, length: int) -> Output | None:
    """The temporary of an earlier run, if this journal made it and it is whole; any other is deleted."""
    path = job.out / name
    if name not in job.outcome.begun:
        durable.discard(path, system=job.system)
        return None
    output = durable.reopen(path, system=job.system)
    if output is not None and os.fstat(output.fd).st_size != length:
        durable.abandon(output, system=job.system)
        return None
    return output


def _begun(job: _Job, name: str, length: int) -> Output:
    """A new temporary; it counts only once the journal knows it."""
    output = durable.create(job.out / name, system=job.system)
    try:
        durable.set_length(output, length, system=job.system)
        if name == TRUNK_NAME:
            durable.write_at(output, 0, layout.pack_trunk_header(length), system=job.system)
        durable.flush(output, system=job.system)
        entry = FileBegun(name)
        job.journal.append(entry)
    except WriteLost:
        raise  # the flush that failed has deleted it
    except BaseException:
        durable.abandon(output, system=job.system)
        raise
    job.outcome.apply(job.plan, entry)
    return output


def _hash_tasks(job: _Job, shards: Iterable[str]) -> list[tuple[str, Callable[[], Entry]]]:
    return [(shard, _hash_task(job, shard)) for shard in shards if shard not in job.outcome.shards]


def _run_tasks(job: _Job, tasks: list[tuple[str, Callable[[], Entry]]]) -> None:
    """Run labelled tasks, ``jobs`` at a time and in order, and journal what each brings."""
    tasks = tasks[::-1]
    running: dict[Future[Entry], str] = {}
    try:
        while tasks or running:
            while tasks and len(running) < job.jobs:
                label, task = tasks.pop()
                running[job.executor.submit(task)] = label
            ready, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in ready:
                label = running.pop(future)
                entry = future.result()
                job.journal.append(entry)
                job.outcome.apply(job.plan, entry)
                job.tell(label)
            if job.stop.is_set():
                raise Interrupted("stopped before the container was complete", where=job.out)
    finally:
        job.abandon.set()  # after an error the other units need not finish what will not be used
        wait(running)
        job.abandon.clear()


def _hash_task(job: _Job, shard: str) -> Callable[[], Entry]:
    return lambda: hash_shard(job.checkpoint.directory, shard, stop=job.abandon)


def _unit_task(job: _Job, unit: Unit, output: Output) -> Callable[[], Entry]:
    return lambda: run_unit(job.checkpoint, job.model, job.plan, unit, output, stop=job.abandon, system=job.system)


def _publish(job: _Job, name: str) -> None:
    """Read back, announce, rename, record: the order of the durable commit."""
    path = job.out / name
    temporary = durable.temporary_path(path)
    extents = [Extent(start, length, digest) for start, length, digest in job.outcome.extents(job.plan, name)]
    try:
        digest = durable.read_back(temporary, extents, system=job.system)
    except WriteLost:
        durable.discard(path, system=job.system)
        raise
    length = job.plan.file_bytes(name)
    job.journal.append(FileIntent(name, length, digest.hex()))
    durable.publish(path, system=job.system)
    job.journal.append(FileDone(name, length, digest.hex()))
    job.outcome.files[name] = (length, digest.hex())


def _write(job: _Job, name: str, pieces: Iterable[bytes]) -> None:
    """A file that is written in one go."""

    def announce(length: int, digest: bytes) -> None:
        job.journal.append(FileIntent(name, length, digest.hex()))

    length, digest = durable.write_file(job.out / name, pieces, before_rename=announce, system=job.system)
    job.journal.append(FileDone(name, length, digest.hex()))
    job.outcome.files[name] = (length, digest.hex())


def _copy_asset(job: _Job, path: str, length: int) -> None:
    source = job.checkpoint.directory / path.removeprefix(f"{ASSETS_DIR}/")
    for parent in reversed([item for item in (job.out / path).parents if job.out in item.parents]):
        durable.make_directory(parent, system=job.system)
    try:
        with source.open("rb") as file:
            _write(job, path, iter(lambda: file.read(COPY_BYTES), b""))
    except FileNotFoundError:
        raise FormatError("file is missing", where=source) from None
    found = job.outcome.files[path][0]
    if found != length:
        raise FormatError("file changed since the plan was made", where=source, expected=length, found=found)


def _finish(job: _Job) -> None:
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
    _write(job, manifest.index.file, [pack_index(rows)])
    _write(job, FILE_NAME, [data])
    job.tell("complete")
