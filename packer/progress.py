"""Showing how far a long command is: a bar on a terminal, else a plain line about every half minute, on stderr.

Remaining time is computed from bytes done in this run, so that what an earlier run left behind does not flatter it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from packer.output import Output, escape, human_bytes, human_seconds, is_terminal

HEARTBEAT_SECONDS = 30.0


@dataclass(frozen=True)
class Progress:
    """How far a command is: bytes (or what else it counts) done and to do, and what it works on."""

    done_bytes: int
    total_bytes: int
    what: str


class ProgressLine:
    """Shows the :class:`Progress` values it is called with, from any thread; use it in a ``with`` statement.

    Args:
        output: where to.
        title: the command.
        clock: seconds.
        spell: how what is counted is written.
        moving: a terminal gets a bar, which takes a little of the processor all the time; otherwise lines as elsewhere.
    """

    def __init__(
        self,
        output: Output,
        title: str,
        clock: Callable[[], float] = time.monotonic,
        spell: Callable[[int], str] = human_bytes,
        moving: bool = True,
    ) -> None:
        self._output = output
        self._title = title
        self._spell = spell
        self._clock = clock
        self._lock = threading.Lock()
        self._first: tuple[float, int] | None = None  # time and bytes of the first report
        self._last_line = clock()
        self._bar: Bar | None = None
        if moving and is_terminal(output.stderr) and not output.quiet:
            console = Console(file=output.stderr, no_color=not output.color, markup=False, emoji=False, highlight=False)
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[count]}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(title, total=None, count="")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._first is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show ``progress``, or note it for the next line."""
        if self._output.quiet:
            return
        with self._lock:
            now = self._clock()
            begins = self._first is None
            if self._first is None:
                self._first = (now, progress.done_bytes)
            if self._bar is not None:
                text = escape(f"{self._title} {progress.what}")
                self._bar.update(
                    self._task,
                    description=text[:60],
                    total=progress.total_bytes,
                    completed=progress.done_bytes,
                    count=f"{self._spell(progress.done_bytes)} of {self._spell(progress.total_bytes)}",
                )
                if begins:  # not before: there would be no total to show
                    self._bar.start()
            elif now - self._last_line >= HEARTBEAT_SECONDS:
                self._last_line = now
                seconds, fresh = now - self._first[0], progress.done_bytes - self._first[1]
                self._output.note(heartbeat(self._title, progress, seconds, fresh, self._spell))


def heartbeat(
    title: str, progress: Progress, seconds: float, fresh_bytes: int, spell: Callable[[int], str] = human_bytes
) -> str:
    """The plain line: percentage, bytes, what is being done, and the time that is left.

    Args:
        title: the command.
        progress: how far it is.
        seconds: since the first report of this run.
        fresh_bytes: done since then.
        spell: how what is counted is written.
    """
    share = 100.0 * progress.done_bytes / progress.total_bytes if progress.total_bytes else 100.0
    done, total = spell(progress.done_bytes), spell(progress.total_bytes)
    line = f"{title}: {share:.1f} % ({done} of {total}), {progress.what}"
    if fresh_bytes > 0 and seconds > 0:
        left = max(0, progress.total_bytes - progress.done_bytes) * seconds / fresh_bytes
        line += f", about {human_seconds(left)} left"
    return line
