"""Verification: nothing escapes it, damage does not stop it, and it believes neither packer nor reader."""

from __future__ import annotations

import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from formats import layout
from formats.checkpoint import open_checkpoint
from formats.codecs import group_int, mxfp4, raw
from formats.container import open_container
from formats.errors import FormatError, UsageError
from formats.families import bind
from formats.manifest import WORK_DIR, names_digest
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.planning.selection import parse_selection
from packer.progress import Progress
from packer.recipe.recipe import default_recipe, load_recipe, override
from packer.verify.verify import VerifyReport, choose_records, verify
from tests.support.containers import BF16, INT8, Forge, Layer, Spec, build_container

DATA = Path(__file__).parent.parent / "data"
K3 = DATA / "k3-tiny"
LINEAR = DATA / "kimi-linear-tiny"


def packed(
    source: Path,
    out: Path,
    *settings: str,
    recipe: str | None = None,
    layers: str | None = None,
    experts: str | None = None,
) -> Path:
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        chosen = load_recipe(recipe) if recipe else default_recipe(model.architecture.family)
        selection = parse_selection(layers, experts, model.architecture)
        plan = make_plan(checkpoint, model, override(chosen, settings), selection=selection)
        pack(checkpoint, model, plan, out, jobs=2)
    return out


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(problem.where, problem.what) for problem in report.problems]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(build_container(tmp_path / "model.moepack"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(K3, tmp_path_factory.mktemp("verify") / "tiny.moepack")


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of BF16 as 4-bit integers: lossy, and quickly made."""
    out = tmp_path_factory.mktemp("verify") / "integers.moepack"
    return packed(LINEAR, out, "experts.codec=group_int", "experts.bits=4", "experts.group=32")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda path: Path(shutil.copytree(path, tmp_path / path.name))


# What is asked for


@pytest.mark.parametrize("sample", [0.0, -0.5, 1.0001, float("nan"), float("inf")])
def test_ver_01_a_sample_of_nothing(forge: Forge, sample: float) -> None:
    with pytest.raises(UsageError, match="selects nothing" if sample <= 0 else "is no share"):
        verify(forge.path, sample=sample)


@pytest.mark.parametrize("options", [{"level": "deep"}, {"level": "parity"}, {"jobs": 0}])
def test_options_that_make_no_sense(forge: Forge, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        verify(forge.path, **options)


@pytest.mark.parametrize("level", ["structure", "hashes"])
def test_ver_03_no_source_is_needed(forge: Forge, level: str) -> None:
    """The level reached is part of the result."""
    report = verify(forge.path, level=level)
    assert (report.ok, report.level, report.records_checked, report.tensors_checked) == (True, level, 11, 10)
    assert report.to_dict() == {
        "ok": True,
        "level": level,
        "container_id": report.container_id,
        "records_checked": 11,
        "tensors_checked": 10,
        "problems": [],
        "left_out": None,
    }


def test_too_damaged_to_be_opened(forge: Forge) -> None:
    (forge.path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(FormatError) as caught:
        verify(forge.path)
    assert "too damaged to be checked" in (caught.value.hint or "")


# Sampling


def test_choose_records_is_spread_evenly() -> None:
    rows = {layer: tuple((layer, expert) for expert in range(10)) for layer in (1, 2)}
    chosen = choose_records(rows, 0.2)  # type: ignore[arg-type]
    assert chosen == [((1, 2), (1, 7)), ((2, 2), (2, 7), (2, 9))]
    assert choose_records(rows, 0.001) == [((1, 5),), ((2, 5), (2, 9))]  # type: ignore[arg-type]
    assert [len(part) for part in choose_records(rows, 1.0)] == [10, 10]  # type: ignore[arg-type]


def test_ver_02_the_last_expert_of_the_last_layer(forge: Forge) -> None:
    """Found in full and in every sample; a sample says what it left out."""
    forge.banks[3][-1] ^= 1
    path = forge.save(keep=("records",))
    for sample in (None, 0.01, 0.5, 1.0):
        report = verify(path, sample=sample)
        assert {where for where, _ in found(report)} == {"layer 3 expert 2"}
        left_out = report.to_dict()["left_out"]
        assert (left_out is None) == (sample is None)
        if left_out is not None:
            ranges = [run for part in left_out["layers"] for run in part["experts"]]
            assert left_out["records"] == sum(last - first + 1 for first, last in ranges) == 11 - report.records_checked
            assert left_out["shard_digests"] == 0
    assert verify(path, sample=0.01).records_checked == 4


def test_ver_02_a_stored_digest_changed(forge: Forge) -> None:
    """The payload is right, its digest in the index is not."""
    forge.patch_row(3, 2, 32, "B", forge.index[forge.row_at(3, 2) + 32] ^ 1)
    [(where, what)] = found(verify(forge.save(keep=("records",))))
    assert where == "layer 3 expert 2"
    assert "record differs from its digest" in what


def test_a_section_digest_changed(forge: Forge) -> None:
    """The record is what was sealed, but its table of digests is wrong: a reader of one matrix would be stopped."""
    forge.patch_record(1, 0, 320 + 64 + 32, "B", forge.banks[1][320 + 64 + 32] ^ 1)
    assert found(verify(forge.save())) == [
        ("layer 1 expert 0", "section gate.scales differs from its digest in the header")
    ]


# Damage


def test_damage_does_not_stop_the_rest(forge: Forge) -> None:
    """A record without header, one with a changed section, a layer without rows, a tensor, an asset: all reported."""
    forge.banks[1][:4096] = bytes(4096)
    forge.banks[1][forge.row(1, 3).offset + 2000] ^= 1
    forge.trunk[forge.document["tensors"][1]["offset"]] ^= 1
    forge.assets["assets/config.json"] = b"{}       \n"[:9]
    forge.patch_row(2, 0, 64, "<f", 0.25)
    path = forge.save(keep=("records", "layers", "tensors", "assets", "index"))
    report = verify(path)
    assert [where for where, _ in found(report)] == [
        "layer 2",
        "layer 1 expert 0",
        "layer 1 expert 0",
        "layer 1 expert 3",
        "model.layers.0.input_layernorm.weight",
        "index.bin",
        "assets/config.json",
    ]
    assert "its 4 records not checked" in report.problems[0].what
    assert report.records_checked == 7


def test_threads_do_not_change_the_report(forge: Forge) -> None:
    for layer in forge.banks:
        for at in range(0, len(forge.banks[layer]), 5000):
            forge.banks[layer][at] ^= 1
    path = forge.save(keep=("records",))
    reports = [verify(path, jobs=jobs) for jobs in (1, 4)]
    assert reports[0] == reports[1]
    assert len(reports[0].problems) >= 11


def test_ctr_05_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """Bytes of every file, at the borders of every structure and in between; some make the container unreadable."""
    tensors = (
        *Spec().tensors[1:2],
        *(tensor for tensor in Spec().tensors if tensor.name == "model.layers.0.self_attn.q_proj.weight"),
    )
    spec = Spec(hidden_layers=2, layers={1: Layer((INT8, BF16))}, shapes=((4, 8), (4, 8), (8, 4)), tensors=tensors)
    recipe = {**spec.recipe, "experts": {**spec.recipe["experts"], "fallback": {"codec": "raw"}}}
    path = build_container(tmp_path / "model.moepack", Spec(**{**vars(spec), "recipe": recipe}))
    for name in sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()):
        content = (path / name).read_bytes()
        borders = {at + by for at in range(0, len(content), 64) for by in (0, 63)} if len(content) > 1024 else set()
        for at in sorted({*range(0, len(content), 37), *borders, len(content) - 1}):
            if at >= len(content):
                continue
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            (path / name).write_bytes(changed)
            try:
                assert not verify(path).ok or name == "manifest.json", (name, at)
            except FormatError:
                pass
            else:
                assert name != "manifest.json", at
        (path / name).write_bytes(content)
    problems = [where for where, what in found(verify(path)) if "recipe stores no expert" not in what]
    assert problems == []


def test_ver_04_constant_memory(tmp_path: Path) -> None:
    """A sparse record of 384 MiB is read in pieces."""
    side = 8192
    shapes = ((side, side), (side, side), (side, side))
    spec = Spec(hidden_layers=2, layers={1: Layer((BF16,))}, tensors=Spec().tensors[:5])
    path = build_container(tmp_path / "model.moepack", spec)
    forge = Forge(path)
    length = layout.align(1024 + 3 * 2 * side * side, 4096)
    forge.document["experts"].update(shapes=shapes, weights=3 * side * side, bytes=length)
    forge.document["layers"][0]["bytes"] = length
    header = forge.header(1, 0)
    forge.patch_row(1, 0, 24, "<Q", length)
    forge.patch_record(1, 0, 32, "<Q", length)
    forge.patch_record(1, 0, 40, "<Q", 1024 + 3 * 2 * side * side)
    for number in range(3):
        forge.patch_record(1, 0, 128 + 64 * number, "<I", side)
        forge.patch_record(1, 0, 132 + 64 * number, "<I", side)
        forge.patch_record(1, 0, 320 + 64 * number + 8, "<Q", 1024 + number * 2 * side * side)
        forge.patch_record(1, 0, 320 + 64 * number + 16, "<Q", 2 * side * side)
    forge.save(keep=("records",))
    os.truncate(path / "experts/layer-00001.bank", length)
    tracemalloc.start()
    report = verify(path, jobs=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.codec.label == "raw"
    assert any("record differs from its digest" in what for _, what in found(report))
    assert peak < 64 << 20


def test_leftover_of_an_unfinished_pack(forge: Forge) -> None:
    (forge.path / WORK_DIR).mkdir()
    (forge.path / WORK_DIR / "journal.jsonl").write_bytes(b"")
    (forge.path / "experts" / "layer-00001.bank.part").write_bytes(b"")
    assert {(where, what.split(";")[0]) for where, what in found(verify(forge.path))} == {
        (WORK_DIR, "left over from an unfinished pack"),
        ("experts/layer-00001.bank.part", "left over from an unfinished pack"),
    }


def test_an_unlisted_link_is_not_followed(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x")
    (forge.path / "assets" / "link").symlink_to(tmp_path / "outside")
    assert found(verify(forge.path)) == [("assets/link", "link that the manifest does not list")]


def test_progress_gets_numbers(forge: Forge) -> None:
    seen: list[Progress] = []
    verify(forge.path, progress=seen.append, jobs=2)
    done = [item.done_bytes for item in seen]
    assert done == sorted(done)
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_an_interruption_ends_the_threads(forge: Forge) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(forge.path, progress=interrupt, jobs=4)


# Limits


def test_ver_09_just_over_the_limit(forge: Forge) -> None:
    """0.1 % is too much; the worst (in proportion to its limit) comes first."""
    for expert, error in ((0, 0.1001), (1, 0.1), (2, 0.5), (3, 0.0999)):
        forge.patch_row(1, expert, 64, "<f", error)
        forge.patch_record(1, expert, 128 + 12, "<f", error)
        for at in (4, 8):
            forge.patch_row(1, expert, 64 + at, "<f", 0.01)
            forge.patch_record(1, expert, 128 + 12 + 16 * at, "<f", 0.01)
    forge.document["recipe"]["experts"]["max_rel_error"] = 0.1
    forge.document["recipe"]["trunk"][1]["max_rel_error"] = 0.006
    problems = [item for item in found(verify(forge.save())) if item[0].startswith(("layer 1", "model"))]
    assert [where for where, _ in problems] == [
        "layer 1 expert 2 gate",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "layer 1 expert 0 gate",
    ]
    assert problems[3][1] == "relative error is above the recipe's limit (expected at most 0.1, found 0.1001)"


def test_a_recipe_that_says_something_else(forge: Forge) -> None:
    forge.document["recipe"]["trunk"][0]["codec"] = "raw"
    forge.document["recipe"]["experts"]["fallback"] = None
    problems = dict(found(verify(forge.save())))
    assert "drops nothing" in problems["model.layers.0.self_attn.rotary"]
    assert problems["layer 2 expert 0"] == "the recipe stores no expert as group_int"
    forge.document["recipe"] = {"name": "nonsense"}
    assert [where for where, _ in found(verify(forge.save()))] == ["manifest.json: recipe: families"]


# Parity


def test_parity_of_lossless_containers(tmp_path: Path) -> None:
    for checkpoint, recipe in ((K3, "kimi-k3-lossless"), (LINEAR, "kimi-linear-lossless")):
        path = packed(checkpoint, tmp_path / f"{recipe}.moepack", recipe=recipe)
        report = verify(path, level="parity", source=checkpoint)
        assert found(report) == []
        document = report.to_dict()
        assert document["exact_tensors"] == document["source_tensors"] > 290
        assert document["experts"] == document["trunk"] == {"rel_error": {"mean": 0.0, "max": 0.0}}
        assert document["unaccounted"] == 0


def test_parity_measures_what_was_recorded(integers: Path) -> None:
    report = verify(integers, level="parity", source=LINEAR, jobs=2)
    assert found(report) == []
    with open_container(integers) as container:
        errors = [
            error
            for info in container.manifest.layers
            for row in container.rows(info.layer)
            for error in row.matrix_errors
        ]
        copied = container.manifest.coverage.copied
    assert report.parity is not None
    assert report.parity.experts.max == pytest.approx(max(errors), rel=1e-6)
    assert report.parity.experts.mean == pytest.approx(np.mean(errors), rel=1e-6)
    assert 0.05 < report.parity.experts.max < 0.2
    assert report.parity.exact_tensors == copied


def test_ver_08_parameters_come_from_the_container(tmp_path: Path) -> None:
    settings = ("experts.stages=2", "experts.entries=16", "experts.codebooks=matrix", "fitting.effort=fast")
    path = packed(DATA / "k3-small", tmp_path / "small.moepack", *settings, layers="1", experts="0-1")
    report = verify(path, level="parity", source=DATA / "k3-small")
    assert found(report) == []
    assert report.parity is not None
    assert 0.3 < (report.parity.experts.max or 0) < 0.7


def test_ver_05_a_packer_and_a_reader_that_agree_on_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both exchange the halves of a byte: what they make and read back looks right to them, and is not."""
    pairs = mxfp4._pair_table()[:, ::-1].copy()
    monkeypatch.setattr(mxfp4, "_pair_table", lambda: pairs)
    path = packed(K3, tmp_path / "swapped.moepack", "experts.codec=group_int", layers="1", experts="0-1")
    with open_container(path) as container:
        assert max(container.rows(1)[0].matrix_errors) < 0.012  # they see nothing
    report = verify(path, level="parity", source=K3)
    wrong = {where for where, what in found(report) if "recorded error differs" in what}
    assert wrong == {f"layer 1 expert {expert} {matrix}" for expert in (0, 1) for matrix in ("gate", "up", "down")}
    assert report.parity is not None
    assert (report.parity.experts.max or 0) > 1


def test_ver_05_integers_with_their_halves_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, decode = group_int.encode, group_int.decode

    def swapped(data: Any) -> np.ndarray:
        halves = np.frombuffer(data, np.uint8)
        return (halves << 4 | halves >> 4).astype(np.uint8)

    def wrong_encode(*arguments: Any, **options: Any) -> Any:
        codes, scales = encode(*arguments, **options)
        return swapped(codes.tobytes()).reshape(codes.shape), scales

    def wrong_decode(rows: int, cols: int, parameters: Any, sections: Any, **options: Any) -> Any:
        codes = swapped(sections[layout.SectionKind.CODES]).tobytes()
        return decode(rows, cols, parameters, {**sections, layout.SectionKind.CODES: codes}, **options)

    monkeypatch.setattr(group_int, "encode", wrong_encode)
    monkeypatch.setattr(group_int, "decode", wrong_decode)
    settings = ("experts.codec=group_int", "experts.bits=4", "experts.group=32")
    path = packed(LINEAR, tmp_path / "swapped.moepack", *settings, layers="1", experts="0")
    with open_container(path) as container:
        assert max(container.rows(1)[0].matrix_errors) < 0.2
    assert any("recorded error differs" in what for _, what in found(verify(path, level="parity", source=LINEAR)))


def test_ver_06_a_tensor_that_vanished(copy: Callable[[Path], Path], tiny: Path) -> None:
    """Taken out of the container with all counts made to fit: only the source knows of it."""
    forge = Forge(copy(tiny))
    lost = _last_of_a_segment(forge)
    forge.document["tensors"].remove(lost)
    forge.trunk[lost["offset"] : lost["offset"] + lost["bytes"]] = bytes(lost["bytes"])
    fate = "copied" if lost["codec"] == "raw" else "packed"
    forge.document["coverage"][fate] -= 1
    forge.document["source"]["tensors"] -= 1
    _cover(forge, exclude=lost["name"])
    path = forge.save()
    assert verify(path).ok
    report = verify(path, level="parity", source=K3)
    problems = dict(found(report))
    assert "has no fate" in problems[lost["name"]]
    assert "source 772, container 771" in problems["manifest.json: source.tensors"]
    assert report.to_dict()["unaccounted"] == 1


def _last_of_a_segment(forge: Forge) -> dict[str, Any]:
    """A tensor at the end of a segment that has as many pages without it."""
    tensors = forge.document["tensors"]
    ends = {segment["offset"] + segment["bytes"] for segment in forge.document["trunk"]["segments"]}
    for before, tensor in pairwise(tensors):
        end = layout.align(before["offset"] + before["bytes"], layout.PAGE)
        if end in ends and before["offset"] < tensor["offset"] < end:
            return tensor
    raise AssertionError("no such tensor")


def _cover(forge: Forge, exclude: str) -> None:
    """Make the digest of the covered names right again."""
    with open_checkpoint(K3) as checkpoint:
        names = [name for name in checkpoint.tensors if name != exclude]
    forge.document["coverage"]["names_blake3"] = names_digest(names)


def test_ver_06_an_expert_left_out(tiny: Path, copy: Callable[[Path], Path]) -> None:
    forge = Forge(copy(tiny))
    forge.document["layers"][-1]["records"] -= 1
    with pytest.raises(FormatError):
        verify(forge.save_manifest())


def test_ver_07_an_altered_asset(tiny: Path, copy: Callable[[Path], Path]) -> None:
    """Altered with its digest made right: only the source knows."""
    forge = Forge(copy(tiny))
    forge.assets["assets/config.json"] = forge.assets["assets/config.json"].replace(b"128", b"256", 1)
    path = forge.save()
    assert verify(path).ok
    [(where, what)] = found(verify(path, level="parity", source=K3))
    assert where == "assets/config.json"
    assert "bytes differ from the source's" in what


def test_a_flipped_byte_of_the_source(tiny: Path, copy: Callable[[Path], Path], tmp_path: Path) -> None:
    """Named by matrix, and the shard's own digest has changed."""
    source_copy = Path(shutil.copytree(K3, tmp_path / "source"))
    name = "language_model.model.layers.3.block_sparse_moe.experts.5.w3.weight_packed"
    with open_checkpoint(source_copy) as checkpoint:
        tensor = checkpoint.tensors[name]
    data = bytearray((source_copy / tensor.shard).read_bytes())
    data[tensor.offset + 7] ^= 0x70
    (source_copy / tensor.shard).write_bytes(data)
    report = verify(tiny, level="parity", source=source_copy)
    assert {(where, what.split("(")[0].strip()) for where, what in found(report)} >= {
        ("layer 3 expert 5 up", "source bytes differ"),
        ("layer 3 expert 5 up", "stored bytes differ from the source's"),
        (tensor.shard, "SHA-256 differs"),
    }
    assert {where for where, _ in found(report)} == {"layer 3 expert 5 up", tensor.shard}
    sampled = verify(tiny, level="parity", source=source_copy, sample=0.01)
    left_out = sampled.to_dict()["left_out"]
    assert (left_out["records"], left_out["shard_digests"]) == (96 - sampled.records_checked, 9)
    assert left_out["layers"][0] == {"layer": 1, "experts": [[0, 7], [9, 15]]}  # expert 8 of 16 is in the middle


def test_a_recorded_error_that_was_embellished(integers: Path, copy: Callable[[Path], Path]) -> None:
    forge = Forge(copy(integers))
    forge.patch_row(2, 3, 68, "<f", 0.01)
    forge.patch_record(2, 3, 192 + 12, "<f", 0.01)
    tensor = next(tensor for tensor in forge.document["tensors"] if tensor["codec"] == "group_int")
    tensor["rel_error"] *= 0.999
    path = forge.save()
    assert verify(path).ok
    problems = dict(found(verify(path, level="parity", source=LINEAR)))
    assert set(problems) == {"layer 2 expert 3 up", tensor["name"]}
    assert all(what.startswith("recorded error differs (recorded ") for what in problems.values())


def test_weights_that_were_changed_with_their_digests(integers: Path, copy: Callable[[Path], Path]) -> None:
    """Sound in itself: only a measurement shows it."""
    forge = Forge(copy(integers))
    section = forge.header(1, 0).section(layout.SectionKind.CODES, layout.Matrix.DOWN)
    forge.banks[1][section.offset] ^= 0x0C
    digest = blake3(bytes(forge.banks[1][section.offset : section.offset + section.bytes])).digest()
    number = forge.header(1, 0).sections.index(section)
    at = 320 + 64 * number + 32
    forge.banks[1][at : at + 32] = digest
    path = forge.save()
    assert verify(path).ok
    [(where, what)] = found(verify(path, level="parity", source=LINEAR))
    assert where == "layer 1 expert 0 down"
    assert "recorded error differs" in what


@pytest.mark.parametrize("other", [DATA / "k3-small", LINEAR])
def test_another_checkpoint_gives_findings_and_no_crash(tiny: Path, other: Path) -> None:
    report = verify(tiny, level="parity", source=other, jobs=2)
    assert not report.ok
    assert report.level == "parity"
    assert (report.problems[0].where, report.problems[0].what.split(":")[0]) == (
        "source",
        "not the source that the container was packed from",
    )
    assert " of 772 tensor names in common; 0 of 9 shards the same" in report.problems[0].what
    assert sum("not the source" in what for _, what in found(report)) == 1
    places = {where for where, _ in found(report)}
    assert "manifest.json: architecture.hidden_size" in places or "manifest.json: architecture.family" in places
    json.dumps(report.to_dict(), allow_nan=False)


def test_rel_08_a_source_with_absent_shards(tiny: Path, tmp_path: Path) -> None:
    source_copy = Path(shutil.copytree(K3, tmp_path / "source"))
    (source_copy / "model-00004-of-000009.safetensors").unlink()
    with pytest.raises(FormatError, match="model-00004-of-000009"):
        verify(tiny, level="parity", source=source_copy)


def test_parity_of_a_partial_container(tmp_path: Path) -> None:
    path = packed(K3, tmp_path / "part.moepack", layers="0,2", experts="3-4")
    report = verify(path, level="parity", source=K3)
    assert found(report) == []
    document = report.to_dict()
    names = json.loads((K3 / "model.safetensors.index.json").read_text())["weight_map"]
    selected = re.compile(r"\.layers\.[02]\.(?!.*\.experts\.(?![34]\.))")
    outside = [name for name in names if not selected.search(name)]
    assert (document["unaccounted"], document["omitted"]) == (0, len(outside))
    forge = Forge(path)
    forge.document["partial"]["experts"] = [3, 4, 5]
    problems = found(verify(forge.save_manifest(), level="parity", source=K3))
    assert sum("has no fate" in what for _, what in problems) == 6  # three matrices of expert 5, two tensors each
    assert any(where == "manifest.json: coverage" for where, _ in problems)


def test_raw_experts_of_another_dtype(tmp_path: Path) -> None:
    """The same bytes under another name are other weights."""
    path = packed(LINEAR, tmp_path / "raw.moepack", recipe="kimi-linear-lossless", layers="1", experts="0")
    forge = Forge(path)
    number = raw.Parameters("F16").pack()[0]
    forge.patch_row(1, 0, 80, "B", number)
    forge.patch_record(1, 0, 48, "B", number)
    problems = found(verify(forge.save(), level="parity", source=LINEAR))
    assert {what for _, what in problems} == {"dtype differs (source BF16, stored F16)"}
