"""Experts from containers and checkpoints: the right weights, one read each, and every damage named by its record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from formats.container import Container, open_container
from formats.encoded import EncodedMatrix, decode_rows
from formats.errors import FormatError, IntegrityError, UsageError
from formats.families.model import MATRICES
from formats.layout import PAGE, Matrix
from formats.source import read_matrix
from runtime.store import Expert
from runtime.stream.checkpoint import CheckpointExperts
from runtime.stream.container import PART_BYTES, ContainerExperts, equal_part
from runtime.stream.direct import Calls, DirectReads
from runtime.stream.memory import Slots
from tests.runtime.stream.conftest import DATA, OpenCheckpoint
from tests.support.checkpoints import write_checkpoint
from tests.support.containers import Spec, all_codecs, build_container
from tests.support.specs import SPECS

Loader = ContainerExperts | CheckpointExperts


def decoded(matrix: EncodedMatrix) -> np.ndarray:
    return decode_rows(matrix, np.arange(matrix.rows))


def read(loader: Loader, layer: int, expert: int, slot: memoryview) -> int:
    """Read an expert into a slot, its parts in no particular order; how many bytes it has."""
    return sum(loader.read(layer, expert, part, slot) for part in reversed(range(loader.parts(layer, expert))))


def load(loader: Loader, layer: int, expert: int) -> Expert:
    slot = Slots(1, loader.slot_bytes)[0]
    read(loader, layer, expert, slot)
    if not loader.is_proved(layer, expert):
        loader.prove(layer, expert, slot)
    return loader.view(layer, expert, slot)


def check_record(container: Container, expert: Expert) -> None:
    """The matrices decode to what the container's own reader decodes."""
    record = container.record(expert.layer, expert.expert)
    for number, matrix in zip(Matrix, (expert.gate, expert.up, expert.down), strict=True):
        assert np.array_equal(decoded(matrix), record.matrix(number))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spec", [Spec(), all_codecs()], ids=["usual", "all codecs"])
def test_records_of_every_codec(spec: Spec, check: bool, tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "container", spec)) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads, check=check)
        expected = tuple(len(spec.layers[n].records) if n in spec.layers else 0 for n in range(spec.hidden_layers))
        assert loader.layer_experts == expected
        rows = [row for layer in spec.layers for row in container.rows(layer)]
        assert loader.slot_bytes == max(row.bytes for row in rows)
        for row in rows:
            expert = load(loader, row.layer, row.expert)
            assert (expert.layer, expert.expert) == (row.layer, row.expert)
            assert read(loader, row.layer, row.expert, Slots(1, row.bytes)[0]) == row.bytes
            check_record(container, expert)
        reads.close()


@pytest.mark.parametrize(
    ("longest", "most", "part"),
    [
        (12_419_072, PART_BYTES, 12_419_072),  # Kimi K3's at 3 bits
        (4 * PAGE, 3 * PAGE, 2 * PAGE),  # 2 + 2, not 3 + 1
        (7 * PAGE, 3 * PAGE, 3 * PAGE),
        (9 * PAGE, 4 * PAGE, 3 * PAGE),
        (3 * PAGE, 3 * PAGE, 3 * PAGE),
        (0, 3 * PAGE, PAGE),
    ],
)
def test_longest_record_is_read_in_parts_of_one_length(longest: int, most: int, part: int) -> None:
    assert equal_part(longest, most) == part


@pytest.mark.parametrize("part_bytes", [PART_BYTES, PAGE])
def test_one_aligned_read_a_part(part_bytes: int, tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        address = np.frombuffer(views[0], np.uint8).__array_interface__["data"][0]
        calls.append((address % 4096, len(views[0]), offset))
        return os.preadv(fd, views, offset)

    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads(Calls(preadv=preadv))
        loader = ContainerExperts(container, reads, part_bytes=part_bytes)
        assert len(calls) == 1  # the trial
        row = container.row(2, 3)
        check_record(container, load(loader, 2, 3))
        starts = range(0, row.bytes, part_bytes)
        assert len(starts) == (1 if part_bytes == PART_BYTES else 2)
        expected = [(0, min(part_bytes, row.bytes - start), row.offset + start) for start in starts]
        assert sorted(calls[1:]) == sorted(expected)
        reads.close()


def test_weights_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads)
        slot = Slots(1, loader.slot_bytes)[0]
        loader.read(1, 0, 0, slot)
        gate = loader.view(1, 0, slot).gate
        codes = gate.codes  # type: ignore[union-attr]
        assert not codes.flags.writeable
        assert np.shares_memory(codes, np.frombuffer(slot, np.uint8))
        reads.close()


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (1, 4), (9, 0)])
def test_there_is_no_such_record(layer: int, expert: int, tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        with pytest.raises(UsageError):
            load(ContainerExperts(container, reads), layer, expert)
        reads.close()


def damaged(tmp_path: Path, spoil: Callable[[Container], None], *, check: bool) -> FormatError:
    """The error of loading layer 1 expert 2 after ``spoil``; the neighbours load as before."""
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads, check=check)
        spoil(container)
        with pytest.raises(FormatError) as caught:
            load(loader, 1, 2)
        check_record(container, load(loader, 1, 1))
        reads.close()
    assert "layer 1 expert 2" in caught.value.line()
    return caught.value


def bank(container: Container) -> Path:
    return container.path / "experts/layer-00001.bank"


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)


def test_a_flipped_bit(tmp_path: Path) -> None:
    def spoil(container: Container) -> None:
        row = container.row(1, 2)
        at = row.offset + 2000
        write(bank(container), at, bytes([bank(container).read_bytes()[at] ^ 1]))

    error = damaged(tmp_path, spoil, check=True)
    assert isinstance(error, IntegrityError)
    assert error.where == "experts/layer-00001.bank"


@pytest.mark.parametrize("check", [True, False])
def test_another_experts_record(check: bool, tmp_path: Path) -> None:
    """Never other weights, with or without digests: the header says whose they are."""

    def spoil(container: Container) -> None:
        other, row = container.row(1, 3), container.row(1, 2)
        write(bank(container), row.offset, bank(container).read_bytes()[other.offset : other.offset + other.bytes])

    error = damaged(tmp_path, spoil, check=check)
    assert isinstance(error, IntegrityError) == check


@pytest.mark.parametrize("spec", [Spec(), all_codecs()], ids=["usual", "all codecs"])
def test_what_was_proved_is_not_proved_again(spec: Spec, tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "container", spec)) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads)
        for row in [row for layer in spec.layers for row in container.rows(layer)]:
            slot = Slots(1, loader.slot_bytes)[0]
            read(loader, row.layer, row.expert, slot)
            assert not loader.is_proved(row.layer, row.expert)
            first = loader.view(row.layer, row.expert, slot)
            loader.prove(row.layer, row.expert, slot)
            assert loader.is_proved(row.layer, row.expert)
            again = loader.view(row.layer, row.expert, slot)
            for name in ("gate", "up", "down"):
                expected, found = vars(getattr(first, name)), vars(getattr(again, name))
                assert expected.keys() == found.keys()
                for field, value in expected.items():
                    if isinstance(value, np.ndarray):
                        assert value.__array_interface__ == found[field].__array_interface__
                    else:
                        assert value == found[field]
            other = Slots(2, loader.slot_bytes)[1]
            read(loader, row.layer, row.expert, other)
            check_record(container, loader.view(row.layer, row.expert, other))
        reads.close()


def test_a_bank_that_was_touched_is_proved_again(tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads)
        for name in ((1, 2), (2, 2)):
            load(loader, *name)
        os.utime(bank(container), (1, 1))
        slot = Slots(1, loader.slot_bytes)[0]
        for _ in range(2):
            for layer in (1, 2):
                read(loader, layer, 2, slot)
                assert loader.is_proved(layer, 2) == (layer == 2)
            check_record(container, load(loader, 1, 2))
        reads.close()


def test_a_record_that_changes_after_its_proof(tmp_path: Path) -> None:
    path = build_container(tmp_path / "container")
    os.utime(path / "experts/layer-00001.bank", (1, 1))  # a clock's tick may be longer than this test
    with open_container(path) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads)
        load(loader, 1, 2)
        at = container.row(1, 2).offset + 2000
        write(bank(container), at, bytes([bank(container).read_bytes()[at] ^ 1]))
        slot = Slots(1, loader.slot_bytes)[0]
        read(loader, 1, 2, slot)
        assert not loader.is_proved(1, 2)
        with pytest.raises(IntegrityError, match="layer 1 expert 2"):
            loader.prove(1, 2, slot)
        reads.close()


def test_a_bank_that_failed_a_proof_is_proved_from_then_on(tmp_path: Path) -> None:
    """A device that returns other bytes, of a file that was not written to."""
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads)
        load(loader, 1, 1)
        slot = Slots(1, loader.slot_bytes)[0]
        read(loader, 1, 2, slot)
        loader.view(1, 2, slot)
        slot[2000] ^= 1
        with pytest.raises(IntegrityError, match="layer 1 expert 2"):
            loader.prove(1, 2, slot)
        for expert in (1, 2):
            check_record(container, load(loader, 1, expert))
            assert not loader.is_proved(1, expert)
        reads.close()


def test_values_are_looked_at_until_they_are_proved(tmp_path: Path) -> None:
    """Sound bytes say nothing of other bytes that are read later: only a digest says that they are the same."""
    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        loader = ContainerExperts(container, reads, check=False)
        slot = Slots(1, loader.slot_bytes)[0]
        read(loader, 1, 2, slot)
        loader.view(1, 2, slot)
        slot[:8] = bytes(8)
        assert loader.is_proved(1, 2)
        with pytest.raises(FormatError, match="magic"):
            loader.view(1, 2, slot)
        reads.close()


def test_a_record_of_zeros(tmp_path: Path) -> None:
    """Unproved and unwritten; its header is no header."""

    def spoil(container: Container) -> None:
        write(bank(container), container.row(1, 2).offset, bytes(container.row(1, 2).bytes))

    with open_container(build_container(tmp_path / "container")) as container:
        reads = DirectReads()
        spoil(container)
        with pytest.raises(FormatError, match="magic") as caught:
            load(ContainerExperts(container, reads, check=False), 1, 2)
        assert caught.value.offset == container.row(1, 2).offset
        reads.close()


def test_a_bank_that_is_cut_while_in_use(tmp_path: Path) -> None:
    def spoil(container: Container) -> None:
        os.truncate(bank(container), container.row(1, 2).offset + 5)

    error = damaged(tmp_path, spoil, check=True)
    assert error.what == "file ends early"
    assert error.where == "experts/layer-00001.bank: layer 1 expert 2"


@pytest.mark.parametrize("change", ["absent", "cut"])
def test_an_absent_or_cut_bank_is_noticed_at_opening(change: str, tmp_path: Path) -> None:
    path = build_container(tmp_path / "container")
    file = path / "experts/layer-00002.bank"
    file.unlink() if change == "absent" else os.truncate(file, 4096)
    with pytest.raises(FormatError, match=r"layer-00002\.bank"):
        open_container(path)


def test_an_index_that_was_changed_is_noticed_at_opening(tmp_path: Path) -> None:
    path = build_container(tmp_path / "container")
    write(path / "index.bin", 128 * 3 + 40, b"\0")
    with open_container(path) as container:
        reads = DirectReads()
        with pytest.raises(IntegrityError, match="layer 1"):
            ContainerExperts(container, reads)
        reads.close()


# Checkpoints.


@pytest.mark.parametrize("name", ["k3-tiny", "kimi-linear-tiny", "linear-float32", "linear-float16", "k3-odd-numbers"])
def test_experts_of_a_checkpoint(name: str, tmp_path: Path, checkpoint_at: Callable[[Path], OpenCheckpoint]) -> None:
    path = DATA / name if (DATA / name).is_dir() else write_checkpoint(tmp_path / name, SPECS[name])
    opened = checkpoint_at(path)
    loader = CheckpointExperts(opened.checkpoint, opened.model)
    architecture = opened.model.architecture
    assert [layer for layer, count in enumerate(loader.layer_experts) if count] == list(architecture.moe_layers)
    for layer in architecture.moe_layers:
        for expert in (0, architecture.experts - 1):
            found = load(loader, layer, expert)
            for label, matrix in zip(MATRICES, (found.gate, found.up, found.down), strict=True):
                source = read_matrix(opened.checkpoint, opened.model, layer, expert, label)
                assert np.array_equal(decoded(matrix), source.to_float32())
            assert read(loader, layer, expert, Slots(1, loader.slot_bytes)[0]) == sum(
                len(opened.checkpoint.read(name))
                for names in opened.model.expert_names(layer, expert).values()
                for name in names
            )
    with pytest.raises(UsageError):
        load(loader, architecture.moe_layers[0], architecture.experts)


def test_the_bias_of_a_checkpoint(checkpoint_at: Callable[[Path], OpenCheckpoint]) -> None:
    opened = checkpoint_at(DATA / "k3-tiny")
    usual = load(CheckpointExperts(opened.checkpoint, opened.model), 1, 0)
    other = load(CheckpointExperts(opened.checkpoint, opened.model, bias=125), 1, 0)
    assert np.array_equal(4 * decoded(usual.gate), decoded(other.gate))


@pytest.mark.parametrize("change", ["touched", "cut", "gone"])
def test_a_checkpoint_that_changes_while_in_use(
    change: str, tmp_path: Path, checkpoint_at: Callable[[Path], OpenCheckpoint]
) -> None:
    path = shutil.copytree(DATA / "k3-tiny", tmp_path / "source")
    opened = checkpoint_at(path)
    loader = CheckpointExperts(opened.checkpoint, opened.model)
    load(loader, 1, 0)
    shard = path / opened.checkpoint.tensors[opened.model.expert_names(1, 0)["gate"][0]].shard
    if change == "gone":
        shard.unlink()
    elif change == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        os.utime(shard, ns=(1, 1))
    with pytest.raises(FormatError, match=shard.name):
        load(loader, 1, 0)


def test_a_scale_that_is_no_number(tmp_path: Path, checkpoint_at: Callable[[Path], OpenCheckpoint]) -> None:
    path = shutil.copytree(DATA / "k3-tiny", tmp_path / "source")
    opened = checkpoint_at(path)
    name = opened.model.expert_names(2, 3)["down"][1]
    tensor = opened.checkpoint.tensors[name]
    write(path / tensor.shard, tensor.offset + 1, b"\xff")
    opened = checkpoint_at(path)
    loader = CheckpointExperts(opened.checkpoint, opened.model)
    with pytest.raises(FormatError, match="layer 2 expert 3 down"):
        load(loader, 2, 3)
    load(loader, 2, 2)


def test_reading_a_part_of_a_tensor_into_memory(checkpoint_at: Callable[[Path], OpenCheckpoint]) -> None:
    checkpoint = checkpoint_at(DATA / "kimi-linear-tiny").checkpoint
    name = "model.norm.weight"
    whole = checkpoint.read(name)
    target = bytearray(20)
    checkpoint.read_into(name, memoryview(target)[3:13], 6)
    assert bytes(target) == bytes(3) + whole[6:16] + bytes(7)
    checkpoint.read_into(name, memoryview(b""), len(whole))
    for start in (-1, len(whole) - 9):
        with pytest.raises(UsageError, match="range"):
            checkpoint.read_into(name, memoryview(bytearray(10)), start)
    with pytest.raises(UsageError, match="no such tensor"):
        checkpoint.read_into("model.nothing", memoryview(bytearray(1)))
