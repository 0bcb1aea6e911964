"""One test for each MUST of SPEC.md, named after its violation.

Every test takes a valid container and breaks one rule. ``Forge`` makes all digests above the change right again, so
that only the broken rule can give it away.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats import layout
from formats.container import Container, open_container
from formats.errors import FormatError, IntegrityError
from formats.index import unpack_index_rows
from packer.verify.verify import VerifyReport, verify
from tests.support.containers import MXFP4, Forge, Layer, Spec, all_codecs, build_container, seal

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(build_container(tmp_path / "model.moepack"))


def read_all(path: Path) -> None:
    """Read and decode everything, as a reader that believes nothing would."""
    with open_container(path) as container:
        for info in container.manifest.layers:
            for row in container.rows(info.layer):
                record = container.record(info.layer, row.expert)
                for matrix in layout.Matrix:
                    record.matrix(matrix)
        for tensor in container.manifest.tensors:
            container.tensor_values(tensor)


def refusal(path: Path) -> str:
    """The message with which a reader refuses a container."""
    with pytest.raises(FormatError) as refused:
        read_all(path)
    assert refused.value.where, "a refusal says where"
    return str(refused.value)


def findings(path: Path) -> list[tuple[str, str]]:
    report: VerifyReport = verify(path, level="hashes")
    return [(problem.where, problem.what) for problem in report.problems]


def broken(forge: Forge, change: Callable[[dict[str, Any]], object]) -> str:
    """The refusal of a container whose manifest was changed."""
    change(forge.document)
    return refusal(forge.save_manifest())


def test_the_forge_is_innocent(forge: Forge, tmp_path: Path) -> None:
    """What the forge saves without a change is valid: each refusal below is due to its one change."""
    read_all(forge.save())
    assert findings(forge.path) == []
    read_all(build_container(tmp_path / "codecs", all_codecs()))


def test_every_must_has_a_test() -> None:
    pages = [ROOT / "formats" / "SPEC.md", *sorted((ROOT / "formats" / "codecs").glob("*.md"))]
    tags = {tag for page in pages for tag in re.findall("⟦([a-z0-9-]+)⟧", page.read_text("utf-8"))}
    assert len(tags) > 80
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "formats").rglob("test_*.py")]
    tests = {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert {tag for tag in tags if "test_" + tag.replace("-", "_") not in tests} == set()


# Section 2: conventions


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("index", 10), ("index", 11), ("index", 24), ("index", 127), ("row", 96), ("row", 127),
        ("record", 10), ("record", 68), ("record", 71), ("record", 76), ("record", 127), ("record", 128 + 48),
        ("record", 256 + 63), ("record", 320 + 2), ("record", 320 + 7), ("record", 320 + 24), ("record", 320 + 31),
        ("record", 320 + 7 * 64), ("record", 1023), ("trunk", 10), ("trunk", 24), ("trunk", 4095),
    ],
)  # fmt: skip
def test_reserved_not_zero(forge: Forge, file: str, at: int) -> None:
    if file == "record":
        forge.patch_record(2, 1, at, "B", 1)
    else:
        target = forge.trunk if file == "trunk" else forge.index
        target[at + (forge.row_at(2, 1) if file == "row" else 0)] = 1
    assert "reserved bytes are not zero" in refusal(forge.save())


@pytest.mark.parametrize("value", [1 << 40, (1 << 62) - 4096, (1 << 63) - 4096, (1 << 64) - 4096])
@pytest.mark.parametrize("field", ["offset", "bytes", "section", "tensor", "segment", "asset"])
def test_extent_past_end(forge: Forge, field: str, value: int) -> None:
    """Refused with no memory taken for it."""
    if field in ("offset", "bytes"):
        forge.patch_row(1, 3, {"offset": 16, "bytes": 24}[field], "<Q", value)
    elif field == "section":
        forge.patch_record(1, 3, 320 + 16, "<Q", value)
    elif field == "asset":
        forge.document["assets"][0]["bytes"] = value
    else:
        forge.document["tensors" if field == "tensor" else "trunk"] = forge.document[
            "tensors" if field == "tensor" else "trunk"
        ]
        target = forge.document["tensors"][1] if field == "tensor" else forge.document["trunk"]["segments"][1]
        target["bytes"] = value
    path = forge.save(keep=("records", "tensors") if field in ("offset", "bytes", "tensor") else ())
    tracemalloc.start()
    message = refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    assert re.search(
        "out of range|does not fit|does not follow|not the end|another length|do not fill|page aligned|`int` <=",
        message,
    )


# Section 3: the directory


def test_manifest_missing(forge: Forge) -> None:
    (forge.path / "manifest.json").unlink()
    assert "not a container: it has no manifest" in refusal(forge.path)


@pytest.mark.parametrize("name", ["index.bin", "trunk.bin", "experts/layer-00002.bank", "assets/sub/chat.jinja"])
def test_file_missing(forge: Forge, name: str) -> None:
    (forge.path / name).unlink()
    message = refusal(forge.path)
    assert "file is missing" in message
    assert name in message


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
@pytest.mark.parametrize("name", ["index.bin", "trunk.bin", "experts/layer-00002.bank", "assets/config.json"])
def test_file_length_differs(forge: Forge, name: str, change: int) -> None:
    length = (forge.path / name).stat().st_size
    os.truncate(forge.path / name, max(0, length + change))
    message = refusal(forge.path)
    assert "another length" in message
    assert name in message
    assert str(length) in message


@pytest.mark.parametrize("name", ["manifest.json", "index.bin", "experts", "experts/layer-00001.bank", "assets/sub"])
def test_file_is_a_link(forge: Forge, tmp_path: Path, name: str) -> None:
    """Even a link to the very same bytes, inside or outside."""
    aside = tmp_path / "aside"
    (forge.path / name).rename(aside)
    (forge.path / name).symlink_to(aside)
    message = refusal(forge.path)
    assert "without links" in message
    assert "Too many levels" not in message  # what the system says of a single one


@pytest.mark.parametrize("name", ["stray.bin", "experts/layer-00009.bank", "assets/sub/x", "folder/deep/file"])
def test_file_unlisted(forge: Forge, name: str) -> None:
    (forge.path / name).parent.mkdir(parents=True, exist_ok=True)
    (forge.path / name).write_bytes(b"x")
    [(where, what)] = findings(forge.path)
    assert name.startswith(where)
    assert "the manifest does not list" in what


@pytest.mark.parametrize(
    "name",
    ["assets/../x", "/etc/passwd", "assets/a\\b", "assets/C:x", "assets/nul", "assets/a\u0000b", "assets//x",
     "assets/ x", "assets/x.", "assets/" + "x" * 256, "assets/" + "a/" * 16 + "x", "assets/e\u0301"],
)  # fmt: skip
def test_file_name_unsafe(forge: Forge, name: str) -> None:
    message = broken(forge, lambda document: document["assets"][0].update(path=name))
    assert re.search("unsafe file name|has a NUL", message)


@pytest.mark.parametrize(
    "pair", [("assets/A", "assets/a"), ("assets/a", "assets/a"), ("assets/stra\u00dfe", "assets/strasse")]
)
def test_file_names_collide(forge: Forge, pair: tuple[str, str]) -> None:
    for asset, name in zip(forge.document["assets"], pair, strict=True):
        asset["path"] = name
    assert "two names for one file" in refusal(forge.save_manifest())


# Section 4: the manifest


def test_manifest_too_long(forge: Forge) -> None:
    os.truncate(forge.path / "manifest.json", (64 << 20) + 1)
    assert "manifest is too long" in refusal(forge.path)


@pytest.mark.parametrize("unit", [b"[]", b"{}", b"1", b'"x"'])
def test_manifest_too_many_values(forge: Forge, unit: bytes) -> None:
    """In a member that a reader passes over, correctly sealed; refused with no memory taken for the values."""
    body = (forge.path / "manifest.json").read_bytes()[:-83] + b'"x-a":[' + b",".join([unit] * 8_000_000) + b"],"
    (forge.path / "manifest.json").write_bytes(seal(body))
    tracemalloc.start()
    message = refusal(forge.path)
    assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    tracemalloc.stop()
    assert "manifest.json: JSON holds too many values (expected at most 1048576" in message


@pytest.mark.parametrize("key", ["format", "layer", "codec", "first_row"])
def test_manifest_duplicate_key(forge: Forge, key: str) -> None:
    body = (forge.path / "manifest.json").read_bytes()[:-83]
    at = body.index(f'"{key}":'.encode())
    (forge.path / "manifest.json").write_bytes(seal(body[:at] + f'"{key}":1,'.encode() + body[at:]))
    assert "duplicate key" in refusal(forge.path)


@pytest.mark.parametrize("place", ["", "source", "experts", "layers", "tensors", "trunk", "coverage"])
def test_manifest_unknown_member(forge: Forge, place: str) -> None:
    optional = copy.deepcopy(forge.document)
    _member(optional, place)["x-note"] = {"anything": [1, None]}
    forge.document, required = optional, forge.document
    read_all(forge.save_manifest())  # members that begin with x- are passed over
    forge.document = required
    assert "unknown field `note`" in broken(forge, lambda document: _member(document, place).update(note=1))


def _member(document: dict[str, Any], place: str) -> dict[str, Any]:
    value = document[place] if place else document
    return value[0] if isinstance(value, list) else value


def _members(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every member of a manifest, the first item of a list standing for all."""
    if isinstance(document, list):
        return _members(document[0], (*path, 0)) if document else []
    if not isinstance(document, dict) or path[:1] == ("recipe",) or path[-1:] == ("parameters",):
        return []
    return [found for key, value in document.items() for found in [(*path, key), *_members(value, (*path, key))]]


def test_manifest_member_missing(forge: Forge) -> None:
    members = _members(forge.document)
    assert len(members) > 80
    whole = copy.deepcopy(forge.document)
    for path in members:
        forge.document = copy.deepcopy(whole)
        target: Any = forge.document
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        message = refusal(forge.save_manifest())
        if path[-1] not in ("format", "format_version", *layout.Matrix.__members__, "gate", "up", "down"):
            assert f"missing required field `{path[-1]}`" in message, path


@pytest.mark.parametrize("value", [1.0, "1", True, None, [], -1 << 70, 1 << 70])
@pytest.mark.parametrize(
    "place", ["format_version", "layers.0.records", "experts.count", "tensors.0.offset", "index.rows"]
)
def test_manifest_wrong_type(forge: Forge, place: str, value: object) -> None:
    keys = [int(key) if key.isdigit() else key for key in place.split(".")]
    target: Any = forge.document
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    message = refusal(forge.save_manifest())
    assert re.search("Expected `int`|unknown format version|number is too long|malformed|out of range|sum", message)


@pytest.mark.parametrize("value", [-1, 1 << 63, 1 << 64])
def test_manifest_int_out_of_range(forge: Forge, value: int) -> None:
    """Every integer of the manifest, whether anything else depends on it or not, but for ``scale_exponent``."""
    members = [path for path in _numbers(forge.document) if path[-1] not in ("format_version", "scale_exponent")]
    assert {path[-1] for path in members} >= {"format_revision", "scale_bias", "seed", "rule", "bytes", "omitted", 1}
    whole = copy.deepcopy(forge.document)
    for path in members:
        forge.document = copy.deepcopy(whole)
        target: Any = forge.document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        assert re.search("Expected `int` [<>]= ", refusal(forge.save_manifest())), path


def _numbers(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every integer of a manifest outside of the recipe and the parameters of codecs."""
    if path and path[-1] in ("recipe", "parameters"):
        return []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    return [
        found
        for key, value in items
        for found in (
            _numbers(value, (*path, key))
            if isinstance(value, dict | list)
            else [(*path, key)]
            if type(value) is int
            else []
        )
    ]


@pytest.mark.parametrize("at", [-1, -2, -3, -40, -70, -83, -84, 0, 500])
def test_manifest_seal_wrong(forge: Forge, at: int) -> None:
    """Any byte of the file: the seal covers those before it, and its own have one form."""
    data = bytearray((forge.path / "manifest.json").read_bytes())
    data[at] ^= 1
    (forge.path / "manifest.json").write_bytes(data)
    refusal(forge.path)


def test_manifest_seal_wrong_after_an_edit(forge: Forge) -> None:
    """Sound JSON that says something else; the same cut in half, and without its seal."""
    data = (forge.path / "manifest.json").read_bytes()
    (forge.path / "manifest.json").write_bytes(data.replace(b'"Forged"', b'"Forgey"'))
    with pytest.raises(IntegrityError, match="changed after it was sealed"):
        read_all(forge.path)
    for cut in (data[: len(data) // 2], data[:-83] + b'"x-end":0}', b""):
        (forge.path / "manifest.json").write_bytes(cut)
        refusal(forge.path)


@pytest.mark.parametrize("version", [0, 2, 999, None])
def test_version_unknown(forge: Forge, version: int | None) -> None:
    message = broken(forge, lambda document: document.update(format_version=version))
    assert "unknown format version" in message
    assert "expected 1" in message


@pytest.mark.parametrize("file", ["index", "record", "trunk"])
def test_version_unknown_in_a_binary_file(forge: Forge, file: str) -> None:
    if file == "record":
        forge.patch_record(1, 0, 8, "<H", 2)
    else:
        struct.pack_into("<H", forge.trunk if file == "trunk" else forge.index, 8, 2)
    assert "unknown format version" in refusal(forge.save())


@pytest.mark.parametrize(
    ("place", "member"),
    [
        ("experts", "count"),
        ("experts", "bytes"),
        ("experts", "weights"),
        ("index", "rows"),
        ("index", "bytes"),
        ("trunk", "bytes"),
    ],
)
def test_manifest_sums_differ(forge: Forge, place: str, member: str) -> None:
    message = broken(forge, lambda document: document[place].update({member: document[place][member] + 128}))
    assert f"{place}.{member}" in message


@pytest.mark.parametrize("bias", [0, 255, 1 << 40])
def test_scale_bias_out_of_range(forge: Forge, bias: int) -> None:
    message = broken(forge, lambda document: document["source"].update(scale_bias=bias))
    assert f"source.scale_bias is out of range (expected 1 to 254, found {bias})" in message


def test_scale_bias_differs(tmp_path: Path) -> None:
    """From the manifest's side and from the record's; row and header agree."""
    forge = Forge(build_container(tmp_path / "model.moepack", all_codecs()))
    assert "bias is not source.scale_bias (expected 125, found 127)" in broken(
        forge, lambda document: document["source"].update(scale_bias=125)
    )
    forge.document["source"]["scale_bias"] = 127
    forge.patch_row(1, 2, 80, "B", 125)
    forge.patch_record(1, 2, 48, "B", 125)
    assert "layer 1 expert 2: bias is not source.scale_bias (expected 127, found 125)" in refusal(forge.save())
    forge.document["source"]["scale_bias"] = 125
    read_all(forge.save())


@pytest.mark.parametrize("rule", ["", "ignore", "Refuse", "refuse "])
def test_nonfinite_unknown(forge: Forge, rule: str) -> None:
    assert "source.nonfinite is not known" in broken(forge, lambda document: document["source"].update(nonfinite=rule))


@pytest.mark.parametrize("kind", ["shards", "assets"])
@pytest.mark.parametrize("names", [("b", "a"), ("a-10", "a-1"), ("\U0001f642", "\uffe6"), ("a", "Z")])
def test_files_not_sorted(forge: Forge, kind: str, names: tuple[str, str]) -> None:
    """By bytes: neither by numbers, nor as words, nor by UTF-16."""
    if kind == "shards":
        shard = forge.document["source"]["shards"][0]
        forge.document["source"]["shards"] = [shard | {"name": name} for name in names]
    else:
        for asset, name in zip(forge.document["assets"], names, strict=True):
            asset["path"] = f"assets/{name}"
    assert f"{kind} are not sorted by name" in refusal(forge.save_manifest())


def test_layers_out_of_order(forge: Forge) -> None:
    first, second = forge.document["layers"][:2]
    for member in ("layer", "file"):
        first[member], second[member] = second[member], first[member]
    assert "not in ascending order" in refusal(forge.save_manifest())
    first["layer"] = 1
    first["file"] = second["file"]
    assert "not in ascending order" in refusal(forge.save_manifest())


@pytest.mark.parametrize(
    "name", ["experts/layer-00003.bank", "experts/layer-2.bank", "../layer-00002.bank", "trunk.bin"]
)
def test_bank_name_wrong(forge: Forge, name: str) -> None:
    assert "unexpected name" in broken(forge, lambda document: document["layers"][1].update(file=name))


@pytest.mark.parametrize("row", [0, 3, 5, 1 << 40])
def test_first_row_wrong(forge: Forge, row: int) -> None:
    assert "first_row" in broken(forge, lambda document: document["layers"][1].update(first_row=row))


@pytest.mark.parametrize("experts", [3, 5, 65_536])
@pytest.mark.parametrize("place", ["layer", "architecture"])
def test_source_experts_differ(forge: Forge, place: str, experts: int) -> None:
    """``dropped_experts`` and ``experts`` follow, so that nothing but the source's number is wrong."""
    if place == "architecture":
        forge.document["architecture"]["experts"] = experts
        layer = 1
    else:
        layer = 3
        forge.layer(layer).update(source_experts=experts, experts=experts - 1)
    message = refusal(forge.save_manifest())
    assert f"layer {layer}]: source_experts is not architecture.experts" in message


@pytest.mark.parametrize("dropped", [[], [1, 2], [1, 1], [4]])
def test_dropped_experts_differ(forge: Forge, dropped: list[int]) -> None:
    message = broken(forge, lambda document: document["layers"][2].update(dropped_experts=dropped))
    assert "dropped" in message
    assert "layer 3" in message


@pytest.mark.parametrize("shape", [[1] * 9, [1 << 48], [1 << 30, 1 << 30], [0, 1 << 48], [(1 << 42) + 1, 8, 1 << 20]])
def test_tensor_shape_impossible(forge: Forge, shape: list[int]) -> None:
    message = broken(forge, lambda document: document["tensors"][1].update(shape=shape))
    assert re.search("impossible shape|too many dimensions", message)
    assert "input_layernorm" in message


@pytest.mark.parametrize("shape", [[39], [41], [40, 2], [], [0]])
def test_tensor_bytes_differ(forge: Forge, shape: list[int]) -> None:
    message = broken(forge, lambda document: document["tensors"][1].update(shape=shape))
    assert "another length than its codec gives" in message
    assert "input_layernorm" in message


def test_tensor_twice(forge: Forge) -> None:
    name = forge.document["tensors"][0]["name"]
    assert "stands twice" in broken(forge, lambda document: document["tensors"][3].update(name=name))


@pytest.mark.parametrize("dtype", ["Q9", "", "bf16", "F4", "BF16 "])
@pytest.mark.parametrize("number", [0, 1])
def test_tensor_dtype_unknown(forge: Forge, number: int, dtype: str) -> None:
    """Of a quantised tensor, whose bytes do not depend on it, as well as of a copied one."""
    message = broken(forge, lambda document: document["tensors"][number].update(dtype=dtype))
    assert "unknown dtype" in message
    assert forge.document["tensors"][number]["name"] in message


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "F8_E8M0", "I8", "U8", "BOOL"])
def test_tensor_dtype_not_for_codec(forge: Forge, dtype: str) -> None:
    message = broken(forge, lambda document: document["tensors"][0].update(dtype=dtype))
    assert f"codec group_int is not for this dtype (expected F32, F16, BF16, found {dtype})" in message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_tensor_dtype_of_a_quantised_tensor(forge: Forge, dtype: str) -> None:
    forge.document["tensors"][0]["dtype"] = dtype
    read_all(forge.save_manifest())


@pytest.mark.parametrize(("number", "layer"), [(0, 0), (1, None), (2, 1), (4, 0), (6, 2), (7, 3), (8, 0)])
def test_tensor_layer_differs(forge: Forge, number: int, layer: int | None) -> None:
    message = broken(forge, lambda document: document["tensors"][number].update(layer=layer))
    assert "layer is not that of the segment" in message
    assert forge.document["tensors"][number]["name"] in message


@pytest.mark.parametrize("fate", ["packed", "copied", "dropped"])
@pytest.mark.parametrize("change", [-1, 1])
def test_coverage_sum_differs(forge: Forge, fate: str, change: int) -> None:
    def alter(document: dict[str, Any]) -> None:
        document["coverage"][fate] += change

    assert "coverage does not add up" in broken(forge, alter)


@pytest.mark.parametrize("change", [-1, 1])
def test_coverage_sum_differs_in_what_was_omitted(tmp_path: Path, change: int) -> None:
    forge = Forge(build_container(tmp_path / "model.moepack", _partial_spec()))
    forge.document["coverage"]["omitted"] += change
    assert "coverage does not add up" in refusal(forge.save_manifest())


def test_coverage_counts_differ(forge: Forge) -> None:
    """The sum is right, the parts are not."""
    forge.document["coverage"]["packed"] -= 1
    forge.document["coverage"]["copied"] += 1
    assert {where for where, _ in findings(forge.save_manifest())} == {"manifest.json: coverage"}


@pytest.mark.parametrize("change", ["tensor", "dropped", "template", "digest"])
def test_coverage_names_differ(forge: Forge, change: str) -> None:
    """A tensor cannot vanish, or become another, between the source and the container."""
    if change == "tensor":
        forge.document["tensors"][0]["name"] = "model.embed_tokens_2.weight"
    elif change == "dropped":
        forge.document["dropped"][0]["name"] = "model.layers.1.self_attn.rotary"
    elif change == "template":
        forge.document["experts"]["tensors"]["up"] = ["experts.{layer}.{expert}"]
    else:
        forge.document["coverage"]["names_blake3"] = "0" * 64
    [(where, what)] = findings(forge.save_manifest())
    assert where == "manifest.json: coverage"
    assert "digest of the covered names differs" in what


def _partial_spec(partial: dict[str, Any] | None = None) -> Spec:
    """Two layers of four, with two experts each."""
    layers = {1: Layer((MXFP4, MXFP4)), 2: Layer((MXFP4, MXFP4))}
    return Spec(layers=layers, partial=partial or {"layers": [1, 2], "experts": None}, omitted=3)


@pytest.mark.parametrize(
    "selection",
    [
        {"layers": [2, 1]}, {"layers": [1, 1, 2]}, {"layers": [1, 2, 4]}, {"layers": [1, 2, 1 << 40]},
        {"experts": [1, 0]}, {"experts": [0, 0, 1]}, {"experts": [0, 1, 2]}, {"layers": [1]}, {"layers": []},
    ],
)  # fmt: skip
def test_partial_selection_wrong(tmp_path: Path, selection: dict[str, list[int]]) -> None:
    forge = Forge(build_container(tmp_path / "model.moepack", _partial_spec()))
    forge.document["partial"] |= selection
    message = refusal(forge.save_manifest())
    assert re.search("is not an ascending list|a layer is outside partial.layers", message)


@pytest.mark.parametrize("experts", [None, [], [0], [0, 1]])
@pytest.mark.parametrize("layers", [[1, 2], [0, 1, 2, 3]])
def test_partial_selections_that_are_sound(tmp_path: Path, layers: list[int], experts: list[int] | None) -> None:
    read_all(build_container(tmp_path / "model", _partial_spec({"layers": layers, "experts": experts})))


def test_partial_omits_nothing(tmp_path: Path) -> None:
    forge = Forge(build_container(tmp_path / "model.moepack", _partial_spec()))
    forge.document["coverage"]["omitted"] = 0
    forge.document["source"]["tensors"] -= 3
    assert "nothing was omitted, yet partial is not null" in refusal(forge.save_manifest())


@pytest.mark.parametrize("missing", ["layer", "expert", "omitted"])
def test_partial_not_marked(tmp_path: Path, missing: str) -> None:
    path = build_container(tmp_path / "model.moepack", _partial_spec())
    read_all(path)
    forge = Forge(path)
    forge.document["partial"] = None
    if missing == "layer":
        forge.document["architecture"]["moe_layers"] = [1, 2, 3]
    elif missing == "expert":
        forge.document["architecture"]["experts"] = 3
        for info in forge.document["layers"]:
            info.update(source_experts=3, experts=3)
    if missing != "omitted":
        forge.document["coverage"]["omitted"] = 0
        forge.document["source"]["tensors"] -= 3
    assert "yet partial is null" in refusal(forge.save_manifest())


# Section 5: the index


@pytest.mark.parametrize("magic", [b"MOEPACKT", b"IKCAPEOM", bytes(8)])
def test_index_magic_wrong(forge: Forge, magic: bytes) -> None:
    forge.index[:8] = magic
    message = refusal(forge.save())
    assert ("byte order" if magic == b"IKCAPEOM" else "wrong magic") in message
    assert "index.bin" in message


@pytest.mark.parametrize("width", [0, 64, 127, 1 << 31])
def test_index_row_width_unknown(forge: Forge, width: int) -> None:
    struct.pack_into("<I", forge.index, 12, width)
    assert "unknown width" in refusal(forge.save())


@pytest.mark.parametrize("rows", [0, 10, 12, 1 << 32, (1 << 64) - 1])
def test_index_rows_differ(forge: Forge, rows: int) -> None:
    struct.pack_into("<Q", forge.index, 16, rows)
    assert "another number of rows" in refusal(forge.save())


@pytest.mark.parametrize("codec", [0, 5, 65_535])
@pytest.mark.parametrize("place", ["row", "record"])
def test_codec_unknown(forge: Forge, place: str, codec: int) -> None:
    if place == "row":
        forge.patch_row(1, 2, 12, "<H", codec)
    else:
        forge.patch_record(1, 2, 28, "<H", codec)
    message = refusal(forge.save())
    assert "unknown codec" in message
    assert ("index.bin" if place == "row" else "layer-00001.bank") in message


@pytest.mark.parametrize("codec", ["zip", "mxfp4", "rvq", "RAW", ""])
def test_codec_unknown_in_the_trunk(forge: Forge, codec: str) -> None:
    message = broken(forge, lambda document: document["tensors"][0].update(codec=codec, parameters={}))
    assert "unknown trunk codec" in message
    assert "embed_tokens" in message


@pytest.mark.parametrize("flag", [1, 1 << 15])
@pytest.mark.parametrize("place", ["row", "record"])
def test_flags_unknown(forge: Forge, place: str, flag: int) -> None:
    if place == "row":
        forge.patch_row(1, 2, 14, "<H", flag)
    else:
        forge.patch_record(1, 2, 30, "<H", flag)
    assert "unknown critical flags" in refusal(forge.save())


@pytest.mark.parametrize("change", [{"expert": 0}, {"expert": 3}, {"expert": 4}, {"layer": 1}, {"source": 99}])
def test_index_out_of_order(forge: Forge, change: dict[str, int]) -> None:
    [(field, value)] = change.items()
    forge.patch_row(2, 2, {"layer": 0, "expert": 4, "source": 8}[field], "<I", value)
    message = refusal(forge.save())
    assert re.search("not in ascending order|another layer|out of range", message)
    assert f"at byte {forge.row_at(2, 2) if value != 3 else forge.row_at(2, 3)}" in message


@pytest.mark.parametrize("change", ["gap", "overlap", "same", "short"])
def test_records_not_contiguous(forge: Forge, change: str) -> None:
    """Records never overlap and leave nothing between them (they could hide or be read twice)."""
    row = forge.row(1, 2)
    if change == "short":
        forge.patch_row(1, 3, 24, "<Q", row.bytes - 4096)
    else:
        offset = {"gap": row.offset + 4096, "overlap": row.offset - 4096, "same": 0}[change]
        forge.patch_row(1, 2, 16, "<Q", offset)
    assert re.search("does not follow|do not fill", refusal(forge.save(keep=("records",))))


@pytest.mark.parametrize("source", [0, 1])
def test_source_expert_twice(forge: Forge, source: int) -> None:
    """0 has a record already, 1 is among the dropped."""
    forge.patch_row(3, 1, 8, "<I", source)
    forge.patch_record(3, 1, 24, "<I", source)
    assert "stands twice or was dropped" in refusal(forge.save())


def test_index_digest_differs(forge: Forge) -> None:
    forge.patch_row(2, 0, 64, "<f", 0.125)
    path = forge.save(keep=("layers",))
    with open_container(path) as container:
        container.rows(1)
        with pytest.raises(IntegrityError, match="index rows of layer 2 were changed"):
            container.rows(2)
    assert [where for where, _ in findings(path)] == ["layer 2"]


def test_index_digest_differs_as_a_whole(forge: Forge) -> None:
    forge.document["index"]["blake3"] = "0" * 64
    assert [where for where, _ in findings(forge.save_manifest())] == ["index.bin"]


# Section 6: records


@pytest.mark.parametrize("magic", [b"MOEPACKI", b"RKCAPEOM", bytes(8)])
def test_record_magic_wrong(forge: Forge, magic: bytes) -> None:
    forge.patch_record(2, 3, 0, "8s", magic)
    message = refusal(forge.save())
    assert ("byte order" if magic == b"RKCAPEOM" else "wrong magic") in message
    assert f"layer-00002.bank: layer 2 expert 3 at byte {forge.row(2, 3).offset}" in message


def _broken_record(forge: Forge, at: int, form: str, value: object) -> str:
    forge.patch_record(2, 1, at, form, value)
    message = refusal(forge.save())
    assert "layer-00002.bank" in message or "layer 2 expert 1" in message
    return message


@pytest.mark.parametrize("length", [0, 512, 2048, 1 << 31])
def test_record_header_length_unknown(forge: Forge, length: int) -> None:
    assert "unknown length" in _broken_record(forge, 12, "<I", length)


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_record_length_wrong(forge: Forge, change: int) -> None:
    length = forge.row(2, 1).bytes + change
    assert re.search("not its payload rounded up|does not fit its record", _broken_record(forge, 32, "<Q", length))


@pytest.mark.parametrize("change", [-1, 1, 64])
def test_payload_length_wrong(forge: Forge, change: int) -> None:
    payload = forge.header(2, 1).payload_bytes + change
    message = _broken_record(forge, 40, "<Q", payload)
    assert re.search("does not end with its last section|does not fit the record", message)


@pytest.mark.parametrize("count", [0, 6, 8, 12, 65_535])
def test_section_count_wrong(forge: Forge, count: int) -> None:
    message = _broken_record(forge, 64, "<H", count)
    assert re.search("section count out of range|reserved|last section|unknown kind|number of sections", message)


@pytest.mark.parametrize("count", [0, 2, 4, 65_535])
def test_matrix_count_wrong(forge: Forge, count: int) -> None:
    assert "matrix count out of range" in _broken_record(forge, 66, "<H", count)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("place", ["record", "matrix", "row", "row matrix", "tensor"])
def test_error_not_finite(forge: Forge, place: str, value: float) -> None:
    if place == "tensor":
        if value != -0.5:  # JSON has no other such number, and the parser refuses the words
            assert "constant that is no number" in broken(
                forge, lambda document: document["tensors"][0].update(rel_error=value)
            )
            return
        assert "rel_error is not a finite number" in broken(
            forge, lambda document: document["tensors"][0].update(rel_error=value)
        )
        return
    if place.startswith("row"):
        forge.patch_row(2, 1, 76 if place == "row" else 68, "<f", value)
    else:
        forge.patch_record(2, 1, 72 if place == "record" else 128 + 64 + 12, "<f", value)
    assert "not a finite number" in refusal(forge.save())


@pytest.mark.parametrize("side", [0, (1 << 24) + 1, (1 << 32) - 1])
@pytest.mark.parametrize("at", [128, 132, 256, 260])
def test_matrix_side_out_of_range(forge: Forge, at: int, side: int) -> None:
    assert "no sensible number of" in _broken_record(forge, at, "<I", side)


@pytest.mark.parametrize("exponent", [-101, 101, -(1 << 31), (1 << 31) - 1])
def test_scale_exponent_out_of_range(forge: Forge, exponent: int) -> None:
    assert "scale exponent out of range" in _broken_record(forge, 128 + 8, "<i", exponent)
    forge.patch_record(2, 1, 128 + 8, "<i", 0)
    forge.save()
    assert "scale_exponent is out of range" in broken(
        forge, lambda document: document["tensors"][0].update(scale_exponent=exponent)
    )


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_section_kind_unknown(forge: Forge, kind: int) -> None:
    assert "unknown kind of section" in _broken_record(forge, 320, "B", kind)


@pytest.mark.parametrize("matrix", [3, 254])
def test_section_matrix_unknown(forge: Forge, matrix: int) -> None:
    assert "section of an unknown matrix" in _broken_record(forge, 321, "B", matrix)


@pytest.mark.parametrize("offset", [0, 1023, 1025, 1088, 1 << 40, (1 << 64) - 64])
def test_section_out_of_place(forge: Forge, offset: int) -> None:
    assert "is out of place" in _broken_record(forge, 328, "<Q", offset)


@pytest.mark.parametrize("change", ["kind", "matrix", "length"])
def test_sections_differ_from_codec(forge: Forge, change: str) -> None:
    first, second = forge.header(2, 1).sections[1:3]
    at = 320 + 64
    if change == "kind":
        forge.patch_record(2, 1, at, "B", layout.SectionKind.CODES)
    elif change == "matrix":
        forge.patch_record(2, 1, at + 1, "B", layout.Matrix.DOWN)
    else:  # the same place and alignment, another length
        assert layout.align(first.offset + first.bytes - 1, 64) == second.offset
        forge.patch_record(2, 1, at + 16, "<Q", first.bytes - 1)
    assert re.search("sections are out of order|wrong length", refusal(forge.save()))


@pytest.mark.parametrize("place", ["between", "behind", "last"])
def test_padding_not_zero(forge: Forge, place: str) -> None:
    header = forge.header(2, 1)
    section = next(item for item in header.sections if (item.offset + item.bytes) % 64)
    at = {"between": section.offset + section.bytes, "behind": header.payload_bytes, "last": header.record_bytes - 1}[
        place
    ]
    forge.patch_record(2, 1, at, "B", 1)
    assert findings(forge.save()) == [("layer 2 expert 1", f"padding is not zero at byte {at} of the record")]


@pytest.mark.parametrize(
    ("at", "form", "value", "name"),
    [
        (16, "<I", 3, "layer"), (20, "<I", 2, "expert"), (24, "<I", 0, "source expert"),
        (48 + 4, "<H", 15, "codec parameters"), (72, "<f", 0.5, "errors"), (128 + 12, "<f", 0.5, "errors"),
    ],
)  # fmt: skip
def test_header_differs_from_index(forge: Forge, at: int, form: str, value: object, name: str) -> None:
    assert f"disagrees about its {name}" in _broken_record(forge, at, form, value)


def test_header_differs_from_index_in_codec_or_length(forge: Forge) -> None:
    """Two whole, sound records exchanged: each is right by itself, and digests were made right, too."""
    first, second = forge.row(2, 0), forge.row(2, 1)
    assert first.codec != second.codec
    for row, other in ((first, second), (second, first)):
        forge.index[forge.row_at(2, row.expert) + 24 : forge.row_at(2, row.expert) + 32] = struct.pack(
            "<Q", other.bytes
        )
    forge.patch_row(2, 1, 16, "<Q", second.bytes)
    bank = forge.banks[2]
    one, two = bytes(bank[: first.bytes]), bytes(bank[second.offset : second.offset + second.bytes])
    bank[: first.bytes + second.bytes] = two + one
    assert "disagrees about its expert" in refusal(_resealed(forge, 2))


def _resealed(forge: Forge, layer: int) -> Path:
    """Save with record digests that follow the rows as they are now."""
    for row in unpack_index_rows(bytes(forge.index[128:]), where="forge"):
        if row.layer == layer:
            at = forge.row_at(layer, row.expert) + 32
            data = bytes(forge.banks[layer][row.offset : row.offset + row.bytes])
            forge.index[at : at + 32] = blake3(data).digest()
    return forge.save(keep=("records",))


def test_header_differs_from_manifest(forge: Forge) -> None:
    def alter(document: dict[str, Any]) -> None:
        document["experts"]["shapes"] = [[40, 66], [66, 40], [66, 40]]

    assert "disagrees about its shapes" in broken(forge, alter)


@pytest.mark.parametrize("number", range(7))
def test_record_digest_differs(forge: Forge, number: int) -> None:
    """A flipped bit is named by layer, expert and matrix; a reader refuses the record."""
    section = forge.header(2, 3).sections[number]
    forge.banks[2][forge.row(2, 3).offset + section.offset + section.bytes // 2] ^= 4
    path = forge.save(keep=("records",))
    with open_container(path) as container, pytest.raises(IntegrityError, match="record of layer 2 expert 3"):
        container.record(2, 3)
    [(where, what)] = findings(path)
    assert where == "layer 2 expert 3"
    assert what.endswith(f"damaged: {section.label}")


# Section 7: the trunk


@pytest.mark.parametrize("magic", [b"MOEPACKI", b"TKCAPEOM", bytes(8)])
def test_trunk_magic_wrong(forge: Forge, magic: bytes) -> None:
    forge.trunk[:8] = magic
    message = refusal(forge.save())
    assert ("byte order" if magic == b"TKCAPEOM" else "wrong magic") in message
    assert "trunk.bin" in message


@pytest.mark.parametrize("length", [0, 1024, 8192, 1 << 31])
def test_trunk_header_length_unknown(forge: Forge, length: int) -> None:
    struct.pack_into("<I", forge.trunk, 12, length)
    assert "trunk header has an unknown length" in refusal(forge.save())


@pytest.mark.parametrize("change", [-4096, 1, 1 << 62])
def test_trunk_length_differs(forge: Forge, change: int) -> None:
    struct.pack_into("<Q", forge.trunk, 16, len(forge.trunk) + change)
    assert "another length than its header says" in refusal(forge.save())


@pytest.mark.parametrize(
    "change", [("offset", 4096), ("offset", -4096), ("bytes", 4096), ("bytes", 1), ("bytes", -4096)]
)
def test_segments_not_contiguous(forge: Forge, change: tuple[str, int]) -> None:
    member, by = change
    segment = forge.document["trunk"]["segments"][1]
    segment[member] += by
    assert re.search(r"segments\[layer|does not fit|segment", refusal(forge.save_manifest()))


@pytest.mark.parametrize(
    "name", ["", "layer", "layer.", "layer.4", "layer.01", "layer.-1", "layer.\u0661", "Layer.0", "head", "layer.1 "]
)
def test_segment_unknown(forge: Forge, name: str) -> None:
    message = broken(forge, lambda document: document["trunk"]["segments"][2].update(name=name))
    assert "segment has an unknown name (expected embedding, layer.0 to layer.3, output," in message


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "output"), (1, "embedding"), (1, "layer.1"), (2, "layer.3"), (3, "layer.0"), (5, "other"), (6, "output")],
)
def test_segments_out_of_order(forge: Forge, number: int, name: str) -> None:
    message = broken(forge, lambda document: document["trunk"]["segments"][number].update(name=name))
    assert "segments are not in the order of the forward pass" in message


@pytest.mark.parametrize("by", [-64, -1, 1, 64, 4096])
def test_tensors_not_contiguous(forge: Forge, by: int) -> None:
    forge.document["tensors"][2]["offset"] += by
    message = refusal(forge.save_manifest())
    assert "does not follow the one before" in message
    assert "q_proj" in message


@pytest.mark.parametrize("place", ["between", "inside", "behind", "last"])
def test_trunk_padding_not_zero(forge: Forge, place: str) -> None:
    tensor = forge.document["tensors"][0]
    codes = 33 * 40  # of q_proj: scales start on the next line
    at = {
        "between": forge.document["tensors"][1]["offset"] + 80,
        "inside": forge.document["tensors"][2]["offset"] + codes,
        "behind": tensor["offset"] + tensor["bytes"],
        "last": len(forge.trunk) - 1,
    }[place]
    assert forge.trunk[at] == 0
    forge.trunk[at] = 1
    assert findings(forge.save()) == [("trunk.bin", f"padding is not zero at byte {at}")]


@pytest.mark.parametrize("number", [0, 1, 3, 8])
def test_tensor_digest_differs(forge: Forge, number: int) -> None:
    tensor = forge.document["tensors"][number]
    forge.trunk[tensor["offset"] + tensor["bytes"] - 1] ^= 1
    [(where, what)] = findings(forge.save(keep=("tensors",)))
    assert where == tensor["name"]
    assert "differ from their digest" in what


@pytest.mark.parametrize("path", ["assets/config.json", "assets/sub/chat.jinja"])
def test_asset_digest_differs(forge: Forge, path: str) -> None:
    forge.assets[path] = bytes([forge.assets[path][0] ^ 1]) + forge.assets[path][1:]
    [(where, what)] = findings(forge.save(keep=("assets",)))
    assert where == path
    assert "differ from their digest" in what


# Section 8: codecs


@pytest.mark.parametrize(
    ("expert", "at", "value"),
    [(0, 0, 7), (0, 1, 0), (0, 1, 5), (0, 2, 2), (2, 0, 0), (2, 2, 33), (3, 0, 5), (3, 2, 33), (5, 0, 17)],
)
def test_codec_parameters_wrong(tmp_path: Path, expert: int, at: int, value: int) -> None:
    """In row and header alike, so that the two agree."""
    forge = Forge(build_container(tmp_path / "model.moepack", all_codecs()))
    forge.patch_row(1, expert, 80 + at, "B", value)
    forge.patch_record(1, expert, 48 + at, "B", value)
    message = refusal(forge.save())
    assert f"layer 1 expert {expert}" in message
    assert re.search("out of range|unknown dtype", message)


@pytest.mark.parametrize(
    "parameters", [{}, {"bits": 5, "group": 32}, {"bits": 8, "group": 33}, {"bits": True, "group": 32}, {"bits": 8}]
)
def test_codec_parameters_wrong_in_the_trunk(forge: Forge, parameters: dict[str, Any]) -> None:
    message = broken(forge, lambda document: document["tensors"][0].update(parameters=parameters))
    assert re.search("malformed|out of range", message)


def test_mxfp4_in_the_trunk(forge: Forge) -> None:
    parameters = {"bias": 127, "group": 32}
    message = broken(forge, lambda document: document["tensors"][0].update(codec="mxfp4", parameters=parameters))
    assert "embed_tokens" in message


# Section 9: reading one expert


def test_one_expert_one_read(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the rows are known, a record takes one read of its own length at a page."""
    reads: list[tuple[int, int]] = []
    with open_container(forge.path) as container:
        container.rows(2)
        original = os.pread
        monkeypatch.setattr(
            os, "pread", lambda fd, count, offset: reads.append((count, offset)) or original(fd, count, offset)
        )
        _decode(container, 2, 3)
    [(count, offset)] = reads
    assert (count % 4096, offset % 4096) == (0, 0)


def _decode(container: Container, layer: int, expert: int) -> None:
    record = container.record(layer, expert)
    for matrix in layout.Matrix:
        record.matrix(matrix)
