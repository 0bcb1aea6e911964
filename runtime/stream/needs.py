"""How much memory serving weights takes, from headers alone."""

from __future__ import annotations

from formats.index import INDEX_ROW_BYTES
from runtime.budget import StoreNeeds
from runtime.stream.segments import Segments
from runtime.stream.trunk import resident_bytes, streamed_bytes

OBJECT_BYTES = 6144  # what Python keeps beside an expert in its slot: an entry, three matrices, nine arrays (measured)
RANK_BYTES = 24  # an expert, in the tables of the cache's policy


def store_needs(slot_bytes: int, experts: int, segments: Segments) -> StoreNeeds:
    """What serving a model takes.

    Args:
        slot_bytes: the largest expert, whole pages.
        experts: how many there are in all layers.
        segments: the trunk.
    """
    return StoreNeeds(
        slot_bytes=slot_bytes + OBJECT_BYTES if slot_bytes else 0,
        experts=experts,
        tables=experts * (INDEX_ROW_BYTES + RANK_BYTES),
        resident_trunk=resident_bytes(segments),
        streamed_trunk=streamed_bytes(segments),
    )
