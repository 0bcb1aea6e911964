"""A small Kimi K3 model, a Kimi-Linear one and one with tied embeddings, each as checkpoint and as container."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.container import Container, open_container
from formats.families import Model, bind
from runtime.description import Description, describe_checkpoint, describe_container
from runtime.stream.checkpoint import CheckpointTrunk
from runtime.stream.container import ContainerTrunk
from runtime.stream.direct import DirectReads
from runtime.stream.tensors import TrunkSource
from tests.support.checkpoints import write_checkpoint
from tests.support.packs import pack_source
from tests.support.specs import SPECS

DATA = Path(__file__).parents[2] / "data"
NAMES = ("k3-tiny", "k3-odd-numbers", "k3-tied", "linear")


@dataclass(frozen=True)
class Packed:
    """Where they lie."""

    source: Path
    container: Path


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    """Packs one of ``NAMES`` with the usual recipe when it is first asked for."""
    made: dict[str, Packed] = {}

    def pack(name: str) -> Packed:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source = DATA / name if (DATA / name).is_dir() else write_checkpoint(folder / "source", SPECS[name])
            pack_source(source, folder / "container", jobs=1)
            made[name] = Packed(source, folder / "container")
        return made[name]

    return pack


@dataclass(frozen=True)
class OpenContainer:
    """An open container with what reads it."""

    container: Container
    description: Description
    reads: DirectReads

    def trunk(self, *, check: bool = True) -> ContainerTrunk:
        """Its trunk."""
        return ContainerTrunk(self.container, self.reads, self.description, check=check)


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint."""

    checkpoint: Checkpoint
    model: Model
    description: Description

    def trunk(self) -> TrunkSource:
        """Its trunk."""
        return CheckpointTrunk(self.checkpoint, self.description)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def container_at(closing: ExitStack) -> Callable[[Path], OpenContainer]:
    """Opens a container; it is closed after the test."""

    def open_it(path: Path) -> OpenContainer:
        container = closing.enter_context(open_container(path))
        reads = DirectReads()
        closing.callback(reads.close)
        return OpenContainer(container, describe_container(container), reads)

    return open_it


@pytest.fixture
def checkpoint_at(closing: ExitStack) -> Callable[[Path], OpenCheckpoint]:
    """Opens a checkpoint; it is closed after the test."""

    def open_it(path: Path) -> OpenCheckpoint:
        checkpoint = closing.enter_context(open_checkpoint(path))
        model = bind(checkpoint)
        return OpenCheckpoint(checkpoint, model, describe_checkpoint(checkpoint, model))

    return open_it
