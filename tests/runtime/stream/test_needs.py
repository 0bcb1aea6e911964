"""Memory that a plan counts, against what is really taken."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from formats.container import open_container
from runtime.store import Expert
from runtime.stream.checkpoint import CheckpointExperts, checkpoint_needs
from runtime.stream.container import ContainerExperts, container_needs
from runtime.stream.direct import DirectReads
from runtime.stream.experts import ExpertStream
from runtime.stream.needs import OBJECT_BYTES
from runtime.stream.trunk import resident_bytes, streamed_bytes
from runtime.threads import Workers
from tests.runtime.stream.conftest import DATA, OpenCheckpoint, OpenContainer, Packed
from tests.support.containers import RVQ_EXPERT, RVQ_MATRIX, Layer, Spec, build_container


def test_needs_of_a_container(packed: Callable[[str], Packed], container_at: Callable[[Path], OpenContainer]) -> None:
    """k3-tiny: 6 layers of 16 experts, whose mxfp4 records take 3 x 96 x 64 / 2 codes, as many / 16 scales, 1 KiB."""
    opened = container_at(packed("k3-tiny").container)
    needs = container_needs(opened.container, opened.description)
    assert needs.experts == 96
    payload = 1024 + 3 * 96 * 64 // 2 + 3 * 96 * 64 // 32
    assert needs.slot_bytes == -(-payload // 4096) * 4096 + OBJECT_BYTES
    assert needs.tables == 96 * (128 + 24)
    segments = opened.trunk().segments
    assert (needs.resident_trunk, needs.streamed_trunk) == (resident_bytes(segments), streamed_bytes(segments))
    # The trunk file has a page before the segments and the vision tower behind them.
    used = sum(segment.bytes for segment in segments)
    assert used < opened.container.manifest.trunk.bytes
    assert used <= needs.resident_trunk < used + 200_000


def test_needs_of_a_checkpoint(checkpoint_at: Callable[[Path], OpenCheckpoint]) -> None:
    """The same experts: six tensors each on a line, all of whole lines, in whole pages."""
    opened = checkpoint_at(DATA / "k3-tiny")
    needs = checkpoint_needs(opened.checkpoint, opened.model, opened.description)
    assert needs.experts == 96
    stored = 3 * 96 * 64 // 2 + 3 * 96 * 64 // 32
    assert needs.slot_bytes == -(-stored // 4096) * 4096 + OBJECT_BYTES
    assert CheckpointExperts(opened.checkpoint, opened.model).slot_bytes == needs.slot_bytes - OBJECT_BYTES


def test_objects_beside_a_slot(tmp_path: Path) -> None:
    """An expert of the codec with the most arrays, in the cache: what Python takes for it is below what is counted."""
    records = (RVQ_MATRIX, RVQ_EXPERT) * 20
    spec = Spec(hidden_layers=2, layers={1: Layer(records)}, tensors=Spec().tensors[:5])
    with open_container(build_container(tmp_path / "container", spec)) as container, Workers(1) as workers:
        reads = DirectReads()
        stream = ExpertStream(ContainerExperts(container, reads), slots=len(records), workers=workers)

        def work(expert: Expert) -> None:
            """Nothing."""

        stream.compute(1, [0, 1], work)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            stream.compute(1, range(len(records)), work)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        stream.close()
        reads.close()
    assert 0 < taken / (len(records) - 2) < OBJECT_BYTES
