"""Inspection: from the whole to a value, each step reading no more than it shows."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from formats import files, layout
from formats.checkpoint import open_checkpoint
from formats.container import open_container
from formats.errors import FormatError, IntegrityError, Interrupted, UsageError
from formats.families import bind
from formats.manifest import WORK_DIR
from packer.inspect.reading import inspect_expert, inspect_layer, inspect_matrix, inspect_summary, spread
from packer.inspect.text import bits_text, collapsed, histogram, show_summary, spread_text
from packer.inspect.trunk import inspect_trunk
from packer.inspect.views import FileSize, Spread, Summary, Unfinished
from packer.output import Output
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.preflight import JOURNAL_NAME
from packer.progress import Progress
from packer.recipe.recipe import default_recipe
from packer.storage.journal import open_or_create
from tests.support.containers import Forge, Spec, all_codecs, build_container

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_container(tmp_path / "model.moepack")


def test_summary(path: Path) -> None:
    view = inspect_summary(path)
    assert isinstance(view, Summary)
    forge = Forge(path)
    on_disk = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert {file.name: file.bytes for file in view.files} == on_disk
    assert view.container_bytes == sum(on_disk.values()) == view.expert_bytes + view.trunk_bytes + view.other_bytes
    assert (view.layers, view.experts, view.format_version, view.unfinished, view.partial) == (3, 11, 1, False, None)
    assert view.weights == 11 * 3 * 66 * 40
    assert view.bits_per_weight == 8 * sum(map(len, forge.banks.values())) / view.weights
    assert view.codecs == {"group_int": 3, "rvq": 8}
    assert view.roles["embedding"] == 50 * 40 + 48 + 50 * 2 * 2  # codes end 48 bytes before a line
    errors = sorted(error for row in forge._rows for error in row.matrix_errors)
    assert (view.matrix_errors.count, view.matrix_errors.min, view.matrix_errors.max) == (33, errors[0], errors[-1])
    assert view.matrix_errors.median == errors[16]
    assert view.source["shards"] == ({"name": "model.safetensors", "bytes": 124_000, "sha256": "ab" * 32},)
    document = json.loads(json.dumps(view.to_dict(), allow_nan=False))
    wanted = {
        "format_version",
        "architecture",
        "source",
        "recipe",
        "files",
        "layers",
        "experts",
        "bits_per_weight",
        "container_id",
    }
    assert wanted <= document.keys()


def test_spread_by_hand() -> None:
    assert spread([]).max is None
    assert spread([0.5]) == Spread(1, 0.5, 0.5, 0.5, 0.5)
    values = [number / 1000 for number in range(1, 1001)]
    result = spread(values[::-1])
    assert (result.min, result.median, result.p99, result.max) == (0.001, 0.5005, 0.99, 1.0)


def test_cli_02_the_summary_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 1 TiB apparent size: manifest, index and header pages are read, nothing else."""
    path = build_container(
        tmp_path / "model.moepack", Spec(hidden_layers=2, layers={1: Spec().layers[1]}, tensors=Spec().tensors[:5])
    )
    forge = Forge(path)
    tebibyte = 1 << 40
    last = forge.row(1, 3)
    forge.patch_row(1, 3, 24, "<Q", tebibyte - last.offset)
    forge.document["layers"][0]["bytes"] = forge.document["experts"]["bytes"] = tebibyte
    forge.save(keep=("records",))
    os.truncate(path / "experts/layer-00001.bank", tebibyte)
    reads: list[int] = []
    original = os.pread
    monkeypatch.setattr(files.os, "pread", lambda fd, count, at: reads.append(count) or original(fd, count, at))
    view = inspect_summary(path)
    assert isinstance(view, Summary)
    assert view.expert_bytes == tebibyte
    assert sum(reads) == view.files[0].bytes + 128 + 4096 + 4 * 128


def test_layer(path: Path) -> None:
    view = inspect_layer(path, 3)
    assert (view.layer, view.file, view.source_experts, view.dropped_experts) == (
        3,
        "experts/layer-00003.bank",
        4,
        (1,),
    )
    assert [(record.expert, record.source_expert, record.codec) for record in view.records] == [
        (0, 0, "rvq"),
        (1, 2, "group_int"),
        (2, 3, "rvq"),
    ]
    assert view.records[1].parameters == {"bits": 8, "group": 32}
    assert view.records[2].offset + view.records[2].bytes == view.bytes
    with pytest.raises(UsageError, match=r"no such layer .expected 0 to 3, found 4"):
        inspect_layer(path, 4)


def test_tensors_of_a_layer_and_of_the_trunk(path: Path) -> None:
    """As the manifest lists them; a layer without experts has tensors, too."""
    entries = json.loads((path / "manifest.json").read_text())["tensors"]
    for layer, file in ((0, None), (3, "experts/layer-00003.bank")):
        view = inspect_layer(path, layer)
        assert view.file == file
        document = json.loads(json.dumps(view.to_dict()))["tensors"]
        assert document
        assert {tensor["name"]: tensor for tensor in document} == {
            entry["name"]: entry for entry in entries if entry["layer"] == layer
        }
    assert inspect_layer(path, 0).records == ()
    trunk = inspect_trunk(path)
    assert trunk.bytes == (path / trunk.file).stat().st_size
    assert sorted(tensor.name for tensor in trunk.tensors) == sorted(entry["name"] for entry in entries)
    offsets = [tensor.offset for tensor in trunk.tensors]
    assert offsets == sorted(offsets)


def test_an_expert_of_a_layer_without_experts(path: Path) -> None:
    with pytest.raises(UsageError, match=r"no experts of this layer .expected one of the layers 1-3, found 0"):
        inspect_expert(path, 0, 0)


def test_expert(path: Path) -> None:
    view = inspect_expert(path, 3, 1)
    header = Forge(path).header(3, 1)
    assert (view.source_expert, view.codec, view.payload_bytes) == (2, "group_int", header.payload_bytes)
    assert [(item.name, item.offset, item.bytes) for item in view.sections] == [
        (section.label, section.offset, section.bytes) for section in header.sections
    ]
    assert [(item.name, item.rows, item.cols) for item in view.matrices] == [
        ("gate", 66, 40),
        ("up", 66, 40),
        ("down", 40, 66),
    ]
    assert view.matrices[2].source_tensors == ("model.layers.3.block_sparse_moe.experts.2.w2.weight",)
    with pytest.raises(UsageError, match=r"not hold this expert .expected one of the experts 0-2 in layer 3, found 3"):
        inspect_expert(path, 3, 3)


@pytest.mark.parametrize("expert", range(6))
def test_matrix_of_every_codec(tmp_path: Path, expert: int) -> None:
    path = build_container(tmp_path / "model.moepack", all_codecs())
    for matrix in layout.Matrix:
        view = inspect_matrix(path, 1, expert, matrix.label)
        with open_container(path) as container:
            values = container.record(1, expert).matrix(matrix)
        assert np.array_equal(np.array(view.corner, np.float32), values[:4, :8])
        assert (view.smallest, view.largest) == (values.min(), values.max())
        assert math.isclose(view.mean, values.astype(np.float64).mean(), abs_tol=1e-12)
        assert view.zeros == (values == 0).sum()
        assert bool(view.scales) == (view.codec != "raw")
        assert [book["stage"] for book in view.codebooks] == list(range(view.parameters.get("stages", 0)))
        for book in view.codebooks:
            assert sum(book["histogram"]) == view.rows * -(-view.cols // 8)
            assert book["unused"] == book["histogram"].count(0)
            assert 0 <= book["entropy_bits"] <= math.log2(book["entries"])
        json.dumps(view.to_dict(), allow_nan=False)
    with pytest.raises(UsageError, match="no such matrix"):
        inspect_matrix(path, 1, expert, "gates")


def test_a_damaged_record_is_not_shown(path: Path) -> None:
    forge = Forge(path)
    forge.banks[1][3000] ^= 1
    forge.save(keep=("records",))
    for look in (lambda: inspect_matrix(path, 1, 0, "gate"), lambda: inspect_expert(path, 1, 0)):
        with pytest.raises(IntegrityError, match=r"layer 1 expert 0: record differs .*; damaged: [a-z]+\.[a-z]+"):
            look()


def test_cli_01_an_unfinished_pack(tmp_path: Path) -> None:
    out = tmp_path / "out.moepack"
    stop = threading.Event()

    def progress(state: Progress) -> None:
        if state.done_bytes > state.total_bytes // 4:
            stop.set()

    with open_checkpoint(DATA / "k3-tiny") as checkpoint:
        model = bind(checkpoint)
        plan = make_plan(checkpoint, model, default_recipe("kimi_k3"))
        with pytest.raises(Interrupted):
            pack(checkpoint, model, plan, out, jobs=1, progress=progress, stop=stop)
    view = inspect_summary(out)
    assert isinstance(view, Unfinished)
    assert view.units_done > 0
    assert view.records_done > 0
    document = json.loads(json.dumps(view.to_dict(), allow_nan=False))
    assert document["unfinished"] is True
    assert document["container_id"] is None
    assert document["identity"]["recipe"]["name"] == "kimi-k3"
    assert {"format_version", "architecture", "files", "bits_per_weight"} <= document.keys()
    assert (document["architecture"]["family"], document["recipe"]["name"]) == ("kimi_k3", "kimi-k3")
    assert (document["source"]["tensors"], len(document["source"]["shards"])) == (772, 9)
    assert all(len(shard["sha256"] or "x" * 64) == 64 for shard in document["source"]["shards"])
    assert (document["records_planned"], view.records_done < 96) == (96, True)
    assert not any(file.name.endswith(".part") for file in view.files)
    assert all(name.endswith(".part") for name in view.files_in_work)
    stdout = io.StringIO()
    show_summary(Output(stdout, io.StringIO()), out, view)
    shown = stdout.getvalue()
    assert f"{view.records_done} of 96 expert records ({100 * view.records_done / 96:.1f} %)" in shown
    assert "772 tensors" in shown
    assert "recipe        kimi-k3: " in shown


def test_an_unfinished_pack_with_a_strange_identity(tmp_path: Path) -> None:
    """A journal is input like any other: members that are absent or of another type are not shown."""
    for number, identity in enumerate(
        ({}, {"recipe": 1, "source": {"shards": [3]}, "records": "x", "architecture": {}})
    ):
        out = tmp_path / str(number)
        (out / WORK_DIR).mkdir(parents=True)
        open_or_create(out / WORK_DIR / JOURNAL_NAME, identity).close()
        view = inspect_summary(out)
        assert isinstance(view, Unfinished)
        assert (view.recipe, view.records_planned) == (None, None)
        show_summary(Output(io.StringIO(), io.StringIO()), out, view)


def test_bits_well_above_the_codes_are_explained() -> None:
    recipe = {"experts": {"codec": "rvq", "stages": 3, "entries": 256}}
    assert bits_text(3.01, recipe, ["rvq"]) == "3.01 bits a weight"
    assert bits_text(3.6, recipe, ["rvq"]) == "3.6 bits a weight, codebooks, scales and padding included"
    assert bits_text(4.25, recipe, ["mxfp4"]) == "4.25 bits a weight"  # the fallback
    assert bits_text(4.25, {"experts": "nonsense"}, ["rvq"]) == "4.25 bits a weight"


def test_errors_in_one_line() -> None:
    text = spread_text(Spread(108, 0.1, 0.2, 0.3, 0.4), "matrices")
    assert text == "min 0.1, median 0.2, 99th percentile 0.3, max 0.4 (of 108 matrices)"


def test_neither_container_nor_pack(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a container: it has no manifest") as caught:
        inspect_summary(tmp_path)
    assert caught.value.hint == "make one with moepack pack"
    (tmp_path / "begun" / WORK_DIR).mkdir(parents=True)
    with pytest.raises(FormatError, match="not a finished container: it has no manifest") as caught:
        inspect_summary(tmp_path / "begun")
    assert "continues" in str(caught.value.hint)
    (tmp_path / "file").write_bytes(b"")
    for name, what in (
        ("absent", "no such directory"),
        ("file", "not a directory"),
        ("file/deeper", "not a directory"),
    ):
        with pytest.raises(UsageError, match=what):
            inspect_summary(tmp_path / name)


def test_listings_are_collapsed() -> None:
    files = [FileSize("manifest.json", 10), *(FileSize(f"experts/layer-{n:05d}.bank", 512) for n in range(4))]
    assert collapsed(files) == [("manifest.json", "10 bytes"), ("experts/layer-*.bank (4 files)", "2.0 KiB")]


def test_histogram_line() -> None:
    assert histogram([0, 9, 1, 5]) == " @.+"
    assert len(histogram([1] * 256)) == 32
    assert histogram([0, 0]) == histogram([]) == ""
