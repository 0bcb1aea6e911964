"""Memory limited by a control group: refused before the first byte, or killed by the kernel and resumed, or done.

A pack is a member of a group that this process makes (``control_group.py``), with more memory from step to step. The
tests run for each version of control groups and are skipped, with the reason, where no group of it can be made: on
other systems, without the right, read-only, and always for the version that does not have the memory controller.
``MOEPACK_FAULTS=all`` takes small steps.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from formats.manifest import WORK_DIR
from runtime.machine import available_memory
from tests.faults.command import command
from tests.faults.control_group import MEMBERS, VERSION_1, VERSION_2, Group, find_place
from tests.support.packs import Ground, Wrong
from tests.support.victim import Victims

EVERY = os.environ.get("MOEPACK_FAULTS") == "all"
KIB, MIB = 1 << 10, 1 << 20
JOBS = 8


@pytest.fixture(scope="module", params=[VERSION_1, VERSION_2], ids=["v1", "v2"])
def place(request: pytest.FixtureRequest) -> Group:
    """Where groups can be made; the kernel gives the memory controller to one version at a time."""
    try:
        return find_place(request.param)
    except OSError as error:
        pytest.skip(f"cannot make a control group here: {error}")


@pytest.fixture(scope="module")
def victims(ground: Ground) -> Iterator[Victims]:
    with Victims(ground.source) as found:
        yield found


def pack_in(group: Group, ground: Ground, out: Path, jobs: int) -> CompletedProcess[str]:
    """The command as a member of ``group``."""
    return command("pack", ground.source, out, "--jobs", jobs, before=group.enter)


def numbers_of_refusal(message: str) -> tuple[int, int]:
    """(bytes needed, bytes available) in the message of a pack that does not begin.

    Raises:
        Wrong: that is not what the message says.
    """
    found = re.search(r"not enough memory for one job \(expected (\d+) bytes, found (\d+) bytes available\)", message)
    if found is None:
        raise Wrong(message)
    return int(found[1]), int(found[2])


def jobs_told(done: CompletedProcess[str]) -> int:
    """With how many jobs a pack of ``JOBS`` says that it ran."""
    found = re.search(rf"^(\d+) jobs? instead of {JOBS}: more do not fit into the memory", done.stderr, re.MULTILINE)
    return int(found[1]) if found else JOBS


def test_pln_06_a_group_s_limit_refuses_a_pack_or_kills_it_or_suffices(
    ground: Ground, place: Group, tmp_path: Path
) -> None:
    """Too little to start at all, then too little for what the plan states, then enough, three times."""
    counts: Counter[str] = Counter()
    step = 8 * MIB if EVERY else 24 * MIB
    for number in range(100):
        out, limit = tmp_path / str(number), number * step
        with place.inner(limit) as group:
            done = pack_in(group, ground, out, 1)
            kills = group.kills
        if done.returncode == 0:
            counts["done"] += 1
            ground.check_finished(out)
            if counts["done"] == 3:
                break
            continue
        assert counts["done"] == 0, "more memory is never worse"
        if done.returncode == -signal.SIGKILL:
            counts["killed"] += 1
            assert kills > 0, "it was not for memory"
            ground.check_unfinished(out)
            ground.resume(out)
        else:
            counts["refused"] += 1
            assert done.returncode == 4, done.stderr
            needed, available = numbers_of_refusal(done.stderr)
            assert needed == ground.plan.memory.with_jobs(1)
            assert available < limit
            assert not out.exists()
    assert counts["killed"] >= 1
    assert counts["refused"] >= 3
    assert counts["done"] == 3
    print(f"limits: memory of a control group in steps of {step // MIB} MiB: {dict(counts)}")


@pytest.mark.parametrize("jobs", [1, 4])
def test_wrt_04_killed_for_memory_in_the_middle_of_a_pack(
    ground: Ground, place: Group, victims: Victims, jobs: int, scratch: Path
) -> None:
    """A pack that nobody refused, as when others take the memory later, with more of it until it suffices."""
    counts: Counter[str] = Counter()
    step = 128 * KIB if EVERY else 512 * KIB
    for number in range(400):
        out = scratch / str(number)
        with place.inner(number * step) as group:
            death = victims.run(out, jobs=jobs, group=str(group.path / MEMBERS))
            kills = group.kills
        if death.code == 0:
            counts["done"] += 1
            ground.check_finished(out)
            if counts["done"] == 3:
                break
            continue
        if not death.killed or not kills:
            raise Wrong(f"{number * step} bytes: {death}, {kills} kills for memory")
        counts["killed in its work" if (out / WORK_DIR).is_dir() else "killed before"] += 1
        ground.check_unfinished(out)
        ground.resume(out)
    assert counts["killed before"] >= 1
    assert counts["killed in its work"] >= 3
    assert counts["done"] == 3
    print(f"limits: memory of a control group in steps of {step // KIB} KiB, {jobs} jobs: {dict(counts)}")


@pytest.mark.parametrize("around", [False, True], ids=["own group", "group around it"])
def test_pln_06_jobs_are_reduced_to_what_the_group_allows(
    around: bool, ground: Ground, place: Group, tmp_path: Path
) -> None:
    """As many as fit below the limit beside what the command has taken itself, which is never above the group's peak.

    The limit is that of the command's own group, or of the group around it.
    """
    memory = ground.plan.memory
    if (available_memory() or 0) < memory.with_jobs(JOBS) + 256 * MIB:
        pytest.skip("not enough memory here to show what a group takes away")
    with place.inner() as free:
        assert jobs_told(pack_in(free, ground, tmp_path / "free", JOBS)) == JOBS
    seen = []
    step = memory.per_job if EVERY else 2 * memory.per_job
    for number, limit in enumerate(range(memory.with_jobs(1), memory.with_jobs(JOBS) + 128 * MIB, step)):
        out = tmp_path / str(number)
        with place.inner(limit) as outer, outer.inner() if around else nullcontext(outer) as group:
            done = pack_in(group, ground, out, JOBS)
            peak = group.peak
        if done.returncode:
            assert not seen, "more memory is never worse"
            numbers_of_refusal(done.stderr)
            continue
        ground.check_finished(out)
        jobs = jobs_told(done)
        seen.append(jobs)
        assert jobs <= (limit - memory.fixed) // memory.per_job
        if peak is not None:
            assert jobs >= min(JOBS, (limit - peak - memory.fixed) // memory.per_job)
    assert seen == sorted(seen)
    assert seen[0] <= 2
    assert seen[-1] == JOBS
    assert len(set(seen)) >= 4
    print(f"limits: jobs of {JOBS} that a control group allows, {step // MIB} MiB more from step to step: {seen}")
