"""Signals in the middle of a fetch: little is transferred twice, and nothing wrong ever has a name."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from packer.fetch.client import CHUNK_BYTES
from packer.fetch.listing import RECEIPT_NAME, WORK_DIR
from tests.support.hub_server import HubServer, serve
from tests.support.repositories import small_repository

ROOT = Path(__file__).parent.parent.parent.parent
KILLS = int(os.environ.get("MOEPACK_FETCH_KILLS", "20"))  # of one connection; a third of it of four
TIMEOUT = 120


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve(small_repository(4, 3_000_000)) as server:
        server.pace = 0.01
        yield server


def start(hub: HubServer, folder: Path, jobs: int) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy") and name != "HF_TOKEN"
    }
    return subprocess.Popen(
        [sys.executable, "-m", "packer", "fetch", hub.repository, "--to", str(folder), "--jobs", str(jobs)],
        env={**environment, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.endpoint},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def wait_for(hub: HubServer, sent: int, process: subprocess.Popen[str]) -> None:
    """Until so many bytes went out in all, or the process has ended."""
    deadline = time.monotonic() + TIMEOUT
    while hub.sent < sent and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_named(hub: HubServer, folder: Path) -> int:
    """Every file that has its name has its bytes; how many there are."""
    named = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] != WORK_DIR]
    named = [path for path in named if not path.name.startswith(RECEIPT_NAME)]
    for path in named:
        expected = hub.files[str(path.relative_to(folder))]
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(expected).digest(), path
    return len(named)


@pytest.mark.parametrize("jobs", [1, 4])
def test_fet_01_killed_at_random(hub: HubServer, tmp_path: Path, jobs: int) -> None:
    total = sum(len(data) for data in hub.files.values())
    rng = random.Random(jobs)
    moments = sorted(rng.randrange(total) for _ in range(KILLS if jobs == 1 else KILLS // 3))
    folder = tmp_path / "model"
    kills = 0
    for moment in moments:
        process = start(hub, folder, jobs)
        wait_for(hub, max(moment, hub.sent + rng.randrange(200_000)), process)
        process.kill()
        process.communicate(timeout=TIMEOUT)
        kills += process.returncode == -signal.SIGKILL
        check_named(hub, folder)
    process = start(hub, folder, jobs)
    _, messages = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, messages
    assert check_named(hub, folder) == len(hub.files)
    assert kills >= len(moments) // 2
    # What is lost at a kill is what was on its way: at most a chunk a connection.
    bound = 1.05 * total + kills * jobs * CHUNK_BYTES
    print(f"jobs {jobs}: {kills} kills, repository {total} bytes, sent {hub.sent} bytes ({hub.sent / total:.3f} times)")
    assert hub.sent <= bound


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cli_05_signal_keeps_what_has_arrived(hub: HubServer, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "model"
    process = start(hub, folder, 2)
    wait_for(hub, 2_000_000, process)
    process.send_signal(number)
    _, messages = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, messages
    assert f"continue with: moepack fetch {hub.repository} --to {folder}" in messages
    kept = sum(path.stat().st_size for path in (folder / WORK_DIR).glob("*.part"))
    assert kept > 1_000_000
    before = hub.sent
    process = start(hub, folder, 2)
    _, messages = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, messages
    assert check_named(hub, folder) == len(hub.files)
    total = sum(len(data) for data in hub.files.values())
    assert hub.sent - before <= total - kept
