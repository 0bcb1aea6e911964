"""What this machine has to offer: processors, and memory that is free for this process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # control groups of version 1 write "no limit" as a number near 2^63


@dataclass(frozen=True)
class SystemFiles:
    """Where Linux tells about memory; absent elsewhere, which means unknown."""

    meminfo: Path = Path("/proc/meminfo")
    statm: Path = Path("/proc/self/statm")
    membership: Path = Path("/proc/self/cgroup")
    groups: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Accounting:
    """Names of the files of a control group, by version; page cache that can be dropped is not counted as used."""

    limit: str
    used: str
    droppable: str


_VERSION_1 = _Accounting("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Accounting("memory.max", "memory.current", "inactive_file")


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(files: SystemFiles = SystemFiles()) -> int | None:
    """Bytes that this process may still take: the least of machine, control groups and process; None if unknown."""
    limits = [_machine(files), *_control_groups(files), _address_space(files)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _machine(files: SystemFiles) -> int | None:
    for line in _lines(files.meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(files: SystemFiles) -> list[int]:
    """What is left below the limit of this process's group and of each group around it."""
    left = []
    for line in _lines(files.membership) or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        mounts: tuple[Path, ...]
        if controllers == "":
            mounts, names = (files.groups, files.groups / "unified"), _VERSION_2
        elif "memory" in controllers.split(","):
            mounts, names = (files.groups / "memory",), _VERSION_1
        else:
            continue
        # In a container the path may be that of the host and not exist here; its own group is then the mount's root.
        place = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for group in dict.fromkeys([mount / place, *(mount / parent for parent in place.parents), mount]):
                free = _left_in_group(group, names)
                if free is not None:
                    left.append(free)
    return left


def _left_in_group(group: Path, names: _Accounting) -> int | None:
    limit, used = _lines(group / names.limit), _lines(group / names.used)
    if not limit or not used or not limit[0].isdigit() or not used[0].isdigit() or int(limit[0]) >= _UNLIMITED:
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    droppable = statistics.get(names.droppable, "0")
    return int(limit[0]) - int(used[0]) + (int(droppable) if droppable.isdigit() else 0)


def _address_space(files: SystemFiles) -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = _lines(files.statm)
    if soft == resource.RLIM_INFINITY or not statm:
        return None
    return soft - int(statm[0].split()[0]) * resource.getpagesize()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
