"""WRT-16 and the limits of real systems: a tiny file system, a read-only one, file sizes, descriptors, memory.

Nothing here is made up: the kernel says no. What needs the right to mount is skipped where there is none.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.errors import EnvironmentProblem
from packer.storage.journal import RESERVE_BYTES
from packer.storage.system import SYSTEM
from tests.faults.command import command
from tests.support.packs import Ground, Wrong, no_leaks
from tests.support.victim import Victims

MIB = 1 << 20


class Mount:
    """A tmpfs that can be made larger, smaller and read-only."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self.options("size=64m", new=True)

    def options(self, text: str, *, new: bool = False) -> None:
        """Mount with ``text``, or change the options to it."""
        kind = ["-t", "tmpfs", "tmpfs"] if new else []
        done = subprocess.run(
            ["mount", "-o", text if new else f"remount,{text}", *kind, str(self.place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")

    def close(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    try:
        found = Mount(tmp_path / "mount")
    except FileNotFoundError:
        pytest.skip("cannot mount a file system here: no such command")
    yield found
    found.close()


@pytest.fixture(scope="module")
def victims(ground: Ground) -> Iterator[Victims]:
    with Victims(ground.source) as found:
        yield found


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    with path.open("wb", 0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def trouble(ground: Ground, out: Path, **options: Any) -> EnvironmentProblem | None:
    """Pack; the trouble with the environment that ended it, if any, after a look at what was left."""
    try:
        with no_leaks():
            ground.pack(out, **options)
    except EnvironmentProblem as error:
        ground.check_unfinished(out)
        return error
    ground.check_finished(out)
    return None


def test_pln_01_a_tiny_file_system_is_refused_before_the_first_byte(ground: Ground, mount: Mount) -> None:
    mount.options("size=1m")
    error = trouble(ground, mount.place / "out")
    assert error is not None
    assert "not enough space" in error.line()
    assert list(mount.place.iterdir()) == []


def test_wrt_01_a_tiny_file_system_that_somebody_else_fills(ground: Ground, mount: Mount) -> None:
    """Enough at the first look and too little later, in steps of a page up to what is needed; then there is room."""
    counts: Counter[str] = Counter()
    blind = replace(SYSTEM, available=lambda path: 1 << 40)
    for pages in (1, 3, 10, 100, 256, 257, 258, 260, 270, 280, 282, 284, 286, 288, 290, 292, 294, 300, 330):
        mount.options(f"nr_blocks={pages}")
        error = trouble(ground, mount.place / "out", system=blind)
        counts["exit 4" if error else "done"] += 1
        if error:
            assert "no space left" in error.line(), error.line()
            assert "same command again" in (error.hint or "")
        mount.options("size=64m")
        ground.resume(mount.place / "out")
        subprocess.run(["rm", "-r", str(mount.place / "out")], check=True)
    assert counts["exit 4"] >= 10
    print(f"limits: tmpfs of {counts.total()} sizes: {dict(counts)}")


def test_wrt_01_the_disk_fills_up_while_packing(ground: Ground, mount: Mount) -> None:
    """At each report of progress in turn, another process takes all that is left."""
    filled = 0
    for moment in range(1, 40):
        reports: list[object] = []

        def progress(report: object, moment: int = moment, reports: list[object] = reports) -> None:
            reports.append(report)
            if len(reports) == moment:
                fill(mount.place / "filler")

        error = trouble(ground, mount.place / "out", progress=progress)
        if len(reports) < moment:
            break
        filled += 1
        (mount.place / "filler").unlink()
        if error is not None:
            ground.resume(mount.place / "out")
        subprocess.run(["rm", "-r", str(mount.place / "out")], check=True)
        mount.options("size=3m")  # what is free at first is no more than it takes to fill it quickly
    assert filled > 5
    print(f"limits: disk filled by others at {filled} moments")


def test_wrt_16_a_read_only_output(ground: Ground, mount: Mount) -> None:
    """Read-only from the start, and read-only when it is to be continued: nothing is touched, and it is said why."""
    mount.options("ro")
    error = trouble(ground, mount.place / "out")
    assert error is not None
    assert "read-only" in error.line()
    assert list(mount.place.iterdir()) == []
    mount.options("rw")
    half = trouble(ground, mount.place / "out", system=replace(SYSTEM, rename=refuse_trunk))
    assert half is not None
    before = sorted(mount.place.rglob("*"))
    mount.options("ro")
    error = trouble(ground, mount.place / "out")
    assert error is not None
    assert "read-only" in error.line()
    assert sorted(mount.place.rglob("*")) == before
    mount.options("rw")
    ground.resume(mount.place / "out")


def refuse_trunk(old: Path, new: Path) -> None:
    """A rename that works until the trunk comes."""
    if new.name == "trunk.bin":
        raise PermissionError(13, "Permission denied")
    SYSTEM.rename(old, new)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the read-only mount shows the same")
def test_wrt_16_an_output_without_permission(ground: Ground, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    error = trouble(ground, tmp_path / "out")
    tmp_path.chmod(0o755)
    assert error is not None
    assert "not permitted" in error.line()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [0, 100, 4096, 40_000, 120_000, MIB - 1, RESERVE_BYTES, 2 * MIB])
def test_wrt_16_a_limit_of_file_sizes(ground: Ground, victims: Victims, limit: int, scratch: Path) -> None:
    out = scratch / "out"
    death = victims.run(out, limits={"RLIMIT_FSIZE": limit})
    if death.code:
        assert (death.code, "largest size allowed" in death.line) == (4, True), death
        ground.check_unfinished(out)
    assert bool(death.code) == (limit < RESERVE_BYTES)
    ground.resume(out)


@pytest.mark.parametrize("spare", range(8))
def test_a_limit_of_descriptors(ground: Ground, victims: Victims, spare: int, scratch: Path) -> None:
    """So few that a pack cannot open what it needs: exit code 4, wherever that happens."""
    out = scratch / "out"
    death = victims.run(out, limits={"RLIMIT_NOFILE": 5 + spare})
    assert death.code in (0, 4), death
    ground.check_unfinished(out)
    ground.resume(out)


def test_address_space_that_runs_out(ground: Ground, victims: Victims, scratch: Path) -> None:
    """Address space that runs out in the middle: the plan's own bound is enough, and less ends cleanly or suffices.

    The bound counts resident memory; address space also holds the stacks of threads (8 MiB each) and the arenas of
    the allocator (64 MiB a thread, reserved and hardly used), so a child gets the part a job plus 160 MiB a thread.
    """
    counts: Counter[str] = Counter()
    margin = 160 * MIB
    enough = ground.plan.memory.per_job + margin
    assert victims.run(scratch / "enough", memory=enough).code == 0
    ground.check_finished(scratch / "enough")
    for number, memory in enumerate(range(0, enough, 8 * MIB)):
        out = scratch / str(number)
        death = victims.run(out, memory=memory)
        # 99: what the command line, not the pipeline, turns into exit code 4
        foreseen = death.code != 99 or death.line.startswith("MemoryError")
        if death.signal or death.code not in (0, 4, 99) or not foreseen:
            raise Wrong(f"{memory} bytes: {death}")
        counts["done" if death.code == 0 else "not enough memory"] += 1
        ground.check_unfinished(out)
        ground.resume(out)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    print(f"limits: memory in steps of 8 MiB below {enough >> 20} MiB: {dict(counts)}")


def limited(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command under a limit of address space."""
    return command(*arguments, before=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))


def test_a_limit_of_memory_around_the_peak_that_the_plan_states(ground: Ground, scratch: Path) -> None:
    """Less than the plan states is refused before the first byte, with both numbers; as much as it states is enough.

    No margin is needed on top: the command counts what it has taken already, libraries and stacks included.
    """
    least = next(limit for limit in range(64 * MIB, 4096 * MIB, 16 * MIB) if not limited(limit, "--version").returncode)
    counts: Counter[str] = Counter()
    for number in range(40):
        out = scratch / str(number)
        done = limited(least + number * 12 * MIB, "pack", ground.source, out, "--jobs", "1", "--quiet")
        if not done.returncode:
            counts["done"] += 1
            ground.check_finished(out)
            if counts["done"] == 3:
                break
            continue
        counts["refused"] += 1
        assert done.returncode == 4, done.stderr
        assert counts["done"] == 0, "more memory is never worse"
        assert f"not enough memory for one job (expected {ground.plan.memory.with_jobs(1)} bytes" in done.stderr
        assert not out.exists()
    assert counts["done"] == 3
    print(f"limits: memory from {least >> 20} MiB in steps of 12 MiB: {dict(counts)}")
