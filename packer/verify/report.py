"""What a verification hands out: its findings, what it left out, and what the comparison with the source measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.spelling import ranges
from packer.verify.findings import Problem

if TYPE_CHECKING:
    from packer.verify.logits_parity import LogitsParity


@dataclass(frozen=True)
class ErrorSummary:
    """Mean and largest of measured relative errors; None where nothing was measured."""

    mean: float | None
    max: float | None

    def to_dict(self) -> dict[str, Any]:
        """As in JSON: ``{"rel_error": {"mean": ..., "max": ...}}``."""
        return {"rel_error": {"mean": self.mean, "max": self.max}}


@dataclass(frozen=True)
class LeftOut:
    """What a sampled verification did not look at.

    Attributes:
        records: expert records, in all.
        shard_digests: whole-file digests of source shards.
        experts: which records, layer by layer: (layer, numbers of its experts, ascending). Layers whose index rows
            cannot be read are not among them, they are problems.
    """

    records: int
    shard_digests: int
    experts: tuple[tuple[int, tuple[int, ...]], ...]

    def to_dict(self) -> dict[str, Any]:
        """The members of ``left_out`` in JSON; experts as ranges, both ends included."""
        return {
            "records": self.records,
            "shard_digests": self.shard_digests,
            "layers": [{"layer": layer, "experts": ranges(experts)} for layer, experts in self.experts],
        }


@dataclass(frozen=True)
class Parity:
    """What the comparison with the source measured.

    Attributes:
        experts: relative errors over expert matrices.
        trunk: over trunk tensors, copied ones (error 0) included.
        exact_tensors: source tensors whose bytes the container holds bit for bit.
        source_tensors: all tensors of the source.
        unaccounted: those without a fate.
        dropped: those that a rule or a prune plan leaves out, as the manifest says.
        omitted: those that are outside of what a partial container was limited to, likewise.
    """

    experts: ErrorSummary
    trunk: ErrorSummary
    exact_tensors: int
    source_tensors: int
    unaccounted: int
    dropped: int = 0
    omitted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The members that only level ``parity`` has in JSON."""
        return {
            "experts": self.experts.to_dict(),
            "trunk": self.trunk.to_dict(),
            "exact_tensors": self.exact_tensors,
            "source_tensors": self.source_tensors,
            "unaccounted": self.unaccounted,
            "dropped": self.dropped,
            "omitted": self.omitted,
        }


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        level: the level reached.
        container_id: of the container that was verified.
        records_checked: expert records looked at.
        tensors_checked: trunk tensors looked at.
        problems: findings, in a fixed order; empty means that everything looked at is right.
        left_out: None unless a sample was asked for.
        parity: None below level ``parity``.
        logits: None below level ``logits``.
    """

    level: str
    container_id: str
    records_checked: int
    tensors_checked: int
    problems: tuple[Problem, ...]
    left_out: LeftOut | None = None
    parity: Parity | None = None
    logits: LogitsParity | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return {
            "ok": self.ok,
            "level": self.level,
            "container_id": self.container_id,
            "records_checked": self.records_checked,
            "tensors_checked": self.tensors_checked,
            "problems": [problem.to_dict() for problem in self.problems],
            "left_out": None if self.left_out is None else self.left_out.to_dict(),
            **({} if self.parity is None else self.parity.to_dict()),
            **({} if self.logits is None else {"logits": self.logits.to_dict()}),
        }
