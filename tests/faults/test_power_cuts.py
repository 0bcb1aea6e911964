"""WRT-05, WRT-06: the power fails at the k-th system call, and everything that was not flushed is gone.

What is found then is continued by the same command and must come to the bytes of an undisturbed pack. Controls show
that the test is no formality: without flushing, or with neither flushing nor reading back, it fails.
``MOEPACK_FAULTS=all`` cuts at every call.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.errors import EnvironmentProblem
from formats.manifest import FILE_NAME, WORK_DIR
from packer.preflight import JOURNAL_NAME
from packer.storage import durable
from packer.storage.durable import SUFFIX
from tests.support.faults import Faults
from tests.support.packs import Ground, Wrong, tree
from tests.support.powercut import WAYS, Disk, PowerCut, Way

EVERY = os.environ.get("MOEPACK_FAULTS") == "all"


def cut(ground: Ground, scratch: Path, at: int, way: Way, *, jobs: int = 1, **options: Any) -> Path | None:
    """Pack until the power fails; the output as it is found afterwards, or None if the pack was done before."""
    before, after = scratch / "before", scratch / "after"
    shutil.rmtree(after, ignore_errors=True)
    before.mkdir(exist_ok=True)
    disk = Disk(before, after, at, way, **options)
    try:
        ground.pack(before / "out", jobs=jobs, system=disk.system)
    except PowerCut:
        assert disk.cut
    shutil.rmtree(before)
    return after / "out" if disk.cut else None


def calls(ground: Ground, scratch: Path) -> int:
    faults = Faults()
    ground.pack(scratch / "counted", system=faults.system)
    shutil.rmtree(scratch / "counted")
    return len(faults.log)


@pytest.mark.parametrize("way", WAYS)
def test_wrt_05_power_fails_at_a_call(ground: Ground, way: Way, scratch: Path) -> None:
    total = calls(ground, scratch)
    points = list(range(1, total + 1, 1 if EVERY else 19))
    states: Counter[str] = Counter()
    for at in points:
        out = cut(ground, scratch, at, way)
        assert out is not None
        try:
            states[state(out)] += 1
            ground.check_unfinished(out)
            ground.resume(out)
        except Wrong as error:
            raise Wrong(f"{way}, cut at call {at}: {error}") from error
    assert len(points) >= 20
    assert cut(ground, scratch, total + 1, way) is None
    print(f"power cuts: {way}: at {len(points)} of {total} calls, found {dict(states)}")


def state(out: Path) -> str:
    """How far the output that was found had come."""
    found = tree(out)
    if FILE_NAME in found:
        return "finished"
    if f"{WORK_DIR}/{JOURNAL_NAME}" in found:
        return "journal"
    return "nothing"


def test_wrt_05_power_fails_again_while_resuming(ground: Ground, scratch: Path) -> None:
    """The found state is continued until the next cut, and so on, with all three ways in turn."""
    cuts = 0
    kept = scratch / "kept"
    kept.mkdir()
    for number in range(400):
        found = scratch / f"found-{number}"
        disk = Disk(kept, found, 40 + 17 * number, WAYS[number % 3], seed=number)
        try:
            ground.pack(kept / "out", system=disk.system)
        except PowerCut:
            cuts += 1
            shutil.rmtree(kept)
            kept = found
            continue
        break
    ground.check_finished(kept / "out")
    assert cuts >= 8
    print(f"power cuts: again and again: {cuts} cuts")


def test_wrt_05_power_fails_with_several_jobs(ground: Ground, scratch: Path) -> None:
    for at in range(60, 520, 9 if EVERY else 70):
        out = cut(ground, scratch, at, "random", jobs=3)
        if out is not None:
            ground.check_unfinished(out)
            ground.resume(out, jobs=3)


# Controls


def failures(ground: Ground, scratch: Path, points: Sequence[int], **options: Any) -> int:
    """At how many of the points the test above would fail."""
    count = 0
    for at in points:
        for way in WAYS:
            out = cut(ground, scratch, at, way, **options)
            if out is None:
                continue
            try:
                ground.check_unfinished(out)
                ground.resume(out)
            except Wrong:
                count += 1
    return count


def test_control_without_flushing_the_test_fails(ground: Ground, scratch: Path) -> None:
    """If ``fsync`` did nothing, power cuts would leave what cannot be resumed, or what is wrong."""
    points = range(20, calls(ground, scratch) + 1, 60)
    assert failures(ground, scratch, points) == 0
    count = failures(ground, scratch, points, flushing=lambda path: False)
    assert count >= 5
    print(f"control: without flushing {count} of {3 * len(points)} cuts are noticed")


def test_control_without_flushing_folders_the_test_fails(ground: Ground, scratch: Path) -> None:
    """A manifest whose banks' names were never flushed: the journal, which would know, is deleted by then."""
    total = calls(ground, scratch)
    points = range(total - 20, total + 1, 2)
    assert failures(ground, scratch, points) == 0
    wrong = failures(ground, scratch, points, flushing=lambda path: not path.is_dir())
    assert wrong > 0
    print(f"control: without flushing folders {wrong} of {3 * len(points)} cuts are noticed")


def believe(path: Path, extents: Sequence[durable.Extent], **options: Any) -> bytes:
    """Reading back as somebody would do it who only wants to have done it."""
    data = path.read_bytes()
    return blake3(b"".join(data[extent.offset : extent.offset + extent.length] for extent in extents)).digest()


def not_banks(path: Path) -> bool:
    return not path.name.endswith((f".bank{SUFFIX}", f"trunk.bin{SUFFIX}"))


def test_control_lost_banks_are_found_by_reading_back(ground: Ground, scratch: Path) -> None:
    """A device that lies about flushing the data alone: found when the file is read back, and built again."""
    lost = 0
    for at in range(150, calls(ground, scratch), 30):
        out = cut(ground, scratch, at, "names", flushing=not_banks)
        assert out is not None
        if (out / FILE_NAME).exists():
            break  # what such a device loses of a finished container, only ``verify`` can find
        for _ in ground.plan.unit_files:  # each can be found once
            try:
                ground.pack(out)
            except EnvironmentProblem as error:
                lost += "other bytes are here than were written" in error.line()
                ground.check_unfinished(out)
        ground.check_finished(out)
    assert lost > 0
    print(f"control: banks lost by the device: {lost} found by reading back")


def test_control_with_neither_flushing_nor_reading_back_the_test_fails(
    ground: Ground, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same device, and nobody looks: then wrong bytes get their names, and the test says so."""
    points = range(150, calls(ground, scratch), 60)

    monkeypatch.setattr(durable, "read_back", believe)
    assert failures(ground, scratch, points) == 0
    count = failures(ground, scratch, points, flushing=not_banks)
    assert count > 0
    print(f"control: neither flushing nor reading back: {count} of {3 * len(points)} cuts are noticed")


def test_control_bytes_changed_by_the_device(ground: Ground, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte is other than was written: found by reading back, wherever it is; unnoticed if nobody looks."""
    total = len([name for name in counted(ground, scratch) if name == "pwrite"])
    caught = 0
    for at in range(1, total + 1, 1 if EVERY else 12):
        out = scratch / "out"
        try:
            ground.pack(out, system=flipping(at).system)
        except EnvironmentProblem:
            caught += 1
            ground.check_unfinished(out)
        except Exception as error:
            raise Wrong(f"write {at}: {type(error).__name__}: {error}") from error
        else:
            ground.check_finished(out)  # it was in the lock, the reserve or a line of the journal
        shutil.rmtree(out)
    assert caught > total // 30
    monkeypatch.setattr(durable, "read_back", believe)
    assert any(wrong_after(ground, scratch / f"blind-{at}", flipping(at)) for at in range(1, total + 1, 5))
    print(f"control: a byte changed in one of {total} writes: {caught} found by reading back")


def wrong_after(ground: Ground, out: Path, faults: Faults) -> bool:
    """Whether a pack seems to succeed with wrong bytes."""
    ground.pack(out, system=faults.system)
    try:
        ground.check_finished(out)
    except Wrong:
        return True
    return False


def counted(ground: Ground, scratch: Path) -> list[str]:
    faults = Faults()
    ground.pack(scratch / "counted", system=faults.system)
    shutil.rmtree(scratch / "counted")
    return faults.log


def flipping(at: int) -> Faults:
    """A system whose write number ``at`` stores another bit than it was given."""
    count = 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        if count == at:
            changed = bytearray(data)
            changed[len(changed) // 2] ^= 4
            return os.pwrite(fd, changed, offset)
        return os.pwrite(fd, data, offset)

    return Faults(pwrite=pwrite)
