"""One layer's experts under way: what is to be done with each of them, and what is left. Without threads.

An expert that has just been read is proved and worked on by two jobs that may run at the same time, for the last one of
a layer is waited for; what comes of unproved bytes counts only once they are proved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from runtime.store import Expert
from runtime.stream.slots import Entry


@dataclass(frozen=True)
class Job:
    """To prove an expert in its slot, or to work on it."""

    entry: Entry
    proves: bool


@dataclass
class Call:
    """One ``compute`` under way.

    Attributes:
        work: what to do with each expert.
        news: for the asking thread: a token whenever something became ready, ended or failed.
        pinned: the entries that are still to be worked on, by key.
        left: of those in their slot, how many jobs have not ended, by key.
        ready: jobs that nobody has begun.
        helpers: helpers that were asked to take part and have not found everything taken yet.
        busy: helpers that are at a job.
        stopped: nobody begins on another job.
        error: the first one.
    """

    work: Callable[[Expert], None]
    pinned: dict[int, Entry] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    ready: deque[Job] = field(default_factory=deque)
    helpers: int = 0
    busy: int = 0
    stopped: bool = False
    error: BaseException | None = None
    news: SimpleQueue[None] = field(default_factory=SimpleQueue)

    def offer(self, entry: Entry) -> None:
        """A pinned entry is in its slot: its jobs may be done, its proof first."""
        jobs = [Job(entry, proves=False)] if entry.proved else [Job(entry, proves=True), Job(entry, proves=False)]
        self.left[entry.key] = len(jobs)
        self.ready.extend(jobs)

    def take(self) -> Job | None:
        """The next job, if there is one and nothing failed."""
        return None if self.stopped or not self.ready else self.ready.popleft()

    def ended(self, job: Job, error: BaseException | None) -> bool:
        """A job has ended; whether it was the last one of its expert.

        An error of work on what is not proved yet waits for the proof, which may say why.
        """
        entry = job.entry
        self.left[entry.key] -= 1
        if job.proves:
            entry.proved = error is None
            entry.error = error or entry.error
        else:
            entry.error = entry.error or error
        if entry.error is not None and (job.proves or entry.proved or not isinstance(error, Exception)):
            self.fail(entry.error)
        return not self.left[entry.key]

    def fail(self, error: BaseException) -> None:
        """Stop; the first error counts."""
        self.error = self.error or error
        self.stopped = True
        self.news.put(None)
