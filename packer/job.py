"""What the steps of one pack share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from formats.checkpoint import Checkpoint
from formats.families import Model
from packer.outcome import Outcome
from packer.planning.plan import Plan, Unit
from packer.pool import Pool
from packer.progress import Progress
from packer.staging import Supply
from packer.storage.journal import Entry, Journal
from packer.storage.system import System

Report = Callable[[Progress], None]


class Releasable(Protocol):
    """A folder whose shards may be deleted once everything made from them is durable."""

    def present(self, name: str) -> bool:
        """Whether a shard is here as it was fetched, or as the user listed it for release."""

    def note_released(self, name: str) -> None:
        """Remember durably, beside the shards, that one of them was deleted on purpose."""


@dataclass(frozen=True)
class Job:
    """Everything that the steps of one pack share. ``abandon`` tells the units of this pack to end at once.

    Attributes:
        expected: SHA-256 of shards in hex, as their repository says it.
        needs: by name of unit, the shards that it is made from.
        users: by name of shard, the units that need it.
        supply: brings shards into the staging folder, or None if all of them are here.
        release: deletes shards that are used up, or None: then nothing of the source ever is.
        freed: bytes that came back, by name of shard that was deleted in this run.
    """

    checkpoint: Checkpoint
    model: Model
    plan: Plan
    out: Path
    journal: Journal
    outcome: Outcome
    report: Report
    stop: threading.Event
    abandon: threading.Event
    pool: Pool
    system: System
    expected: Mapping[str, str]
    needs: Mapping[str, tuple[str, ...]]
    users: Mapping[str, tuple[Unit, ...]]
    supply: Supply | None
    release: Releasable | None
    freed: dict[str, int] = field(default_factory=dict)

    def tell(self, what: str) -> None:
        """Report how far the pack is."""
        self.report(Progress(self.outcome.durable_bytes(self.plan), self.plan.container_bytes, what))

    def note(self, entry: Entry) -> None:
        """Journal an entry, and take it in once it is durable."""
        self.journal.append(entry)
        self.outcome.apply(self.plan, entry)
