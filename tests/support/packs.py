"""Small packs that are disturbed on purpose: the source, what an undisturbed pack makes of it, and what must hold."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.errors import MoepackError
from formats.families import Model, bind
from formats.manifest import FILE_NAME, WORK_DIR
from packer.pipeline import PackResult, pack
from packer.planning.plan import Plan, make_plan
from packer.recipe.recipe import default_recipe
from packer.storage.durable import SUFFIX
from packer.storage.system import SYSTEM, System
from tests.support.checkpoints import write_checkpoint
from tests.support.specs import SPECS, CheckpointSpec

# Two banks, a trunk, an asset in a folder of its own, several shards: every kind of step, in about 550 system calls.
SMALL = replace(SPECS["linear"], layers=3, experts=2, per_token=1, vocab=32, moe_width=32)


class Wrong(AssertionError):
    """A disturbance led to a state that must not be."""


@dataclass(frozen=True)
class Ground:
    """A checkpoint, the plan for it, and the files of an undisturbed pack."""

    source: Path
    checkpoint: Checkpoint
    model: Model
    plan: Plan
    reference: dict[str, bytes]
    stamps: dict[str, tuple[int, int]]

    def pack(self, out: Path, *, system: System = SYSTEM, jobs: int = 1, **options: Any) -> PackResult:
        """Pack, or continue."""
        return pack(self.checkpoint, self.model, self.plan, out, jobs=jobs, system=system, **options)

    def check_source(self) -> None:
        """Nothing of the source was touched.

        Raises:
            Wrong: it was.
        """
        if stamps(self.source) != self.stamps:
            raise Wrong("source was touched")

    def check_unfinished(self, out: Path) -> None:
        """Whatever has its final name is right to the byte; a manifest means that everything is there.

        Raises:
            Wrong: it is not so, or something lies there that no pack makes.
        """
        self.check_source()
        found = tree(out)
        for name, data in found.items():
            if name.startswith(f"{WORK_DIR}/") or name.removesuffix(SUFFIX) not in self.reference:
                if not name.startswith(f"{WORK_DIR}/"):
                    raise Wrong(f"strange file {name}")
            elif not name.endswith(SUFFIX) and data != self.reference[name]:
                raise Wrong(f"final name {name} with wrong bytes")
        if FILE_NAME in found and not self.reference.keys() <= found.keys():
            raise Wrong(f"manifest without {sorted(self.reference.keys() - found.keys())}")

    def check_finished(self, out: Path) -> None:
        """The container is there with the bytes of an undisturbed pack, and nothing else.

        Raises:
            Wrong: it is not.
        """
        self.check_source()
        found = tree(out)
        if found != self.reference or (out / WORK_DIR).exists():
            names = sorted(
                name for name in found.keys() | self.reference.keys() if found.get(name) != self.reference.get(name)
            )
            raise Wrong(f"differs from an undisturbed pack: {names}")

    def resume(self, out: Path, **options: Any) -> None:
        """What a user does after trouble: the same command, once; then everything must be right.

        Raises:
            Wrong: the command failed, or the result differs.
        """
        try:
            self.pack(out, **options)
        except (MoepackError, OSError) as error:
            raise Wrong(f"resuming failed: {type(error).__name__}: {error}") from error
        self.check_finished(out)


def prepare(directory: Path, spec: CheckpointSpec = SMALL) -> Ground:
    """Write a checkpoint into ``directory`` and pack it undisturbed."""
    directory.mkdir(parents=True)
    source = write_checkpoint(directory / "source", spec)
    checkpoint = open_checkpoint(source)
    model = bind(checkpoint)
    plan = make_plan(checkpoint, model, default_recipe(model.architecture.family))
    pack(checkpoint, model, plan, directory / "undisturbed", jobs=1)
    return Ground(source, checkpoint, model, plan, tree(directory / "undisturbed"), stamps(source))


def pack_source(source: Path, out: Path, **options: Any) -> PackResult:
    """Open a checkpoint, plan for it as :func:`prepare` does, and pack it."""
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        plan = make_plan(checkpoint, model, default_recipe(model.architecture.family))
        return pack(checkpoint, model, plan, out, **options)


def tree(directory: Path) -> dict[str, bytes]:
    """Relative name to contents of every file."""
    if not directory.is_dir():
        return {}
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Relative name to length and time of modification."""
    found = {str(path.relative_to(directory)): path.stat() for path in directory.rglob("*")}
    return {name: (entry.st_size, entry.st_mtime_ns) for name, entry in found.items()}


@contextmanager
def no_leaks() -> Iterator[None]:
    """Insist that a block leaves no descriptor open and no thread running.

    Raises:
        Wrong: it does.
    """
    before = _descriptors()
    threads = threading.active_count()
    yield
    if _descriptors() != before:
        raise Wrong(f"descriptors left open: {_descriptors()} instead of {before}")
    if threading.active_count() != threads:
        raise Wrong("threads left running")


def _descriptors() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return 0  # a system without /proc
