"""What this machine has to offer: processors, and memory that is free for this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from formats.errors import EnvironmentProblem
from packer.estimate import Memory

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that this process may still take: the least of machine, control group and process; None if unknown."""
    limits = [limit for limit in (_machine(), _control_group(), _address_space()) if limit is not None]
    return max(0, min(limits)) if limits else None


def fitting_jobs(memory: Memory, jobs: int, available: int | None) -> int:
    """The most jobs, at most ``jobs``, whose memory fits into ``available`` bytes.

    Raises:
        EnvironmentProblem: not even one fits.
    """
    if available is None or memory.with_jobs(jobs) <= available:
        return jobs
    if memory.with_jobs(1) > available:
        raise EnvironmentProblem(
            "not enough memory for one job",
            expected=f"{memory.with_jobs(1)} bytes",
            found=f"{available} bytes available",
            hint="free some memory or raise the limit; the largest expert decides, not the model",
        )
    return max(1, (available - memory.fixed) // memory.per_job)


def _machine() -> int | None:
    for line in _lines(_MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group() -> int | None:
    limit, used = _lines(_CGROUP / "memory.max"), _lines(_CGROUP / "memory.current")
    if not limit or not used or not limit[0].isdigit():
        return None
    return int(limit[0]) - int(used[0])


def _address_space() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = _lines(_STATM)
    if soft == resource.RLIM_INFINITY or not statm:
        return None
    return soft - int(statm[0].split()[0]) * resource.getpagesize()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
