"""A whole repository: what is there, what is to come, and then one file after the other until the folder is complete.

The caller says what to do with progress and how to stop; nothing is printed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from formats.assets import INDEX_NAME
from formats.checkpoint import SINGLE_NAME, read_shard_names
from formats.errors import EnvironmentProblem, Interrupted, MoepackError, UsageError
from packer.fetch.hub import Access
from packer.fetch.listing import WORK_DIR, Fetched, Listing, RemoteFile, Selection, needs_index, select, usual_shards
from packer.fetch.local import check_space, compare, free_bytes
from packer.fetch.partial import partial_bytes
from packer.fetch.receipt import (
    Receipt,
    check_same_source,
    new_receipt,
    read_receipt,
    untouched,
    write_receipt,
)
from packer.fetch.transfer import Conditions, fetch_file
from packer.pool import Pool
from packer.progress import Progress
from packer.storage import durable
from packer.storage.lock import exclusive
from packer.verify.findings import Problem

LOCK_NAME = "lock"
REPORT_BYTES = 1 << 20  # progress is told when so many bytes have come together

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Outlook:
    """What a fetch will do, told before it does it.

    Attributes:
        listing: the repository.
        selection: what of it is wanted.
        missing: files to fetch.
        missing_bytes: that are to come over the network.
        partial_bytes: that an earlier run left behind of these files.
        released: files that a pack has used and deleted, and that are not fetched again.
        space_known: whether the file system said how much is free.
    """

    listing: Listing
    selection: Selection
    missing: tuple[RemoteFile, ...]
    missing_bytes: int
    partial_bytes: int
    released: tuple[str, ...]
    space_known: bool


@dataclass(frozen=True)
class FetchResult:
    """What a fetch came to. ``received_bytes`` came over the network in this run, bodies only."""

    directory: Path
    listing: Listing
    selection: Selection
    fetched: tuple[str, ...]
    received_bytes: int
    released: tuple[str, ...]


@dataclass(frozen=True)
class CheckResult:
    """What a check found; nothing was written."""

    directory: Path
    listing: Listing
    checked: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Wishes:
    """How a repository is fetched.

    Attributes:
        jobs: files at a time.
        rehash: compare files with their digests even if they seem untouched.
        released: fetch files again that a pack has used and deleted.
        everything: other weights and large files too.
        free: says how much space is free.
    """

    jobs: int = 4
    rehash: bool = False
    released: bool = False
    everything: bool = False
    free: Callable[[Path], int | None] = free_bytes


class Meter:
    """Adds up bytes from several threads and tells them on, not too often."""

    def __init__(self, report: Report, total: int, done: int = 0) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._total = total
        self._done = done
        self._told = done
        self._what = ""

    def add(self, count: int) -> None:
        """``count`` more bytes are done; a negative number takes some back."""
        with self._lock:
            self._done += count
            if abs(self._done - self._told) >= REPORT_BYTES or self._done == self._total:
                self._tell()

    def at(self, what: str) -> None:
        """What is being done now."""
        with self._lock:
            self._what = what
            self._tell()

    def _tell(self) -> None:
        self._told = self._done
        self._report(Progress(max(0, self._done), self._total, self._what))


@dataclass
class Folder:
    """A folder whose lock is held, and its receipt, which is written whenever it changes. Safe between threads."""

    directory: Path
    receipt: Receipt
    conditions: Conditions
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def update(self, change: Callable[[Receipt], Receipt]) -> None:
        """Change the receipt and write it."""
        with self._lock:
            changed = change(self.receipt)
            if changed != self.receipt:
                write_receipt(self.directory, changed, system=self.conditions.system)
                self.receipt = changed

    def note_present(self, fetched: Fetched) -> None:
        """Remember a file that was compared with its digest."""
        self.update(lambda receipt: receipt.with_present(fetched))

    def present(self, file: RemoteFile, *, rehash: bool, report: Callable[[int], None]) -> bool:
        """Whether a file is there with the right bytes; it is hashed if the receipt cannot vouch for it.

        Raises:
            UsageError: another file of that name is there, which this program did not write.
        """
        entry = self.receipt.entries[file.path]
        if not rehash and untouched(self.directory, entry):
            report(file.bytes)
            return True
        found = compare(self.directory, file, stop=self.conditions.stop, report=report)
        if isinstance(found, Fetched):
            self.note_present(found)
            return True
        if found != "is absent" and "LFS pointer" not in found and entry.sha256 is None:
            raise UsageError(
                f"another file is in the way: it {found}",
                where=self.directory / file.path,
                hint="remove it, or choose another folder",
            )
        if entry.state == "present":
            self.update(lambda receipt: receipt.with_listed(file.path))
        return False


def open_folder(directory: Path, listing: Listing, conditions: Conditions) -> Folder:
    """The folder with its receipt, old or new; the caller holds its lock.

    Raises:
        UsageError: the folder was begun with another repository or commit.
    """
    receipt = read_receipt(directory, system=conditions.system)
    if receipt is None:
        receipt = new_receipt(listing)
        write_receipt(directory, receipt, system=conditions.system)
    else:
        check_same_source(receipt, listing, directory)
    return Folder(directory, receipt, conditions)


def prepare(directory: Path, conditions: Conditions) -> Path:
    """Make the folder and its hidden one; the path of the lock."""
    if not directory.absolute().parent.is_dir():
        raise UsageError("the folder's parent directory does not exist", where=directory.absolute().parent)
    for folder in (directory, directory / WORK_DIR):
        durable.make_directory(folder, system=conditions.system)
    return directory / WORK_DIR / LOCK_NAME


def fetch_repository(
    access: Access,
    listing: Listing,
    directory: Path,
    *,
    wishes: Wishes | None = None,
    conditions: Conditions | None = None,
    progress: Report | None = None,
    announce: Callable[[Outlook], None] | None = None,
) -> FetchResult:
    """Bring ``directory`` to hold all that ``listing`` has of a checkpoint.

    Args:
        access, listing: from ``packer.fetch.hub``.
        directory: made if it is not there; its parent must be.
        wishes, conditions: how.
        progress: called as bytes arrive or are hashed, from any thread.
        announce: called once it is known what is to be done, before it is done.

    Raises:
        UsageError: the folder was begun with another source, or another file is in the way.
        FormatError: the repository has no checkpoint in safetensors, or contradicts itself.
        IntegrityError: bytes are twice not those that are listed.
        EnvironmentProblem: network, disk, permissions, or another process at work; what has arrived is kept.
        Interrupted: stopped; what has arrived is kept.
    """
    wishes, conditions = wishes or Wishes(), conditions or Conditions()
    report = progress or (lambda _: None)
    indexed = needs_index(listing)
    _check_space_early(listing, directory, wishes)
    with exclusive(prepare(directory, conditions), system=conditions.system):
        folder = open_folder(directory, listing, conditions)
        received = 0
        if indexed:
            received += fetch_index(access, folder)
        selection = select_here(listing, directory, indexed=indexed, everything=wishes.everything)
        folder.update(lambda receipt: receipt.with_wanted(frozenset(file.path for file in selection.wanted)))
        released = () if wishes.released else folder.receipt.released
        wanted = [file for file in selection.wanted if file.path not in released]
        meter = Meter(report, sum(file.bytes for file in wanted))
        meter.at("checking what is there")
        missing = [file for file in wanted if not folder.present(file, rehash=wishes.rehash, report=meter.add)]
        already = sum(partial_bytes(directory, file) for file in missing)
        needed = sum(file.bytes for file in missing) - already
        known = check_space(directory, needed, free=wishes.free)
        if announce is not None:
            announce(Outlook(listing, selection, tuple(missing), needed, already, released, known))
        fetched = list(fetch_all(access, folder, missing, jobs=wishes.jobs, meter=meter))
        received += sum(item.received_bytes for item in fetched)
    if not released:
        with suppress(OSError):  # only if it is empty: what was set aside, or headers of shards, stay
            (directory / WORK_DIR).rmdir()
    return FetchResult(directory, listing, selection, tuple(item.name for item in fetched), received, released)


def _check_space_early(listing: Listing, directory: Path, wishes: Wishes) -> None:
    """Before anything is written: what certainly has to go there, by the usual names of shards."""
    if directory.is_dir():
        present = {file.path for file in listing.files if (directory / file.path).is_file()}
    else:
        present = set()
    place = directory if directory.is_dir() else directory.absolute().parent
    certain = select(listing, usual_shards(listing), everything=wishes.everything).wanted
    receipt = read_receipt(directory) if directory.is_dir() else None
    released = set(receipt.released) if receipt is not None and not wishes.released else set()
    needed = sum(file.bytes - partial_bytes(directory, file) for file in certain if file.path not in present | released)
    if place.is_dir():
        check_space(place, needed, free=wishes.free)


def fetch_index(access: Access, folder: Folder) -> int:
    """Have the index there; how many bytes came over the network for it."""
    file = folder.receipt.listing.file(INDEX_NAME)
    if file is None or folder.present(file, rehash=False, report=lambda _: None):
        return 0
    fetched = fetch_file(access, folder.receipt.listing, INDEX_NAME, folder.directory, conditions=folder.conditions)
    folder.note_present(fetched)
    return fetched.received_bytes


def select_here(listing: Listing, directory: Path, *, indexed: bool, everything: bool = False) -> Selection:
    """What makes up the checkpoint, by the index that lies in ``directory``."""
    return select(listing, read_shard_names(directory) if indexed else [SINGLE_NAME], everything=everything)


def fetch_all(
    access: Access, folder: Folder, files: Iterable[RemoteFile], *, jobs: int, meter: Meter
) -> Iterable[Fetched]:
    """Fetch ``files``, ``jobs`` at a time; each is in the receipt once it has its name.

    Yields:
        Each file, as it becomes complete.

    Raises:
        MoepackError: of the first file that failed; the others were stopped and keep what has arrived.
    """
    outer = folder.conditions
    abandon = _Either(outer.stop)
    inside = replace(outer, stop=abandon, report=meter.add)
    waiting = list(files)[::-1]
    running: dict[Future[Fetched], str] = {}
    failure: MoepackError | None = None
    listing, directory = folder.receipt.listing, folder.directory
    with Pool(jobs, "fetch") as pool:
        try:
            while (waiting and failure is None) or running:
                while waiting and failure is None and len(running) < pool.threads:
                    name = waiting.pop().path
                    task = partial(fetch_file, access, listing, name, directory, conditions=inside)
                    running[pool.submit(task)] = name
                for future in pool.some_done(running):
                    name = running.pop(future)
                    try:
                        fetched = future.result()
                    except Interrupted:
                        failure = failure or Interrupted("stopped before the folder was complete", where=directory)
                    except MoepackError as error:
                        failure = error if failure is None or isinstance(failure, Interrupted) else failure
                        abandon.set()
                    else:
                        folder.note_present(fetched)
                        meter.at(name)
                        yield fetched
        finally:
            abandon.set()
    if failure is not None:
        raise failure


class _Either(threading.Event):
    """An event of its own that counts as set when another one is."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until either is set; looked at ten times a second."""
        left = timeout
        while not self.is_set() and (left is None or left > 0):
            super().wait(0.1 if left is None else min(0.1, left))
            left = None if left is None else left - 0.1
        return self.is_set()


def check_repository(
    listing: Listing,
    directory: Path,
    *,
    everything: bool = False,
    stop: threading.Event | None = None,
    progress: Report | None = None,
) -> CheckResult:
    """Compare ``directory`` with ``listing``, byte for byte, and write nothing.

    Raises:
        UsageError: no such folder, or it was begun with another source.
        EnvironmentProblem: a file cannot be read.
        Interrupted: stopped.
    """
    if not directory.is_dir():
        raise UsageError("no such directory", where=directory)
    receipt = read_receipt(directory)
    if receipt is not None:
        check_same_source(receipt, listing, directory)
    stop = stop or threading.Event()
    problems: list[Problem] = []
    if needs_index(listing):
        try:
            selection = select_here(listing, directory, indexed=True, everything=everything)
        except EnvironmentProblem:
            raise
        except MoepackError as error:  # absent or damaged: it is reported below; go by the usual names of shards
            if (directory / INDEX_NAME).exists():
                problems.append(Problem(INDEX_NAME, error.line()))
            selection = select(listing, usual_shards(listing), everything=everything)
    else:
        selection = select_here(listing, directory, indexed=False, everything=everything)
    meter = Meter(progress or (lambda _: None), sum(file.bytes for file in selection.wanted))
    for file in selection.wanted:
        meter.at(file.path)
        found = compare(directory, file, stop=stop, report=meter.add)
        if isinstance(found, str):
            gone = receipt is not None and file.path in receipt.released and found == "is absent"
            problems.append(Problem(file.path, "was released after a pack had used it" if gone else found))
    return CheckResult(directory, listing, len(selection.wanted), tuple(problems))
