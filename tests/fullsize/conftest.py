"""The released Kimi K3 without its weights, as a checkpoint and as a container: made once, deleted at the end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.codecs import group_int, raw
from formats.families import bind
from packer.recipe.recipe import load_recipe, override, plain
from runtime.machine import available_memory
from tests.support.sparse_checkpoint import SparseCheckpoint, holes_are_free, make_checkpoint, unpack_metadata
from tests.support.sparse_container import make_container, model_blueprint

# Experts at the ends of their shards, and across byte 2^31 (773) and 2^32 (651) of the shard of layer 1.
EXPERTS = [(1, expert) for expert in (0, 1, 2, 3, 651, 773)] + [(92, expert) for expert in (892, 893, 894, 895)]
# Records at the ends of their banks, and across byte 2^31 (172) and 2^32 (345) of the bank of layer 1.
RECORDS = [(1, 0), (1, 172), (1, 345), (1, 895), (92, 895)]
SHARED_MEMORY = Path("/dev/shm")
ROUTER = "language_model.model.layers.92.block_sparse_moe.gate.weight"
NORM = "language_model.model.layers.92.input_layernorm.weight"

INT4, INT8 = (group_int.Parameters(bits=bits, group=128) for bits in (4, 8))
TRUNK = {
    "embedding": INT8,
    "head": INT8,
    "attention_gate": INT8,
    "attention": INT4,
    "latent": INT4,
    "shared_expert": INT4,
    "dense_mlp": INT4,
}

whole = pytest.mark.skipif(
    not os.environ.get("MOEPACK_FULL_SIZE"), reason="takes minutes and reads whole shards; run it with: make test-full"
)


@dataclass(frozen=True)
class SparseContainer:
    """The container, and the contents of its trunk tensors that have some."""

    path: Path
    contents: dict[str, bytes]


@pytest.fixture(scope="session")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for sparse files, emptied at the end; in memory where that is plentiful.

    Reading a hole of a disk file fills the page cache with zeros, and where a disk is mounted with ``discard``,
    deleting 100,000 lone blocks takes minutes.
    """
    folder = (
        Path(tempfile.mkdtemp(prefix="moepack-", dir=SHARED_MEMORY)) if _roomy() else tmp_path_factory.mktemp("full")
    )
    try:
        if not sys.platform.startswith("linux") or not holes_are_free(folder):
            pytest.skip("needs Linux, and a file system with sparse files")
        yield folder
    finally:
        shutil.rmtree(folder)


def _roomy() -> bool:
    """Whether a gigabyte of files in memory bothers nobody."""
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return False
    free = os.statvfs(SHARED_MEMORY)
    return free.f_bavail * free.f_frsize > 4 << 30 and (available_memory() or 0) > 8 << 30


@pytest.fixture(scope="session")
def metadata(space: Path) -> Path:
    """Configuration and index alone."""
    return unpack_metadata(space / "metadata")


@pytest.fixture(scope="session")
def checkpoint(space: Path) -> SparseCheckpoint:
    """96 shards with 1.56 TB of holes."""
    return make_checkpoint(space / "k3", experts=EXPERTS, trunk=[ROUTER, NORM])


@pytest.fixture(scope="session")
def container(space: Path, metadata: Path, checkpoint: SparseCheckpoint) -> SparseContainer:
    """What the bundled recipe makes of it: 82,432 records."""
    # Records of random codes have made-up errors of up to 0.3.
    recipe: dict[str, Any] = plain(override(load_recipe("kimi-k3"), ["experts.max_rel_error=0.35"]))
    with open_checkpoint(metadata, need_headers=False) as source:
        model = bind(source)
    blueprint = model_blueprint(
        model,
        recipe=recipe,
        trunk=lambda role, dtype: TRUNK.get(role) or raw.Parameters(dtype),
        shards=tuple(sorted((path.name, path.stat().st_size) for path in checkpoint.directory.glob("*.safetensors"))),
        assets={"config.json": (metadata / "config.json").read_bytes()},
    )
    path = space / "k3.moepack"
    return SparseContainer(path, make_container(path, blueprint, records=RECORDS, trunk=[ROUTER, NORM]))
