"""Manifests that lie, contradict themselves or are damaged, each with the verdict of ``moepack verify``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from formats.manifest import WORK_DIR
from tests.attacks.alter import folder, gone, link, pipe
from tests.support.containers import Forge, build_container, seal
from tests.support.verdicts import CLOSED, LISTED, Attack, Case, FileAttack, flip, patch, put, resize, run_case

NAME = "manifest.json"
EVERYTHING = ("records", "layers", "index", "tensors", "assets")  # only the manifest changes, and its seal


def closed(message: str, attack: Attack) -> Case:
    return Case(CLOSED, message, attack, keep=EVERYTHING)


def listed(message: str, attack: Attack) -> Case:
    return Case(LISTED, message, attack, keep=EVERYTHING)


def damaged(message: str, afterwards: FileAttack) -> Case:
    return Case(CLOSED, message, afterwards=afterwards)


def body(change: Any) -> FileAttack:
    """Change the text before the seal and seal it again."""

    def attack(path: Path) -> None:
        before = (path / NAME).read_bytes()[:-83]
        after = change(before)
        assert after != before
        (path / NAME).write_bytes(seal(after))

    return attack


def of_another_container(path: Path) -> None:
    other = build_container(path.parent / "other", None)
    forge = Forge(other)
    for layer in forge.banks:
        forge.patch_record(layer, 0, 1024, "B", 7)
    (path / NAME).write_bytes((forge.save() / NAME).read_bytes())


def unfinished(path: Path) -> None:
    (path / NAME).rename(path / "manifest.json.part")
    (path / WORK_DIR).mkdir()


def first_tensor_twice(forge: Forge) -> None:
    forge.document["tensors"].insert(0, copy.deepcopy(forge.document["tensors"][0]))


def two_banks_of_one_layer(forge: Forge) -> None:
    forge.document["layers"][1] = copy.deepcopy(forge.document["layers"][0])


def record_moved_to_another_layer(forge: Forge) -> None:
    forge.document["layers"][0]["records"] += 1
    forge.document["layers"][0]["experts"] += 1
    forge.document["layers"][0]["source_experts"] += 1
    forge.document["layers"][1]["records"] -= 1


CASES: dict[str, Case] = {
    # not a manifest at all
    "man-01 absent": damaged("it has no manifest.*\\n.*get manifest.json from where", gone(NAME)),
    "man-01 unfinished": damaged("not a finished container.*\\n.*same pack command is given again", unfinished),
    "man-01 empty": damaged("manifest.json", resize(NAME, lambda length: 0)),
    "man-01 half": damaged("manifest.json", resize(NAME, lambda length: length // 2)),
    "man-01 one byte short": damaged("manifest.json", resize(NAME, lambda length: length - 1)),
    "man-01 one byte more": damaged("manifest.json", resize(NAME, lambda length: length + 1)),
    "man-01 zeros": damaged("manifest.json", lambda path: (path / NAME).write_bytes(bytes(5000))),
    "man-01 a page of HTML": damaged("manifest.json", lambda path: (path / NAME).write_bytes(b"<html>" * 200)),
    "man a pipe": damaged("manifest.json.*regular file", pipe(NAME)),
    "man a folder": damaged("manifest.json.*regular file", folder(NAME)),
    "man-02 a link that leaves": damaged("manifest.json.*without links", link(NAME, "../aside")),
    "man too long": damaged("manifest is too long.*found 68719476736", resize(NAME, lambda length: 1 << 36)),
    "man bit flipped in the middle": damaged("changed after it was sealed|manifest.json", flip(NAME, 2000)),
    "man bit flipped in the seal": damaged("changed after it was sealed", flip(NAME, -20)),
    "man seal of another": damaged("changed after it was sealed", patch(NAME, -67, b"0" * 64)),
    "man-08 of another container": Case(LISTED, "index rows of layer 1 were changed", afterwards=of_another_container),
    # not JSON as it must be
    "man list": damaged("not an object|manifest.json", body(lambda text: b"[" + text)),
    "man duplicate member": damaged(
        "duplicate key 'layers'", body(lambda t: t.replace(b'"layers"', b'"layers":1,"layers"', 1))
    ),
    "man byte order mark": damaged("byte order mark", body(lambda text: b"\xef\xbb\xbf" + text)),
    "man not UTF-8": damaged("not valid UTF-8", body(lambda text: text.replace(b"Forged", b"F\xffrged", 1))),
    "man surrogate": damaged("unpaired surrogate", body(lambda text: text.replace(b"Forged", b"\\ud800", 1))),
    "man NUL in a name": damaged("NUL", body(lambda text: text.replace(b"Forged", b"\\u0000", 1))),
    "man NaN": damaged("no number.*NaN", body(lambda text: text.replace(b'"bytes":', b'"x-n":NaN,"bytes":', 1))),
    "man endless digits": damaged(
        "number is too long.*found 9000",
        body(lambda text: text.replace(b'"bytes":', b'"x-n":' + b"9" * 9000 + b',"bytes":', 1)),
    ),
    "man bottomless": damaged(
        "nested too deeply", body(lambda text: text + b'"x-deep":' + b"[" * 200_000 + b"]" * 200_000 + b",")
    ),
    # members
    "man-03 config absent": closed("architecture", put("architecture", ...)),
    "man-03 a shape absent": closed("missing required field `shape`.*tensors", put("tensors.0.shape", ...)),
    "man-04 unknown member": closed("unknown field `compression`", put("compression", "zstd")),
    "man-05 flag for a number": closed("format_revision|Expected `int`", put("format_revision", True)),
    "man text for a number": closed("Expected `int`.*records", put("layers.0.records", "4")),
    "man real for a number": closed("Expected `int`.*records", put("layers.0.records", 4.0)),
    "man number for a text": closed("Expected `str`.*name", put("architecture.name", 5)),
    "man null for a list": closed("Expected `array`.*tensors", put("tensors", None)),
    "man format of another tool": closed("not a moepack|format.*found 'gguf'", put("format", "gguf")),
    "ctr-02 version 999": closed("unknown format version.*expected 1.*found 999", put("format_version", 999)),
    "ctr-02 version absent": closed("version", put("format_version", ...)),
    "ctr-02 version true": closed("version", put("format_version", True)),
    # names
    "man-02 asset climbs out": closed("unsafe file name", put("assets.0.path", "assets/../../x")),
    "man-02 asset is absolute": closed("unsafe file name: absolute", put("assets.0.path", "/etc/passwd")),
    "man-02 asset elsewhere": closed("lies outside assets/.*found 'figures/x'", put("assets.0.path", "figures/x")),
    "man-02 asset with a drive": closed("unsafe file name", put("assets.0.path", "assets/C:x")),
    "man-02 asset is a device": closed("unsafe file name", put("assets.0.path", "assets/aux.txt")),
    "man-02 bank climbs out": closed("bank has an unexpected name.*found '../x'", put("layers.0.file", "../x")),
    "man-02 index elsewhere": closed("index has an unexpected name", put("index.file", "index2.bin")),
    "man-02 trunk elsewhere": closed("trunk has an unexpected name", put("trunk.file", "/dev/zero")),
    "man-02 shard climbs out": closed("unsafe file name", put("source.shards.0.name", "../model.safetensors")),
    "man-02 names that differ in case": closed(
        "two names for one file",
        lambda f: [f.document["assets"][k].update(path=n) for k, n in enumerate(("assets/A", "assets/a"))],
    ),
    # counts and lengths
    "man-06 no layers": closed("experts.count|layers are missing", put("layers", [])),
    "man-06 no tensors": closed("segment holds no tensor", put("tensors", [])),
    "man-06 no segments": closed("trunk.bytes|behind the last segment|does not follow", put("trunk.segments", [])),
    "man-06 layer 60000": closed("layer 60000.*no experts|60000", put("layers.2.layer", 60000)),
    "man-06 moe layer past the last": closed("moe_layers", put("architecture.moe_layers", [1, 2, 3, 200])),
    "man no hidden layers": closed("hidden_layers", put("architecture.hidden_layers", 0)),
    "man hidden layers without end": closed("hidden_layers", put("architecture.hidden_layers", 1 << 40)),
    "man experts without end": closed(
        "source_experts is not architecture.experts|experts", put("architecture.experts", 1 << 30)
    ),
    "man more experts a token than there are": closed("experts_per_token", put("architecture.experts_per_token", 5)),
    "man records of zero": closed("records", put("layers.0.records", 0)),
    "man records of 2^32 - 1": closed("records.*4294967295", put("layers.0.records", (1 << 32) - 1)),
    "man two banks of one layer": closed("not in ascending order", two_banks_of_one_layer),
    "man record moved to another layer": closed("layer 1.*source_experts", record_moved_to_another_layer),
    "man bank of no page": closed("bank length is impossible.*found 100", put("layers.0.bytes", 100)),
    "man bank near 2^63": closed("out of range|impossible|Expected `int`", put("layers.0.bytes", (1 << 63) - 4096)),
    "man experts.bytes": closed("experts.bytes is not the sum.*found 4096", put("experts.bytes", 4096)),
    "man experts.weights": closed("experts.weights does not follow.*found 1", put("experts.weights", 1)),
    "man index.rows": closed("index.rows is not the sum.*expected 11, found 12", put("index.rows", 12)),
    "man index.bytes": closed("index.bytes does not follow.*expected 1536", put("index.bytes", 1537)),
    "man digest too short": closed("index.blake3", put("index.blake3", "ab" * 31)),
    "man digest in capitals": closed("index.blake3", put("index.blake3", lambda old: old.upper())),
    "shape of an expert of 0": closed("experts.shapes|out of range", put("experts.shapes.0", [0, 40])),
    "shape of an expert past the largest": closed("experts.shapes", put("experts.shapes.2", [(1 << 24) + 1, 1])),
    # tensors
    "man-07 smaller shape": closed(
        "input_layernorm.*another length than its codec gives", put("tensors.1.shape", [20])
    ),
    "man tensor twice": closed("embed_tokens.*stands twice", first_tensor_twice),
    "man tensor before the file": closed("Expected `int` >= 0.*offset", put("tensors.0.offset", -64)),
    "man tensor of 2^62 bytes": closed(
        "does not fit its segment.*found 4611686018427387904", put("tensors.0.bytes", 1 << 62)
    ),
    "man tensor of rank 9": closed("too many dimensions.*expected 8, found 9", put("tensors.1.shape", [1] * 9)),
    "man tensor of 2^60 values": closed("impossible shape", put("tensors.1.shape", [1 << 30, 1 << 30])),
    "man tensor of an unknown dtype": closed("unknown dtype.*Q9", put("tensors.1.dtype", "Q9")),
    "man tensor of an unknown codec": closed("unknown trunk codec.*zip", put("tensors.1.codec", "zip")),
    "man tensor with a codec for experts": closed("input_layernorm", put("tensors.1.codec", "rvq")),
    "man scale exponent": closed("scale_exponent is out of range.*found 101", put("tensors.0.scale_exponent", 101)),
    "man error below zero": closed("rel_error is not a finite number", put("tensors.0.rel_error", -0.5)),
    "man error past float64": damaged(
        "number is out of range.*1e999", body(lambda text: text.replace(b'"rel_error":0.0065', b'"rel_error":1e999', 1))
    ),
    "man group of 0": closed("group_int group out of range.*found 0", put("tensors.0.parameters.group", 0)),
    "man bits of 5": closed("group_int bits out of range.*found 5", put("tensors.0.parameters.bits", 5)),
    # what only a verifier looks at
    "man coverage of another set": listed(
        "coverage.*digest of the covered names differs", put("coverage.names_blake3", "0" * 64)
    ),
    "man dropped by no rule": listed("dropped by rule 7, which drops nothing", put("dropped.0.rule", 7)),
    "man recipe cannot be read": listed("recipe.*unknown key", put("recipe.surprise", 1)),
    "man recipe allows less": listed(
        "above the recipe's limit .expected at most 0.001", put("recipe.experts.max_rel_error", 0.001)
    ),
    "man a copied tensor with an error": listed("stored unchanged, yet", put("tensors.1.rel_error", 0.25)),
    "man a copied tensor of another digest": listed("stored unchanged, yet", put("tensors.1.source_blake3", "00" * 32)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_manifest(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_case(CASES[case], tmp_path, capsys)


def test_the_bundle_of_plain_values_is_json(tmp_path: Path) -> None:
    """The attacks above are what they say: the document that they change is the manifest."""
    path = build_container(tmp_path / "model.moepack")
    document = json.loads((path / NAME).read_bytes())
    document.pop("container_id")
    assert Forge(path).document == document
