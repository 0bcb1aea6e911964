"""PLN-06: as many jobs as fit into memory, and a refusal where not even one does."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from formats.errors import EnvironmentProblem
from packer import machine
from packer.estimate import Memory

MEMORY = Memory(fixed=1000, per_job=100)


@pytest.mark.parametrize(
    ("available", "jobs"), [(None, 8), (1800, 8), (10_000, 8), (1799, 7), (1200, 2), (1199, 1), (1100, 1)]
)
def test_jobs_are_reduced_to_what_fits(available: int | None, jobs: int) -> None:
    assert machine.fitting_jobs(MEMORY, 8, available) == jobs


def test_not_even_one_fits() -> None:
    with pytest.raises(EnvironmentProblem, match=r"expected 1100 bytes, found 1099 bytes available"):
        machine.fitting_jobs(MEMORY, 8, 1099)


def test_the_tightest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.available_memory() == 5_120_000
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert machine.available_memory() == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() == 5_120_000
    (tmp_path / "statm").write_text("100 1 1 1 0 1 0\n")
    monkeypatch.setattr(machine, "_STATM", tmp_path / "statm")
    limit = 100 * resource.getpagesize() + 777
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert machine.available_memory() == 777
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 1))
    assert machine.available_memory() == 0


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEMINFO", "_STATM", "_CGROUP"):
        monkeypatch.setattr(machine, name, tmp_path / "absent")
    assert machine.available_memory() is None
    assert machine.processors() >= 1
