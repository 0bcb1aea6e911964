"""Packing whole experts of Kimi K3's size, from a checkpoint on the disk to a container that verify has measured.

The checkpoint is a small Kimi K3 whose experts have the real shapes and the statistics of the proxy expert
(``proxy.py``); it and the containers lie in a temporary folder and are removed. The error is what ``verify --level
parity`` finds in the container, by its own decoder, not what the packer recorded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.proxy import SHAPES
from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.recipe.recipe import load_recipe, override
from packer.verify.verify import verify
from tests.support.checkpoints import K3, write_checkpoint


@dataclass(frozen=True)
class Packed:
    """One pack of some experts.

    Attributes:
        effort: of the recipe.
        experts: how many were packed.
        jobs: units at a time.
        seconds: wall time of ``pack``, from the plan to the published container.
        processor_seconds: of the whole process meanwhile.
        mean_error, max_error: over the expert matrices, as verify measured them.
    """

    effort: str
    experts: int
    jobs: int
    seconds: float
    processor_seconds: float
    mean_error: float
    max_error: float


@contextmanager
def checkpoint_of(experts: int, seed: int) -> Iterator[Path]:
    """A checkpoint with one MoE layer of that many experts, in a temporary folder."""
    rows, cols = SHAPES["gate"]
    spec = replace(
        K3,
        seed=seed,
        layers=2,
        experts=experts,
        per_token=1,
        moe_width=rows,
        latent=cols,
        shared=None,
        vision=False,
        shards=2,
    )
    with tempfile.TemporaryDirectory(prefix="moepack-bench-") as folder:
        yield write_checkpoint(Path(folder) / "checkpoint", spec)


def pack_and_measure(source: Path, efforts: Sequence[str], *, jobs: int) -> list[Packed]:
    """Pack ``source`` with each effort and let verify measure the containers."""
    results = []
    for effort in efforts:
        checkpoint = open_checkpoint(source)
        model = bind(checkpoint)
        plan = make_plan(checkpoint, model, override(load_recipe("kimi-k3"), [f"fitting.effort={effort}"]))
        out = source.parent / f"{effort}.moepack"
        wall, processor = time.monotonic(), time.process_time()
        pack(checkpoint, model, plan, out, jobs=jobs)
        wall, processor = time.monotonic() - wall, time.process_time() - processor
        report = verify(out, level="parity", source=source, jobs=jobs)
        if not report.ok or report.parity is None or report.parity.experts.mean is None:
            raise RuntimeError(f"{effort}: {report.problems[:3]}")
        errors = report.parity.experts
        results.append(Packed(effort, plan.experts, jobs, wall, processor, errors.mean or 0.0, errors.max or 0.0))
    return results
