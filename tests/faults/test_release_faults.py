"""REL-01, REL-02, WRT-05 while the source is deleted: no shard goes early, whatever fails and whenever the power does.

A folder that ``moepack fetch`` made is packed with the release of its shards. After each failing call and each power
cut the same command must reach the bytes of an undisturbed pack from what is left of the source: a shard that went
too early could not be read again, and nothing else has its contents.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import EnvironmentProblem, MoepackError
from formats.families import bind
from packer import release
from packer.fetch.provenance import provenance_of
from packer.local_release import kept_headers, open_local_release
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.recipe.recipe import default_recipe
from packer.storage.system import SYSTEM, System
from tests.support.checkpoints import write_checkpoint
from tests.support.faults import Faults
from tests.support.hub_server import serve
from tests.support.packs import SMALL, Wrong, tree
from tests.support.powercut import WAYS, Disk, PowerCut
from tests.support.repositories import folder_repository
from tests.support.staged import moepack

EVERY = os.environ.get("MOEPACK_FAULTS") == "all"


@pytest.fixture(scope="module")
def fetched(scratch_root: Path) -> Path:
    """What ``moepack fetch`` made of a repository; tests take copies."""
    origin = write_checkpoint(scratch_root / "release-origin", SMALL)
    folder = scratch_root / "release-fetched"
    with serve(folder_repository(origin)) as hub:
        moepack(hub, "fetch", hub.repository, "--to", folder)
    return folder


@pytest.fixture(scope="module")
def whole(fetched: Path, scratch_root: Path) -> dict[str, bytes]:
    """The files of an undisturbed pack, without release."""
    run(fetched, scratch_root / "release-whole", SYSTEM, release=False)
    return tree(scratch_root / "release-whole")


def run(source: Path, out: Path, system: System, *, release: bool = True, **options: Any) -> None:
    """The command, in this process: everything is opened afresh, so that nothing deleted is read through old files."""
    with open_checkpoint(source, headers=kept_headers(source)) as checkpoint:
        model = bind(checkpoint)
        origin = provenance_of(checkpoint)
        recipe = default_recipe(model.architecture.family)
        plan = make_plan(checkpoint, model, recipe, repository=origin.repository, commit=origin.commit)
        options = {"jobs": 1, "expected": origin.sha256, "system": system, **options}
        if not release:
            pack(checkpoint, model, plan, out, **options)
            return
        with open_local_release(checkpoint, plan, origin, system=system) as local:
            pack(checkpoint, model, plan, out, release=local, **options)


def shards(source: Path) -> int:
    return len(list(source.glob("*.safetensors")))


def resume(source: Path, out: Path, whole: dict[str, bytes]) -> None:
    """The same command, from what is left.

    Raises:
        Wrong: it fails, leaves a shard, or comes to other bytes.
    """
    try:
        run(source, out, SYSTEM)
    except (MoepackError, OSError) as error:
        raise Wrong(f"resuming failed: {error}") from error
    if tree(out) != whole:
        raise Wrong("differs from an undisturbed pack")
    if shards(source):
        raise Wrong("shards were left")


KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "unlink": (("unlink",), {"code": errno.EIO}, 3),
    "unlink that happened": (("unlink",), {"code": errno.EIO, "late": True}, 3),
    "fsync": (("fsync",), {"code": errno.EIO}, 9),
    "pread": (("pread",), {"code": errno.EIO}, 17),
    "write": (("pwrite",), {"code": errno.ENOSPC}, 25),
    "rename": (("rename",), {"code": errno.EIO, "late": True}, 4),
    "everything from then on": (
        ("open", "pwrite", "fsync", "unlink", "rename", "pread"),
        {"code": errno.EIO, "sticky": True},
        60,
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_rel_01_the_nth_call_fails(kind: str, fetched: Path, whole: dict[str, bytes], scratch: Path) -> None:
    watch, how, stride = KINDS[kind]
    counts: Counter[str] = Counter()
    at = 1
    while True:
        source = Path(shutil.copytree(fetched, scratch / "source"))
        faults = Faults(at, watch=watch, **how)
        try:
            run(source, scratch / "out", faults.system)
        except EnvironmentProblem:
            counts["exit 4"] += 1
        except Exception as error:
            raise Wrong(f"{kind}, N = {at}: {type(error).__name__}: {error}") from error
        else:
            counts["unharmed"] += faults.count >= at
        try:
            resume(source, scratch / "out", whole)
        except Wrong as error:
            raise Wrong(f"{kind}, N = {at}: {error}") from error
        shutil.rmtree(source)
        shutil.rmtree(scratch / "out")
        if faults.count < at:
            break
        at += 1 if EVERY else stride
    print(f"release faults: {kind}: {counts.total()} tried, {dict(counts)}, {faults.count} such calls")


def cuts(fetched: Path, whole: dict[str, bytes], scratch: Path, points: Any, **options: Any) -> tuple[int, list[str]]:
    """Cut the power at each point in all ways; how often, and what went wrong."""
    wrong = []
    count = 0
    for at in points:
        for way in WAYS:
            before, after = scratch / "before", scratch / "after"
            shutil.rmtree(after, ignore_errors=True)
            shutil.copytree(fetched, before / "source")
            disk = Disk(before, after, at, way, **options)
            try:
                run(before / "source", before / "out", disk.system)
            except PowerCut:
                count += 1
                try:
                    resume(after / "source", after / "out", whole)
                except Wrong as error:
                    wrong.append(f"call {at}, {way}: {error}")
            shutil.rmtree(before)
    return count, wrong


def calls(fetched: Path, scratch: Path) -> int:
    faults = Faults()
    shutil.copytree(fetched, scratch / "source")
    run(scratch / "source", scratch / "out", faults.system)
    return len(faults.log)


def test_rel_02_the_power_fails_at_a_call(fetched: Path, whole: dict[str, bytes], scratch: Path) -> None:
    total = calls(fetched, scratch)
    count, wrong = cuts(fetched, whole, scratch, range(1, total + 1, 1 if EVERY else 41))
    assert wrong == []
    assert count >= 40
    print(f"release power cuts: {count}, of {total} calls in {len(WAYS)} ways")


def test_control_a_shard_released_early_is_noticed(
    fetched: Path, whole: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the proofs before a deletion, on a device that loses what it was given: the test above fails."""
    points = range(150, calls(fetched, scratch), 40)
    monkeypatch.setattr(release, "_prove_units", lambda job, name: None)
    count, wrong = cuts(fetched, whole, scratch, points, flushing=lambda path: not path.name.endswith(".part"))
    assert wrong
    print(f"control: device that loses temporaries: {len(wrong)} of {count} cuts are noticed")
