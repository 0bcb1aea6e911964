"""A process whose children pack and are killed: started once, so that each kill costs a fork and not an interpreter.

``Victims`` is the side of the test. The process reads one JSON object a line and answers each with one. An order says
where the container is to be (``out``), how many ``jobs``, and when the child dies by SIGKILL: at its system call number
``at`` (``when``: before it, after it, or halfway in a write), at call ``nth`` named ``call`` whose path ends with
``path``, or ``delay`` seconds after it began. ``limits`` are soft limits of resources by name, ``memory`` is how many
bytes of address space it may take beyond what it has when it is born, ``group`` lists the members of a control group
that it enters.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from formats.errors import MoepackError
from packer.storage.system import System
from tests.support.faults import Call, wrapped
from tests.support.packs import pack_source

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 60  # seconds; a child that waits for ever ends by SIGALRM, which no test takes for an ordered end
PATH_FIRST = ("open", "mkdir", "unlink", "rename")


@dataclass(frozen=True)
class Death:
    """How a child ended: its exit code, or the signal; the error's line if it had one."""

    code: int
    signal: int
    line: str

    @property
    def killed(self) -> bool:
        """By the signal that was ordered."""
        return self.signal == signal.SIGKILL


class Victims:
    """The process and the line to it; use it in a ``with`` block."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.victim", str(source)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def run(self, out: Path, **order: Any) -> Death:
        """Let one child pack into ``out`` and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"out": str(out), "jobs": 1, **order}) + "\n")
        self._process.stdin.flush()
        return Death(**json.loads(self._process.stdout.readline()))


class Executioner:
    """Counts system calls, remembers which path a descriptor stands for, and ends the process at the ordered one."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.count = 0
        self.matches = 0
        self.paths: dict[int, str] = {}
        self.guard = threading.RLock()
        self.system: System = wrapped(self.around)

    def around(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        with self.guard:
            self.count += 1
            due = self.due(name, arguments)
            when = self.order.get("when", "before")
            if due and when == "before":
                die()
            if due and when == "halfway" and name == "pwrite":
                fd, data, offset = arguments
                call(fd, data[: len(data) // 2], offset)
                die()
        try:
            result = call(*arguments)
        finally:  # a call that finds nothing to delete counts, too
            if due:
                die()
        if name == "open":
            self.paths[result] = str(arguments[0])
        return result

    def due(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if "at" in self.order:
            return bool(self.count == self.order["at"])
        if self.order.get("call") != name:
            return False
        path = str(arguments[-1 if name == "rename" else 0])
        if name not in PATH_FIRST:
            path = self.paths.get(arguments[0], "")
        self.matches += path.endswith(self.order["path"])
        return path.endswith(self.order["path"]) and self.matches == self.order.get("nth", 1)


def die() -> None:
    """At once, in the middle of whatever other threads do."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may reach another thread first


def child(source: Path, order: dict[str, Any], pipe: int) -> int:
    """Pack under an executioner and return the exit code."""
    if "group" in order:
        Path(order["group"]).write_text(str(os.getpid()))
    for name, limit in order.get("limits", {}).items():
        number = getattr(resource, name)
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    if "memory" in order:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + order["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.alarm(PATIENCE)
    try:
        pack_source(source, Path(order["out"]), jobs=order["jobs"], system=Executioner(order).system)
    except MoepackError as error:
        os.write(pipe, error.line().encode()[:4000])
        return error.exit_code
    except BaseException as error:
        os.write(pipe, f"{type(error).__name__}: {error}".encode()[:4000])
        return 99
    return 0


def obey(source: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Fork a child, wait for its end, or bring it about."""
    reading, writing = os.pipe()
    number = os.fork()
    if not number:
        code = 98
        try:
            os.close(reading)
            code = child(source, order, writing)
        finally:
            os._exit(code)
    os.close(writing)
    if "delay" in order:
        time.sleep(order["delay"])
        os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    with os.fdopen(reading, "rb") as file:
        line = file.read().decode("utf-8", "replace")
    if os.WIFSIGNALED(status):
        return {"code": -1, "signal": os.WTERMSIG(status), "line": line}
    return {"code": os.WEXITSTATUS(status), "signal": 0, "line": line}


def main() -> None:
    """Obey orders until there are no more."""
    source = Path(sys.argv[1])
    for text in sys.stdin:
        sys.stdout.write(json.dumps(obey(source, json.loads(text))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
