"""CTR-05 at random: damage of any kind to any file of a small container never passes ``verify --level hashes``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.container import open_container
from formats.errors import FormatError, MoepackError
from formats.layout import Matrix
from packer.verify.verify import verify
from tests.fuzz.mutate import mutated
from tests.support.containers import BF16, INT8, MXFP4, RVQ_EXPERT, Forge, Layer, Spec, build_container
from tests.support.memory import memory_folder
from tests.support.packs import tree

RECIPE = Spec().recipe | {"experts": {"codec": "raw", "max_rel_error": 0.0}}
SMALL = Spec(
    hidden_layers=3,
    layers={1: Layer((BF16, BF16)), 2: Layer((BF16, BF16))},
    shapes=((4, 8), (4, 8), (8, 4)),
    tensors=Spec().tensors[:3],
    recipe=RECIPE,
)
EVERY_CODEC = Spec(
    hidden_layers=2,
    layers={1: Layer((RVQ_EXPERT, MXFP4, INT8, BF16))},
    shapes=((10, 40), (10, 40), (40, 10)),
    tensors=Spec().tensors[:3],
)


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Path, dict[str, bytes]]]:
    with memory_folder() as folder:
        path = build_container(Path(folder) / "model.moepack", SMALL)
        yield path, tree(path)


def restore(path: Path, sound: dict[str, bytes]) -> None:
    """The container as it was, whatever lies there now."""
    shutil.rmtree(path)
    for name, data in sound.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def passes(path: Path) -> bool:
    """Whether ``verify`` finds nothing; a refusal is an answer, any other exception comes through."""
    try:
        return verify(path, level="hashes").ok
    except FormatError as error:
        return not error.where  # a refusal says where


def test_the_container_is_sound_before(small: tuple[Path, dict[str, bytes]]) -> None:
    assert passes(small[0])


@given(st.integers(0, 1 << 62))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_ctr_05_random_damage_never_passes(small: tuple[Path, dict[str, bytes]], seed: int) -> None:
    path, sound = small
    dice = random.Random(seed)
    name = dice.choice(sorted(sound))
    damaged = mutated(sound[name], list(sound.values()), dice, text=name.endswith("json"))
    (path / name).write_bytes(damaged)
    assert passes(path) == (damaged == sound[name]), f"{name}, seed {seed}"
    (path / name).write_bytes(sound[name])


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ctr_05_files_lost_exchanged_or_added_never_pass(
    small: tuple[Path, dict[str, bytes]], data: st.DataObject
) -> None:
    path, sound = small
    first, second = data.draw(st.lists(st.sampled_from(sorted(sound)), min_size=2, max_size=2, unique=True))
    kind = data.draw(st.sampled_from(("lost", "exchanged", "copied", "added", "renamed")))
    if kind == "lost":
        (path / first).unlink()
    elif kind == "exchanged":
        (path / first).write_bytes(sound[second])
        (path / second).write_bytes(sound[first])
    elif kind == "copied":
        (path / first).write_bytes(sound[second])
    elif kind == "added":
        (path / f"{first}.old").write_bytes(sound[first])
    else:
        (path / first).rename(path / f"{first}.old")
    assert not passes(path), (kind, first, second)
    restore(path, sound)


@pytest.fixture(scope="module")
def every_codec() -> Iterator[Path]:
    with memory_folder() as folder:
        yield build_container(Path(folder) / "model.moepack", EVERY_CODEC)


@given(st.integers(0, 1 << 62))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_damage_under_right_digests_never_crashes(every_codec: Path, seed: int) -> None:
    """Whoever can seal a container can say what he likes: it is read, or refused with a reason, and nothing else."""
    dice = random.Random(seed)
    sound = tree(every_codec)
    forge = Forge(every_codec)
    part = dice.choice(("bank", "bank", "index", "trunk"))
    target = {"bank": forge.banks[1], "index": forge.index, "trunk": forge.trunk}[part]
    # Headers and tables are small and decide most, so they get most of the damage.
    start, length = dice.choice(((0, len(target)), (0, min(1024, len(target))), (320, 448)))
    piece = bytes(target[start : start + length])
    target[start : start + length] = mutated(piece, [piece], dice, text=False)[: len(piece)].ljust(len(piece), b"\0")
    path = forge.save()
    passes(path)
    with suppress(MoepackError), open_container(path) as container:
        for row in container.rows(1):
            with suppress(MoepackError):
                record = container.record(1, row.expert)
                for matrix in Matrix:
                    assert np.isfinite(record.matrix(matrix)).all() or record.header.codec.label == "raw"
        for tensor in container.manifest.tensors:
            with suppress(MoepackError):
                container.tensor_values(tensor)
    restore(every_codec, sound)
