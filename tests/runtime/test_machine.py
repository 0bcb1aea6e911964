"""RUN-07: memory is the least of machine, control groups (both versions, ancestors too) and process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from runtime.machine import SystemFiles, available_memory, processors


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemFiles:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return SystemFiles(tmp_path / "meminfo", tmp_path / "statm", tmp_path / "cgroup", tmp_path / "groups")


def group(directory: Path, **contents: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_without_groups_the_machine_counts(files: SystemFiles) -> None:
    assert available_memory(files) == 5_120_000


def test_a_limit_of_version_2(files: SystemFiles) -> None:
    files.membership.write_text("0::/user/app\n")
    group(files.groups / "user/app", memory__max="3000000\n", memory__current="1000000\n")
    assert available_memory(files) == 2_000_000
    group(files.groups / "user/app", memory__stat="anon 5\ninactive_file 400000\nfile 7\n")
    assert available_memory(files) == 2_400_000
    group(files.groups / "user/app", memory__max="max\n")
    assert available_memory(files) == 5_120_000


def test_an_ancestor_s_limit(files: SystemFiles) -> None:
    files.membership.write_text("0::/user/app\n")
    group(files.groups / "user/app", memory__max="max\n", memory__current="1000\n")
    group(files.groups / "user", memory__max="1500000\n", memory__current="500000\n")
    assert available_memory(files) == 1_000_000


def test_a_limit_of_version_1(files: SystemFiles) -> None:
    files.membership.write_text("5:cpu:/\n4:memory:/jobs/one\n0::/\n")
    own = files.groups / "memory/jobs/one"
    group(own, memory__limit_in_bytes="900000\n", memory__usage_in_bytes="100000\n")
    assert available_memory(files) == 800_000
    group(own, memory__limit_in_bytes="9223372036854771712\n")  # what version 1 calls unlimited
    assert available_memory(files) == 5_120_000
    group(own.parent, memory__limit_in_bytes="700000\n", memory__usage_in_bytes="100000\n")
    assert available_memory(files) == 600_000


def test_a_path_of_the_host_means_the_root_of_the_mount(files: SystemFiles) -> None:
    files.membership.write_text("0::/host/only\n")
    group(files.groups, memory__max="4000000\n", memory__current="3000000\n")
    assert available_memory(files) == 1_000_000


def test_a_limit_of_the_process(files: SystemFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.statm.write_text("100 1 1 1 0 1 0\n")
    limit = 100 * resource.getpagesize() + 777
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert available_memory(files) == 777
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 1))
    assert available_memory(files) == 0


def test_a_machine_that_tells_nothing(files: SystemFiles) -> None:
    files.meminfo.unlink()
    assert available_memory(files) is None
    assert processors() >= 1
