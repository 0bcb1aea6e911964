"""Packs from a repository as separate processes, and a look at their staging folder from outside."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.support.hub_server import COMMIT, HubServer

ROOT = Path(__file__).parent.parent.parent


def environment(endpoint: str) -> dict[str, str]:
    """Variables for a process that talks to a local hub, and to nothing else."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("HF_TOKEN", None)
    kept.pop("HF_HUB_OFFLINE", None)
    return {**kept, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": endpoint}


def start(hub: HubServer | None, *arguments: object) -> subprocess.Popen[str]:
    """``moepack`` with these arguments."""
    endpoint = hub.endpoint if hub is not None else "http://127.0.0.1:9"
    return subprocess.Popen(
        [sys.executable, "-m", "packer", *map(str, arguments)],
        env=environment(endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for the end; what was printed."""
    try:
        printed, messages = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, messages
    return printed, messages


def moepack(hub: HubServer | None, *arguments: object, code: int = 0) -> tuple[str, str]:
    """Run a command to its end."""
    return finish(start(hub, *arguments), code)


def provenance() -> list[str]:
    """What a pack from a checkout must be told to give the bytes of one from the repository."""
    return ["--repository", "owner/model", "--commit", COMMIT]


def identical(first: Path, second: Path) -> bool:
    """Whether two trees hold the same names and bytes."""
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (first, second)]
    files = [name for name in names[0] if (first / name).is_file()]
    return names[0] == names[1] and all(filecmp.cmp(first / name, second / name, shallow=False) for name in files)


class Watcher:
    """Measures, again and again, what shards take in a staging folder, whole and in part, in a ``with`` block."""

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        """``disk`` is a folder whose blocks are counted, with all that lies in it."""
        self.folder = folder
        self.disk = disk
        self.most_disk = 0
        self.most = 0
        self.looks = 0
        self.met: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> int:
        """One look. A file that is renamed meanwhile is counted once, by its inode."""
        sizes: dict[int, int] = {}
        for pattern in ("*.safetensors", ".moepack-fetch/*.part"):
            for path in self.folder.glob(pattern):
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                if path.suffix == ".safetensors":
                    self.met.add(path.name)
                sizes[found.st_ino] = found.st_size
        return sum(sizes.values())

    def blocks(self) -> int:
        """Bytes of the blocks of all files and folders of the disk."""
        total: dict[int, int] = {}
        for root, folders, files in os.walk(self.disk or self.folder):
            for name in folders + files:
                with suppress(FileNotFoundError):
                    found = (Path(root) / name).lstat()
                    total[found.st_ino] = found.st_blocks * 512
        return sum(total.values())

    def _run(self) -> None:
        while not self._end.wait(0.001):
            self.most = max(self.most, self.look())
            if self.disk is not None:
                self.most_disk = max(self.most_disk, self.blocks())
            self.looks += 1
