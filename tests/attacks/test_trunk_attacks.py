"""trunk.bin, assets and the directory itself, each with the verdict of ``moepack verify``."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.alter import exchange, folder, gone, link, pipe
from tests.support.containers import Forge
from tests.support.verdicts import CLOSED, LISTED, Attack, Case, FileAttack, flip, put, resize, run_case

TRUNK, ASSET = "trunk.bin", "assets/config.json"
MANIFEST_ONLY = ("records", "layers", "index", "tensors", "assets")


def header(at: int, form: str, value: Any) -> Attack:
    return lambda forge: struct.pack_into(form, forge.trunk, at, value)


def closed(message: str, attack: Attack) -> Case:
    return Case(CLOSED, message, attack, keep=MANIFEST_ONLY)


def damaged(exit_code: int, message: str, afterwards: FileAttack) -> Case:
    return Case(exit_code, message, afterwards=afterwards)


def padding(place: str) -> Attack:
    """One byte between, inside or behind tensors that must be zero; digests follow."""

    def attack(forge: Forge) -> None:
        tensor = forge.document["tensors"][0]
        at = {
            "behind the header": 24,
            "behind a tensor": tensor["offset"] + tensor["bytes"],
            "at the end": len(forge.trunk) - 1,
        }[place]
        forge.trunk[at] = 1

    return attack


def tensors_exchanged(forge: Forge) -> None:
    """The bytes of two routers of one shape, each right for the other."""
    one, two = (forge.tensor(f"model.layers.{layer}.block_sparse_moe.gate.weight") for layer in (1, 2))
    assert one["bytes"] == two["bytes"]
    exchange(forge.trunk, one["offset"], two["offset"], one["bytes"])


def segments_exchanged(forge: Forge) -> None:
    segments = forge.document["trunk"]["segments"]
    segments[1]["name"], segments[2]["name"] = segments[2]["name"], segments[1]["name"]


def added(name: str) -> FileAttack:
    def attack(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"stray")

    return attack


def stray_link(path: Path) -> None:
    (path / "assets" / "out").symlink_to("/etc")


def banks_exchanged(path: Path) -> None:
    """Two whole banks of one length in each other's place."""
    one, two = path / "experts/layer-00001.bank", path / "experts/layer-00002.bank"
    data = one.read_bytes()
    one.write_bytes(data[: two.stat().st_size].ljust(two.stat().st_size, b"\0"))


CASES: dict[str, Case] = {
    # trunk.bin
    "trunk absent": damaged(CLOSED, "trunk.bin: file is missing", gone(TRUNK)),
    "ctr-03 trunk empty": damaged(CLOSED, "trunk.bin: .*another length.*found 0", resize(TRUNK, lambda n: 0)),
    "ctr-04 trunk shorter by a page": damaged(CLOSED, "trunk.bin: .*another length", resize(TRUNK, lambda n: n - 4096)),
    "ctr-04 trunk longer by a byte": damaged(CLOSED, "trunk.bin: .*another length", resize(TRUNK, lambda n: n + 1)),
    "ctr-01 magic of a record": Case(CLOSED, "trunk.bin at byte 0: wrong magic", header(0, "8s", b"MOEPACKR")),
    "ctr-01 magic reversed": Case(CLOSED, "trunk.bin at byte 0: .*other byte order", header(0, "8s", b"TKCAPEOM")),
    "ctr-02 version 2": Case(
        CLOSED, "trunk.bin at byte 8: unknown format version .expected 1, found 2", header(8, "<H", 2)
    ),
    "ctr-08 header of 0 bytes": Case(
        CLOSED, "at byte 12: .*unknown length .expected 4096, found 0", header(12, "<I", 0)
    ),
    "length of 2^64 - 1": Case(CLOSED, "trunk.bin at byte 16: .*another length", header(16, "<Q", (1 << 64) - 1)),
    "reserved in the header": Case(
        CLOSED, "trunk.bin at byte 24: reserved bytes are not zero", padding("behind the header")
    ),
    "padding behind a tensor": Case(LISTED, r"trunk.bin: padding is not zero at byte \d+", padding("behind a tensor")),
    "padding at the end": Case(LISTED, r"trunk.bin: padding is not zero at byte \d+", padding("at the end")),
    "ctr-05 bit flipped in a tensor": damaged(
        LISTED, "model.embed_tokens.weight: .*differ from their digest", flip(TRUNK, 4200)
    ),
    "ctr-06 tensors exchanged": Case(
        LISTED,
        "layers.2.block_sparse_moe.gate.weight: .*differ from their digest",
        tensors_exchanged,
        keep=("tensors",),
    ),
    "man-08 sealed, yet not the source's": Case(LISTED, "stored unchanged, yet", tensors_exchanged),
    "ctr-07 segments that overlap": closed("does not follow the one before", put("trunk.segments.1.offset", 4096)),
    "ctr-07 segment near 2^63": closed("segment|Expected `int`", put("trunk.segments.1.bytes", (1 << 63) - 4096)),
    "segment of half a page": closed("segment is not page aligned .found 2048", put("trunk.segments.0.bytes", 2048)),
    "segment of no bytes": closed("segment is not page aligned .found 0", put("trunk.segments.0.bytes", 0)),
    "segment of an unknown name": closed("segment has an unknown name", put("trunk.segments.0.name", "experts")),
    "segment of a layer that is not": closed("segment has an unknown name", put("trunk.segments.1.name", "layer.9")),
    "segments exchanged": closed("segments are not in the order of the forward pass", segments_exchanged),
    "segment twice": closed("segments are not in the order", put("trunk.segments.2.name", "layer.0")),
    "ctr-07 tensors that overlap": closed(
        "q_proj.*does not follow the one before", put("tensors.2.offset", lambda n: n - 64)
    ),
    "ctr-07 tensor off its line": closed(
        "q_proj.*does not follow the one before", put("tensors.2.offset", lambda n: n + 1)
    ),
    "tensor of another layer": closed(
        "layer is not that of the segment .expected 0, found 1", put("tensors.1.layer", 1)
    ),
    # assets
    "asset absent": damaged(CLOSED, f"{ASSET}: file is missing", gone(ASSET)),
    "asset empty": damaged(CLOSED, f"{ASSET}: .*another length .*expected 9, found 0", resize(ASSET, lambda n: 0)),
    "asset one byte more": damaged(CLOSED, f"{ASSET}: .*another length .*found 10", resize(ASSET, lambda n: n + 1)),
    "ver-07 bit flipped in an asset": damaged(LISTED, f"{ASSET}: .*differ from their digest", flip(ASSET, 3)),
    "asset of 2^40 bytes": closed(f"{ASSET}", put("assets.0.bytes", 1 << 40)),
    "asset without a digest": closed(f"{ASSET}", put("assets.0.blake3", "")),
    "asset is a pipe": damaged(CLOSED, f"{ASSET}.*regular file", pipe(ASSET)),
    "asset is a folder": damaged(CLOSED, f"{ASSET}.*regular file", folder(ASSET)),
    "assets not sorted": closed("assets are not sorted", lambda forge: forge.document["assets"].reverse()),
    # the directory
    "man-02 trunk is a link": damaged(CLOSED, "trunk.bin.*without links", link(TRUNK, "../aside")),
    "man-02 experts is a link": damaged(CLOSED, "experts.*without links", link("experts", "../aside")),
    "man-02 asset links to a secret": damaged(CLOSED, f"{ASSET}.*without links", link(ASSET, "/etc/hostname")),
    "bank is a pipe": damaged(CLOSED, "layer-00003.bank.*regular file", pipe("experts/layer-00003.bank")),
    "bank absent": damaged(CLOSED, "layer-00003.bank: file is missing", gone("experts/layer-00003.bank")),
    "bank of another layer": damaged(CLOSED, "layer-00001.bank: .*another length", banks_exchanged),
    "stray file": damaged(LISTED, "stray.bin: file that the manifest does not list", added("stray.bin")),
    "stray bank": damaged(LISTED, "layer-00009.bank: file that", added("experts/layer-00009.bank")),
    "stray folder": damaged(LISTED, "more: folder that the manifest does not list", added("more/deep/file")),
    "stray link": damaged(LISTED, "assets/out: link that the manifest does not list", stray_link),
    "stray name with escape codes": damaged(LISTED, r"\\x1b\[31m", added("\x1b[31mred")),
    "leftover of a pack": damaged(LISTED, "trunk.bin.part: left over from an unfinished pack", added("trunk.bin.part")),
    "journal left over": damaged(
        LISTED, ".packing: left over from an unfinished pack", added(".packing/journal.jsonl")
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_trunk(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_case(CASES[case], tmp_path, capsys)
