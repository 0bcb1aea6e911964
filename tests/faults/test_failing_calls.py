"""WRT-01, WRT-02, WRT-03: the N-th system call of one kind fails, for N = 1, 2, 3, ... until a run passes untouched.

After each: success with the right bytes or exit code 4, no final name with wrong bytes, the source untouched, no
descriptor left open; then the same command gives what an undisturbed pack gives. ``MOEPACK_FAULTS=all`` tries every N,
without it a sample does that has every N of the rare calls.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from formats.errors import EnvironmentProblem
from packer.storage.system import SYSTEM
from tests.support.faults import Faults
from tests.support.packs import Ground, Wrong, no_leaks

EVERY = os.environ.get("MOEPACK_FAULTS") == "all"

ENOSPC, EIO, EINTR = errno.ENOSPC, errno.EIO, errno.EINTR
SPACE = ("open", "pwrite", "mkdir", "truncate", "allocate", "rename")

# What fails: which calls count, how they fail, and how many N a sample skips.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "open ENOSPC": (("open",), {"code": ENOSPC}, 5),
    "open EIO": (("open",), {"code": EIO}, 5),
    "open EMFILE": (("open",), {"code": errno.EMFILE}, 6),
    "open EINTR": (("open",), {"code": EINTR}, 6),
    "pwrite ENOSPC": (("pwrite",), {"code": ENOSPC}, 14),
    "pwrite EIO": (("pwrite",), {"code": EIO}, 14),
    "pwrite EINTR": (("pwrite",), {"code": EINTR}, 16),
    "pwrite short": (("pwrite",), {"short": True}, 15),
    "fsync EIO": (("fsync",), {"code": EIO}, 6),
    "fsync ENOSPC": (("fsync",), {"code": ENOSPC}, 8),
    "fsync EINTR": (("fsync",), {"code": EINTR}, 9),
    "close EIO": (("close",), {"code": EIO}, 5),
    "close EINTR": (("close",), {"code": EINTR}, 6),
    "pread EIO": (("pread",), {"code": EIO}, 9),
    "pread EINTR": (("pread",), {"code": EINTR}, 10),
    "pread short": (("pread",), {"short": True}, 11),
    "rename EIO": (("rename",), {"code": EIO}, 1),
    "rename ENOSPC": (("rename",), {"code": ENOSPC}, 2),
    "rename EIO after it happened": (("rename",), {"code": EIO, "late": True}, 1),
    "unlink EIO": (("unlink",), {"code": EIO}, 1),
    "unlink EINTR": (("unlink",), {"code": EINTR}, 2),
    "unlink EIO after it happened": (("unlink",), {"code": EIO, "late": True}, 2),
    "mkdir ENOSPC": (("mkdir",), {"code": ENOSPC}, 1),
    "mkdir EIO after it happened": (("mkdir",), {"code": EIO, "late": True}, 2),
    "truncate ENOSPC": (("truncate",), {"code": ENOSPC}, 1),
    "truncate EIO": (("truncate",), {"code": EIO}, 1),
    "allocate ENOSPC": (("allocate",), {"code": ENOSPC}, 1),
    "allocate EIO": (("allocate",), {"code": EIO}, 1),
    "allocate EINTR": (("allocate",), {"code": EINTR}, 1),
    "allocate EOPNOTSUPP": (("allocate",), {"code": errno.EOPNOTSUPP}, 1),
    "lock ENOLCK": (("lock",), {"code": errno.ENOLCK}, 1),
    "drop_cache EIO": (("drop_cache",), {"code": EIO}, 20),
    "available EIO": (("available",), {"code": EIO}, 1),
    "full from then on": (SPACE, {"code": ENOSPC, "sticky": True}, 11),
    "quota used up from then on": (SPACE, {"code": errno.EDQUOT, "sticky": True}, 13),
    "read-only from then on": ((*SPACE, "unlink"), {"code": errno.EROFS, "sticky": True}, 12),
    "device gone from then on": ((*SPACE, "unlink", "fsync", "pread"), {"code": EIO, "sticky": True}, 17),
}


def attempt(ground: Ground, out: Path, faults: Faults) -> str:
    """Pack with one fault, check what it left, and name the outcome."""
    with no_leaks():
        try:
            ground.pack(out, system=faults.system)
        except EnvironmentProblem as error:
            if not error.where:
                raise Wrong("the message does not name a place") from error
            ground.check_unfinished(out)
            return "exit 4"
    ground.check_finished(out)
    return "unharmed"


@pytest.mark.parametrize("kind", list(KINDS))
def test_wrt_01_the_nth_call_fails(ground: Ground, kind: str, scratch: Path) -> None:
    watch, how, stride = KINDS[kind]
    counts: Counter[str] = Counter()
    at = 1
    while True:
        out = scratch / "out"
        faults = Faults(at, watch=watch, **how)
        try:
            outcome = attempt(ground, out, faults)
            if faults.count < at:
                assert outcome == "unharmed"
                break
            ground.resume(out)
        except Exception as error:
            raise Wrong(f"{kind}, N = {at}: {type(error).__name__}: {error}") from error
        shutil.rmtree(out)
        counts[outcome] += 1
        at += 1 if EVERY or at < 3 else stride
    assert counts.total() >= 1
    if how.get("short") or (how.get("code") == EINTR and watch in (("pwrite",), ("pread",))):
        assert counts["exit 4"] == 0, "short and interrupted transfers are continued"
    print(f"faults: {kind}: {counts.total()} tried, {dict(counts)}, the run had {faults.count} such calls")


def test_wrt_01_the_nth_call_fails_while_resuming(ground: Ground, scratch: Path) -> None:
    """Trouble that comes again at every attempt, a little later each time: in the end the bytes are the same."""
    out = scratch / "out"
    attempts = 0
    for at in range(20, 10_000, 40):
        faults = Faults(at, EIO, ("open", "pwrite", "fsync", "rename", "unlink", "pread"))
        attempts += 1
        if attempt(ground, out, faults) == "unharmed":
            break
    assert attempts > 5
    ground.check_finished(out)
    print(f"faults: again and again: {attempts} attempts")


@pytest.mark.parametrize("jobs", [2, 3])
def test_wrt_01_faults_with_several_jobs(ground: Ground, jobs: int, scratch: Path) -> None:
    """Units that run at the same time are all ended, and what they left is continued."""
    for at in range(30, 420, 4 if EVERY else 65):
        out = scratch / "out"
        faults = Faults(at, ENOSPC, ("pwrite", "fsync", "open", "rename"), sticky=True)
        with no_leaks():
            try:
                ground.pack(out, system=faults.system, jobs=jobs)
            except EnvironmentProblem:
                ground.check_unfinished(out)
        ground.resume(out, jobs=jobs)
        shutil.rmtree(out)


def test_the_checks_would_notice(ground: Ground, scratch: Path) -> None:
    """Negative control: wrong bytes under a final name, a manifest too early, a stray file, a resume that cannot be."""
    out = scratch / "out"
    ground.pack(out, system=SYSTEM)
    (out / "trunk.bin").write_bytes(b"wrong")
    with pytest.raises(Wrong, match="wrong bytes"):
        ground.check_unfinished(out)
    with pytest.raises(Wrong, match="differs"):
        ground.check_finished(out)
    with pytest.raises(Wrong, match="resuming failed"):
        ground.resume(out)
    (out / "trunk.bin").unlink()
    with pytest.raises(Wrong, match="manifest without"):
        ground.check_unfinished(out)
    (out / "stray").write_bytes(b"")
    with pytest.raises(Wrong, match="strange"):
        ground.check_unfinished(out)
    with pytest.raises(Wrong, match="descriptors"), no_leaks():
        leaked = os.open(scratch, os.O_RDONLY)
    os.close(leaked)
