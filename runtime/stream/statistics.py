"""What streaming has done: counts and seconds, as frozen snapshots."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class StreamStatistics:
    """Of the routed experts since the stream was opened; subtract an earlier snapshot for what came after it.

    Attributes:
        hits: experts asked for that were in a slot.
        joined: experts asked for while their look-ahead read was under way.
        misses: experts asked for that had to be read from the start.
        ahead_reads: experts read because they were expected.
        ahead_used: of those, how many were then asked for before they were evicted.
        evictions: experts that made room for others.
        reads: experts read as a whole, for whatever reason.
        bytes_read: of them, and of others that were given up half read.
        read_seconds: in reads, of all reading threads together.
        proofs: records that were compared with their digests.
        proof_seconds: that it took, of all threads together.
        compute_seconds: in the work on experts, of all threads together.
        stall_seconds: that the caller waited while no work was ready or running.
    """

    hits: int = 0
    joined: int = 0
    misses: int = 0
    ahead_reads: int = 0
    ahead_used: int = 0
    evictions: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    proofs: int = 0
    proof_seconds: float = 0.0
    compute_seconds: float = 0.0
    stall_seconds: float = 0.0

    @property
    def asked(self) -> int:
        """Experts asked for."""
        return self.hits + self.joined + self.misses

    @property
    def hit_rate(self) -> float:
        """The part of the experts asked for whose reading had at least begun; 0 if none was asked for."""
        return (self.hits + self.joined) / self.asked if self.asked else 0.0

    def __sub__(self, earlier: StreamStatistics) -> StreamStatistics:
        return StreamStatistics(**_differences(self, earlier))


@dataclass(frozen=True)
class TrunkStatistics:
    """Of the trunk since it was opened; subtract an earlier snapshot for what came after it.

    Attributes:
        bytes_read: in all.
        stall_seconds: that the caller waited for a segment or a piece of the head.
    """

    bytes_read: int = 0
    stall_seconds: float = 0.0

    def __sub__(self, earlier: TrunkStatistics) -> TrunkStatistics:
        return TrunkStatistics(**_differences(self, earlier))


def _differences(later: DataclassInstance, earlier: DataclassInstance) -> dict[str, Any]:
    """Field by field."""
    return {field.name: getattr(later, field.name) - getattr(earlier, field.name) for field in fields(later)}
