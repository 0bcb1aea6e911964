"""Verifying, inspecting and reading a container of the real size, 82,432 records of 12.4 MB, with holes for weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from formats import files, layout
from formats.codecs import raw
from formats.container import expected_files, open_container
from formats.layout import Codec, Matrix
from formats.manifest import FILE_NAME
from packer.verify.verify import verify
from tests.fullsize.conftest import NORM, RECORDS, ROUTER, SparseContainer
from tests.support.containers import TEMPLATES, Tensor
from tests.support.measure import measured
from tests.support.sparse_checkpoint import allocated_bytes, apparent_bytes
from tests.support.sparse_container import Blueprint, make_container

RECORD_BYTES = 12_419_072


def test_the_container_has_the_planned_lengths(container: SparseContainer, metadata: Path) -> None:
    """Built without the packer, every file is as long as the plan says; the manifest depends on the tool's words."""
    planned = measured("plan", metadata, "--json").document
    with open_container(container.path) as opened:
        lengths = expected_files(opened.manifest)
        assert sum(lengths.values()) == planned["container_bytes"] - planned["manifest_bytes"]
        assert lengths["trunk.bin"] == planned["trunk_bytes"]
        assert lengths["index.bin"] == planned["index_bytes"]
        assert opened.manifest.experts.bytes == planned["expert_bytes"] == 82_432 * RECORD_BYTES
        assert [(item.name, item.offset, item.bytes) for item in opened.manifest.trunk.segments] == [
            (item["name"], item["offset"], item["bytes"]) for item in planned["segments"]
        ]
        assert [(item.name, item.offset) for item in opened.manifest.tensors] == [
            (item["name"], item["offset"]) for item in planned["tensors"]
        ]
    assert allocated_bytes(container.path) < 600 << 20


def test_structure_of_all_records(container: SparseContainer) -> None:
    done = measured("verify", container.path, "--level", "structure", "--json")
    print(
        f"verify --level structure: {done.seconds:.1f} s, {done.peak_bytes >> 20} MiB, {done.read_bytes >> 20} MiB read"
    )
    assert done.code == 0, done.stdout
    assert done.document["ok"] is True
    assert done.document["records_checked"] == 82_432
    assert done.peak_bytes < 384 << 20
    assert done.read_bytes < 384 << 20  # a kilobyte a record, the index, the manifest, and the program itself


@pytest.mark.parametrize("at", [16, 328], ids=["layer", "section"])
def test_structure_notices_one_byte_of_the_last_header(container: SparseContainer, at: int) -> None:
    """The control of the test above: one wrong byte among 983 GiB, in the last record of the last bank."""
    with (container.path / "experts" / "layer-00092.bank").open("r+b") as file:
        place = 895 * RECORD_BYTES + at
        file.seek(place)
        before = file.read(1)
        try:
            os.pwrite(file.fileno(), bytes([before[0] ^ 0x40]), place)
            report = verify(container.path, level="structure", sample=1e-9)
        finally:
            os.pwrite(file.fileno(), before, place)
    assert [problem.where for problem in report.problems] == ["layer 92 expert 895"]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [((), 192), (("--layer", "92"), 96), (("--layer", "92", "--expert", "895"), 96)],
    ids=["summary", "layer", "expert"],
)
def test_inspect(container: SparseContainer, arguments: tuple[str, ...], limit: int) -> None:
    done = measured("inspect", container.path, *arguments, "--json")
    print(f"inspect {' '.join(arguments)}: {done.seconds:.1f} s, {done.peak_bytes >> 20} MiB")
    assert done.code == 0, done.stderr
    assert done.peak_bytes < limit << 20
    if not arguments:
        assert done.document["experts"] == 82_432
        assert done.document["matrix_errors"]["count"] == 3 * 82_432
        assert done.document["container_bytes"] == apparent_bytes(container.path)


def test_matrix_of_the_last_expert(container: SparseContainer) -> None:
    done = measured("inspect", container.path, "--layer", "92", "--expert", "895", "--matrix", "down", "--json")
    assert done.code == 0, done.stderr
    assert (done.document["rows"], done.document["cols"]) == (3584, 3072)


@contextmanager
def _reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes that were read of each file, by its name."""
    counts: dict[str, int] = {}
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        counts[name] = counts.get(name, 0) + len(data)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pread", counted)
        yield counts


def _rchar() -> int:
    """What this process has read by any system call, as the kernel counts it."""
    match = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert match is not None
    return int(match[1])


def test_one_expert_takes_the_manifest_the_rows_of_its_layer_and_its_record(
    container: SparseContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_bytes = (container.path / FILE_NAME).stat().st_size
    with _reads(monkeypatch) as counts, open_container(container.path) as opened:
        opened.record(92, 895)
    assert counts == {
        FILE_NAME: manifest_bytes,
        "index.bin": 128 + 128 * 896,  # 112 KiB of 10 MiB
        "trunk.bin": 4096,
        "layer-00092.bank": RECORD_BYTES,
    }
    before = _rchar()
    with open_container(container.path) as opened:
        opened.record(92, 895)
    assert _rchar() - before <= sum(counts.values()) + 8192  # reading the counter counts, too


def test_header_of_one_expert_takes_a_kilobyte_of_its_bank(
    container: SparseContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_container(container.path) as opened, _reads(monkeypatch) as counts:
        opened.header(1, 895)
    assert counts == {"index.bin": 128 * 896, "layer-00001.bank": 1024}


@pytest.mark.parametrize(("layer", "expert"), RECORDS, ids=str)
def test_record_proves_itself_wherever_it_lies(container: SparseContainer, layer: int, expert: int) -> None:
    with open_container(container.path) as opened:
        row, record = opened.row(layer, expert), opened.record(layer, expert)
        assert (record.header.layer, record.header.expert) == (layer, expert)
        assert row.offset == expert * RECORD_BYTES
        assert opened.header(layer, expert) == record.header


def test_records_lie_across_the_boundaries() -> None:
    """What the test above is for: by arithmetic, these records contain byte 2^31 and byte 2^32 of their bank."""
    assert 172 * RECORD_BYTES < 1 << 31 < 173 * RECORD_BYTES
    assert 345 * RECORD_BYTES < 1 << 32 < 346 * RECORD_BYTES
    assert {(1, 172), (1, 345)} <= set(RECORDS)
    assert 895 * RECORD_BYTES > 1 << 33


def test_trunk_tensors_beyond_two_to_the_thirty_second(container: SparseContainer) -> None:
    with open_container(container.path) as opened:
        for name in (ROUTER, NORM):
            info = opened.tensor(name)
            assert info.offset > 1 << 34
            assert opened.tensor_bytes(info) == container.contents[name]
            assert opened.tensor_digest(info) == info.blake3


@pytest.fixture(scope="module")
def giant(space: Path) -> tuple[Path, dict[str, bytes]]:
    """A bank of 16,400 records of 67 MB and a trunk, both longer than 2^40 bytes."""
    recipe: dict[str, Any] = {
        "name": "giant",
        "families": ["kimi_linear"],
        "experts": {"codec": "raw"},
        "trunk": [{"codec": "raw", "names": ["*"]}],
    }
    blueprint = Blueprint(
        "kimi_linear",
        "Giant",
        hidden_layers=1,
        hidden_size=3344,
        per_token=1,
        layers=(0,),
        experts=16_400,
        shapes=((3344, 3344),) * 3,
        codec=Codec.RAW,
        parameters=raw.Parameters("BF16"),
        templates={matrix: tuple(names) for matrix, names in TEMPLATES.items()},
        tensors=(
            Tensor("long", "embedding", None, "embedding", (1 << 20, 1 << 20), raw.Parameters("U8")),
            Tensor("behind", "norm", None, "output", (1000,), raw.Parameters("F32")),
        ),
        recipe=recipe,
    )
    path = space / "giant.moepack"
    return path, make_container(path, blueprint, records=[(0, 16_399)], trunk=["behind"])


def test_offsets_beyond_two_to_the_fortieth(giant: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = giant
    with open_container(path) as opened:
        row = opened.row(0, 16_399)
        assert row.offset == 16_399 * layout.align(1024 + 3 * 2 * 3344 * 3344, 4096) > 1 << 40
        record = opened.record(0, 16_399)
        assert record.matrix(Matrix.DOWN).shape == (3344, 3344)
        info = opened.tensor("behind")
        assert info.offset > 1 << 40
        assert opened.tensor_bytes(info) == contents["behind"]
        long = opened.tensor("long")
        assert opened.tensor_bytes(long, long.bytes - 7) == bytes(7)


def test_structure_of_a_bank_beyond_two_to_the_fortieth(giant: tuple[Path, dict[str, bytes]]) -> None:
    report = verify(giant[0], level="structure", jobs=2)
    assert report.ok, report.problems
    assert report.records_checked == 16_400
