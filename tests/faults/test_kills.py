"""WRT-04, WRT-06: SIGKILL at named points, before and inside of the k-th system call, and at random moments.

After each kill: no final name with wrong bytes, the source untouched; then, after further kills or not, the same
command gives what an undisturbed pack gives. ``MOEPACK_KILLS=n`` makes n kills at random moments, and one at every
system call; without it there is a sample.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.manifest import FILE_NAME, WORK_DIR
from packer.preflight import JOURNAL_NAME, LOCK_NAME
from tests.support.faults import Faults
from tests.support.packs import Ground, Wrong
from tests.support.victim import Death, Victims

KILLS = int(os.environ.get("MOEPACK_KILLS", "0"))

JOURNAL, RESERVE = JOURNAL_NAME, JOURNAL_NAME + ".reserve"
BANK = "layer-00001.bank"

# (before or after, call, end of its path, which of several)
POINTS: tuple[tuple[str, str, str, int], ...] = (
    ("after", "mkdir", WORK_DIR, 1),
    ("after", "open", LOCK_NAME, 1),
    ("after", "lock", LOCK_NAME, 1),
    ("before", "rename", JOURNAL, 1),
    ("after", "rename", JOURNAL, 1),
    ("halfway", "pwrite", RESERVE + ".part", 1),
    ("after", "rename", RESERVE, 1),
    ("after", "open", f"{BANK}.part", 1),
    ("after", "truncate", f"{BANK}.part", 1),
    ("after", "allocate", f"{BANK}.part", 1),
    ("halfway", "pwrite", f"{BANK}.part", 1),
    ("after", "pwrite", f"{BANK}.part", 2),
    ("before", "fsync", f"{BANK}.part", 2),
    ("halfway", "pwrite", JOURNAL, 1),
    ("before", "fsync", JOURNAL, 2),
    ("after", "fsync", JOURNAL, 3),
    ("before", "rename", BANK, 1),
    ("after", "rename", BANK, 1),
    ("halfway", "pwrite", "trunk.bin.part", 1),
    ("after", "pwrite", "trunk.bin.part", 1),
    ("before", "rename", "trunk.bin", 1),
    ("after", "rename", "trunk.bin", 1),
    ("before", "mkdir", "assets/figures", 1),
    ("after", "rename", "assets/figures/x.png", 1),
    ("before", "rename", "index.bin", 1),
    ("after", "rename", "index.bin", 1),
    ("after", "open", f"{FILE_NAME}.part", 1),
    ("halfway", "pwrite", f"{FILE_NAME}.part", 1),
    ("before", "rename", FILE_NAME, 1),
    ("after", "rename", FILE_NAME, 1),
    ("before", "unlink", RESERVE, 1),
    ("after", "unlink", RESERVE, 1),
    ("before", "unlink", JOURNAL, 1),
    ("after", "unlink", JOURNAL, 1),
    ("before", "unlink", LOCK_NAME, 2),
    ("after", "unlink", LOCK_NAME, 2),
)


@pytest.fixture(scope="module")
def victims(ground: Ground) -> Iterator[Victims]:
    with Victims(ground.source) as found:
        yield found


@pytest.fixture(scope="module")
def calls(ground: Ground, scratch_root: Path) -> int:
    """How many system calls an undisturbed pack makes."""
    faults = Faults()
    out = scratch_root / "counted"
    ground.pack(out, system=faults.system)
    shutil.rmtree(out)
    return len(faults.log)


def sound(ground: Ground, out: Path, death: Death) -> str:
    """Check what a child left, and name its end.

    Raises:
        Wrong: it ended otherwise than by the kill, by success, or with exit code 4.
    """
    if death.killed:
        ground.check_unfinished(out)
        return "killed"
    if death.code:
        raise Wrong(f"exit code {death.code}: {death.line}")
    ground.check_finished(out)
    return "survived"


@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point)).replace("/", "_"))
def test_wrt_04_killed_at_a_named_point(
    ground: Ground, victims: Victims, point: tuple[str, str, str, int], scratch: Path
) -> None:
    when, call, path, nth = point
    death = victims.run(scratch / "out", when=when, call=call, path=path, nth=nth)
    assert death.killed, death
    ground.check_unfinished(scratch / "out")
    ground.resume(scratch / "out")


@pytest.mark.parametrize("when", ["before", "halfway"])
def test_wrt_04_killed_at_every_call(ground: Ground, victims: Victims, calls: int, when: str, scratch: Path) -> None:
    counts: Counter[str] = Counter()
    for at in range(1, calls + 1, 1 if KILLS else 37):
        out = scratch / "out"
        counts[sound(ground, out, victims.run(out, at=at, when=when))] += 1
        ground.resume(out)
        shutil.rmtree(out)
    assert counts["killed"] == counts.total()
    print(f"kills: {when} call k: {counts.total()} of {calls} calls, {dict(counts)}")


def test_wrt_04_killed_at_random_moments(ground: Ground, victims: Victims, calls: int, scratch: Path) -> None:
    """By the clock and by the call, with one to three jobs, killed again while resuming, as often as the dice say."""
    dice = random.Random(20)
    counts: Counter[str] = Counter()
    packs = 0
    while counts["killed"] < max(KILLS, 16):
        out = scratch / "out"
        packs += 1
        while True:
            jobs = dice.choice((1, 2, 3))
            if dice.random() < 0.5:
                death = victims.run(out, jobs=jobs, delay=dice.uniform(0.0, 0.12))
            else:
                death = victims.run(out, jobs=jobs, at=dice.randint(1, calls), when=dice.choice(("before", "after")))
            outcome = sound(ground, out, death)
            counts[outcome] += 1
            if outcome == "survived" or dice.random() < 0.3:
                break
        ground.resume(out)
        shutil.rmtree(out)
        assert packs < 100 + 10 * KILLS, "hardly any child was killed"
    print(f"kills: at random: {counts['killed']} kills, {counts['survived']} children done before, {packs} packs")


def test_the_children_are_what_they_seem(ground: Ground, victims: Victims, calls: int, scratch: Path) -> None:
    """Controls: left alone, a child packs; a kill past its last call never comes; its errors are passed on."""
    assert victims.run(scratch / "out") == Death(0, 0, "")
    ground.check_finished(scratch / "out")
    assert victims.run(scratch / "other", at=calls + 1) == Death(0, 0, "")
    refused = victims.run(ground.source)
    assert (refused.code, "is the source" in refused.line) == (2, True)
