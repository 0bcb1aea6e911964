"""The file of activation statistics: written, read by another library, and refused wherever it lies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from safetensors import safe_open

from formats.errors import FormatError, UsageError
from packer.statistics.file import (
    LayerStatistics,
    Statistics,
    open_statistics,
    write_layer,
    write_statistics,
)
from packer.statistics.recognise import is_statistics
from packer.statistics.types import SampleLabel
from tests.support.prunes import made_up_layer, made_up_statistics, provenance_of

K3 = Path(__file__).parent.parent / "data" / "k3-tiny"  # 7 layers, the first of them dense; 16 experts, 4 a token
LABELS = {"code": 500, "prose": 300}
INPUTS, WIDTH = 64, 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "made.safetensors"
    made_up_statistics(K3, path, labels=LABELS)
    return path


@pytest.fixture
def sums() -> LayerStatistics:
    return made_up_layer(np.random.default_rng(5), provenance_of(K3, LABELS), INPUTS, WIDTH)


def same(first: LayerStatistics, second: LayerStatistics) -> bool:
    return all(
        np.array_equal(getattr(first, item.name), getattr(second, item.name))
        and getattr(first, item.name).dtype == getattr(second, item.name).dtype
        for item in fields(LayerStatistics)
    )


def test_written_and_read_again(tmp_path: Path) -> None:
    provenance = provenance_of(K3, LABELS)
    rng = np.random.default_rng(1)
    parts = [made_up_layer(rng, provenance, INPUTS, WIDTH) for _ in range(2)]
    digest = write_statistics(tmp_path / "s", provenance, [2, 5], iter(parts))
    read = open_statistics(tmp_path / "s")
    assert (read.blake3, read.layers, read.inputs, read.width) == (digest, (2, 5), INPUTS, WIDTH)
    assert read.provenance == provenance
    assert read.provenance.tokens == 800
    for layer, part in zip((2, 5), parts, strict=True):
        assert same(read.layer(layer), part)
        assert np.array_equal(read.tokens(layer), part.tokens)
        for matrix, own, all_of_it in (
            ("gate", part.expert_input, part.input),
            ("up", part.expert_input, part.input),
            ("down", part.expert_activation, part.activation),
        ):
            assert np.array_equal(read.expert_squares(layer, 3, matrix), own[3])
            assert np.array_equal(read.layer_squares(layer, matrix), all_of_it)
    with pytest.raises(UsageError, match=r"no such layer .*expected 2,5, found 3"):
        read.layer(3)
    with pytest.raises(UsageError, match=r"no such expert .*expected 0 to 15, found 16"):
        read.expert_squares(2, 16, "up")


def test_same_sums_give_the_same_bytes(made: Path, tmp_path: Path) -> None:
    made_up_statistics(K3, tmp_path / "again", labels=LABELS)
    assert (tmp_path / "again").read_bytes() == made.read_bytes()


def test_another_library_reads_it(made: Path) -> None:
    statistics = open_statistics(made)
    with safe_open(str(made), framework="numpy") as file:
        metadata = file.metadata()
        assert (metadata["format"], metadata["version"]) == ("moepack-statistics", "2")
        assert json.loads(metadata["provenance"]) == json.loads(json.dumps(statistics.provenance.to_dict()))
        assert len(list(file.keys())) == 6 * 8 + 1
        data = made.read_bytes()
        assert file.get_tensor("blake3").tobytes() == data[-32:] == blake3(data[:-32]).digest()
        for layer in range(1, 7):
            ours = statistics.layer(layer)
            for item in fields(LayerStatistics):
                theirs = file.get_tensor(f"layer.{layer}.{item.name}")
                assert theirs.dtype == getattr(ours, item.name).dtype
                assert np.array_equal(theirs, getattr(ours, item.name))


def test_a_layer_of_its_own_is_replaced(tmp_path: Path, sums: LayerStatistics) -> None:
    provenance = provenance_of(K3, LABELS)
    other = made_up_layer(np.random.default_rng(6), provenance, INPUTS, WIDTH)
    for part in (other, sums):
        write_layer(tmp_path / "layer", provenance, 4, part)
        assert same(open_statistics(tmp_path / "layer").layer(4), part)
    with pytest.raises(UsageError, match="is there already"):
        write_statistics(tmp_path / "layer", provenance, [4], [sums])


def test_double_sums_are_stored_as_single(tmp_path: Path, sums: LayerStatistics) -> None:
    wide = replace(sums, expert_input=sums.expert_input.astype(np.float64))
    write_layer(tmp_path / "layer", provenance_of(K3, LABELS), 1, wide)
    assert same(open_statistics(tmp_path / "layer").layer(1), sums)


def test_layers_must_be_as_many_as_sums(tmp_path: Path, sums: LayerStatistics) -> None:
    for layers in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="argument 2 is"):
            write_statistics(tmp_path / "s", provenance_of(K3, LABELS), layers, [sums, sums])
    assert list(tmp_path.iterdir()) == []


# Sums that contradict each other: refused by the writer, and by the reader whoever wrote them.


def _with(member: str, place: tuple[int, ...], value: float) -> Callable[[LayerStatistics], LayerStatistics]:
    def change(sums: LayerStatistics) -> LayerStatistics:
        values = np.array(getattr(sums, member))
        values[place] = value
        return replace(sums, **{member: values})

    return change


LIES: dict[str, tuple[Callable[[LayerStatistics], LayerStatistics], str]] = {
    "a token too many": (_with("tokens", (0, 1), 501), r"tokens: tokens of label code were not all routed"),
    "a token too few": (_with("tokens", (1, 3), 0), r"tokens of label prose .*expected 1200 in all, at most 300"),
    "negative tokens": (_with("tokens", (1, 3), -1), r"tokens of label prose"),
    "negative gate": (_with("gate", (0, 0), -1.0), r"gate\[0, 0\]: sums are not all numbers in range .*found -1\)$"),
    "NaN": (_with("saliency", (0, 0), np.nan), r"saliency\[0, 0\]: sums are not all numbers"),
    "infinity": (_with("input", (3,), np.inf), r"input\[3\]: sums are not all numbers"),
    "beyond all reason": (_with("activation", (3,), 1e31), r"activation\[3\]: sums are not all numbers"),
    "NaN of an expert": (_with("expert_input", (3, 3), np.nan), r"expert_input\[3, 3\]: sums are not all numbers"),
    "negative squares": (_with("expert_activation", (3, 3), -1e-9), r"expert_activation\[3, 3\]: sums are not"),
    "gate of nobody": (_with("gate", (0, 15), 1.0), r"gate: an expert without tokens has a sum"),
    "saliency of nobody": (_with("saliency", (0, 15), 1.0), r"saliency: an expert without tokens has a sum"),
    "input of nobody": (_with("expert_input", (15, 0), 1.0), r"expert_input: an expert without tokens"),
    "activation of nobody": (_with("expert_activation", (15, 0), 1.0), r"expert_activation: an expert without tokens"),
    "halves": (_with("halves", (1, 0, 0), 0.0), r"halves: the two halves are not the whole"),
}


@pytest.mark.parametrize("lie", LIES)
def test_sums_that_contradict_each_other(lie: str, sums: LayerStatistics, tmp_path: Path, made: Path) -> None:
    change, message = LIES[lie]
    assert not sums.tokens[:, 15].any()
    with pytest.raises(FormatError, match=message):
        write_layer(tmp_path / "layer", provenance_of(K3, LABELS), 1, change(sums))
    assert list(tmp_path.iterdir()) == []
    statistics = open_statistics(made)
    false = change(statistics.layer(1))
    path = forged(made, tmp_path, {f"layer.1.{item.name}": getattr(false, item.name) for item in fields(false)})
    with pytest.raises(FormatError, match=message):
        open_statistics(path).layer(1)
    if "not all numbers" in message:  # what needs no second tensor to be seen is seen before any work begins
        with pytest.raises(FormatError, match=message):
            open_statistics(path)


# Hostile files


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    """A file whose digest, if it ends with one, is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    before = len(text).to_bytes(8, "little") + text + data[:-32]
    path.write_bytes(before + (blake3(before).digest() if len(data) >= 32 else data))
    return path


def forged(made: Path, folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A copy with other arrays in the place of some."""
    header, data = parts_of(made)
    changed = bytearray(data)
    for name, values in arrays.items():
        start, end = header[name]["data_offsets"]
        assert len(values.tobytes()) == end - start
        changed[start:end] = values.tobytes()
    return put(folder / "forged", header, bytes(changed))


def shaped(made: Path, folder: Path, change: Callable[[dict[str, Any]], Iterable[Any] | None]) -> Path:
    """A copy with another header."""
    header, data = parts_of(made)
    change(header)
    return put(folder / "shaped", header, data)


def provenance(change: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A change of members of the provenance, dotted keys."""

    def apply(header: dict[str, Any]) -> None:
        document = json.loads(header["__metadata__"]["provenance"])
        for key, value in change.items():
            node: Any = document
            *path, last = key.split(".")
            for part in path:
                node = node[int(part)] if isinstance(node, list) else node[part]
            if value is None:
                del node[last]
            else:
                node[last] = value
        header["__metadata__"]["provenance"] = json.dumps(document)

    return apply


def metadata(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(members)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no metadata": (lambda header: header.pop("__metadata__"), "format: not a file of statistics"),
    "another format": (metadata(format="moepack"), "format: not a file of statistics .*expected moepack-statistics"),
    "another version": (metadata(version="1"), "version: not a file of statistics .*expected 2, found '1'"),
    "more metadata": (metadata(more="x"), "metadata have other members"),
    "no provenance": (lambda header: header["__metadata__"].pop("provenance"), "metadata have other members"),
    "a number": (metadata(version=1), "__metadata__ is not an object of strings"),
    "provenance that is no JSON": (metadata(provenance="{"), "provenance.* not JSON"),
    "provenance that is a list": (metadata(provenance="[]"), "provenance: JSON document is not an object"),
    "provenance without end": (metadata(provenance="[" * 100_000), "provenance: JSON"),
    "unknown member": (provenance({"more": 1}), "provenance: more: unknown key"),
    "absent member": (provenance({"window": None}), "provenance: window: key is absent"),
    "no labels": (provenance({"labels": []}), "provenance: labels: value is not allowed"),
    "label twice": (provenance({"labels.1.name": "code"}), "provenance: a label stands twice"),
    "empty label": (provenance({"labels.1.tokens": 0}), "labels.1.tokens: value is not allowed"),
    "tokens without end": (provenance({"labels.1.tokens": 1 << 62}), "labels.1.tokens: value is not allowed"),
    "a label too few": (lambda header: provenance({"labels": [_label()]})(header), "tensors are not those of"),
    "fewer experts": (provenance({"model.experts": 15}), "layer.1.tokens I64 .2, 15., found layer.1.tokens"),
    "experts without end": (provenance({"model.experts": 1 << 40}), "model.experts: value is not allowed"),
    "more a token than there are": (provenance({"model.experts_per_token": 17}), "more experts a token than there are"),
    "fewer layers": (provenance({"model.hidden_layers": 6}), "layers are not ascending layers of the model"),
    "a digest that is none": (provenance({"model.config_blake3": "x"}), "config_blake3: value is not allowed"),
    "a name that is renamed": (
        lambda header: header.update({"layer.1.gates": header.pop("layer.1.gate")}),
        "expected layer.1.gate F64 .2, 16., found layer.1.gates",
    ),
    "another type": (
        lambda header: header["layer.1.tokens"].update(dtype="U64"),
        "expected layer.1.tokens I64 .*found layer.1.tokens U64",
    ),
    "another shape": (
        lambda header: header["layer.2.gate"].update(shape=[16, 2]),
        "expected layer.2.gate F64 .2, 16., found layer.2.gate F64 .16, 2.",
    ),
    "a shape without end": (
        lambda header: header["layer.2.gate"].update(shape=[1 << 62, 1 << 62]),
        "do not fill the span",
    ),
    "no shape": (lambda header: header["layer.1.input"].update(shape=[8, 8]), "layer.1.input: not a row of sums"),
    "a layer that is no number": (
        lambda header: header.update({"layer.01.tokens": header.pop("layer.1.tokens")}),
        "expected layer.2.tokens|not a row|not those",
    ),
    "overlap": (
        lambda header: header["layer.1.gate"].update(data_offsets=header["layer.1.tokens"]["data_offsets"]),
        "overlaps|leaves unused bytes",
    ),
    "a digest of another kind": (
        lambda header: header["blake3"].update(dtype="F32", shape=[8]),
        "expected blake3 U8 .32., found blake3 F32 .8.",
    ),
    "past the end": (
        lambda header: header["blake3"].update(data_offsets=[0, 1 << 60]),
        "ends past the data",
    ),
}


def _label() -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(SampleLabel(name="all", tokens=800, texts=()))
    return document


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_headers(attack: str, made: Path, tmp_path: Path) -> None:
    change, message = HOSTILE[attack]
    with pytest.raises(FormatError, match=message) as refused:
        open_statistics(shaped(made, tmp_path, change))
    assert str(tmp_path / "shaped") in str(refused.value)
    assert "\n" not in refused.value.line()


@pytest.mark.parametrize("change", ["cut", "longer", "missing", "extra"])
def test_tensors_and_bytes_agree(change: str, made: Path, tmp_path: Path) -> None:
    header, data = parts_of(made)
    if change == "cut":
        data = data[:-1]
    elif change == "longer":
        data += b"\0"
    elif change == "missing":
        start, _ = header.pop("blake3")["data_offsets"]
        data = data[:start]
    else:
        header["more"] = {"dtype": "U8", "shape": [3], "data_offsets": [len(data), len(data) + 3]}
        data += b"abc"
    messages = {"cut": "ends past the data", "longer": "unused bytes", "missing": "missing or too many"}
    with pytest.raises(FormatError, match=messages.get(change, "missing or too many")):
        open_statistics(put(tmp_path / "s", header, data))


def test_a_flipped_bit_is_seen_wherever_it_is(made: Path, tmp_path: Path) -> None:
    sound = made.read_bytes()
    start = 8 + int.from_bytes(sound[:8], "little")
    copy = tmp_path / "copy"
    name = sound.index(b"a novel.txt")  # of the sample text, in the header
    for place in (name, *range(start, len(sound), 9973), len(sound) - 33, len(sound) - 32, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[place] ^= 2
        copy.write_bytes(damaged)
        with pytest.raises(FormatError, match="copy: statistics are damaged"):
            open_statistics(copy)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 7, b"\0" * 8, (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{}", b"{}" * 50],
)
def test_other_files(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError):
        open_statistics(tmp_path / "x")


@pytest.mark.parametrize("data", [b"", b"# A text\n", b'{"a": 1, "b": {}}', b"01234567{", bytes(20)])
def test_what_is_not_even_safetensors_is_told_without_numbers(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(FormatError) as refused:
        open_statistics(path)
    assert refused.value.line() == f"{path}: not a statistics file of moepack calibrate"
    assert refused.value.hint == "make statistics with moepack calibrate"


def test_a_file_of_statistics_is_told_by_its_beginning(made: Path, tmp_path: Path) -> None:
    assert is_statistics(made)
    other = tmp_path / "other"
    for data in (b"", b"moepack-statistics", (2).to_bytes(8, "little") + b"{}", b"12345678{ moepack-statistics"):
        other.write_bytes(data)
        assert not is_statistics(other)
    assert not is_statistics(tmp_path)
    assert not is_statistics(tmp_path / "none")


@pytest.mark.parametrize("length", [9, 10, 1000])
def test_the_start_of_a_file_is_told_as_that(length: int, made: Path, tmp_path: Path) -> None:
    whole = made.read_bytes()
    needed = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "x").write_bytes(whole[:length])
    with pytest.raises(FormatError) as refused:
        open_statistics(tmp_path / "x")
    cut = f"cut short inside its header (expected {needed} bytes or more, found {length})"
    assert refused.value.line() == f"{tmp_path / 'x'}: file of statistics is {cut}"


@pytest.mark.parametrize("place", [(0, 0), (0, 63), (3, 5), (15, 63)])
def test_the_place_of_a_sum_that_is_no_number(
    place: tuple[int, int], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that is not in the first piece that is read."""
    monkeypatch.setattr("packer.statistics.proof.HASH_BYTES", 256)
    assert open_statistics(made).blake3 == blake3(made.read_bytes()).hexdigest()
    sums = np.array(open_statistics(made).layer(2).expert_input)
    sums[place] = -np.inf
    path = forged(made, tmp_path, {"layer.2.expert_input": sums})
    with pytest.raises(FormatError) as refused:
        open_statistics(path)
    wrong = "sums are not all numbers in range (expected 0 to 1e+30, found -inf)"
    assert refused.value.line() == f"{path}: layer.2.expert_input{list(place)}: {wrong}"


def test_damage_that_makes_a_sum_no_number_is_told_as_damage(made: Path, tmp_path: Path) -> None:
    header, _ = parts_of(made)
    data = bytearray(made.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little") + header["layer.1.input"]["data_offsets"][0]
    data[start : start + 8] = np.float64(np.nan).tobytes()
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError, match="statistics are damaged"):
        open_statistics(tmp_path / "x")


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.write((17 << 20).to_bytes(8, "little") + b"{")
        file.truncate(64 << 20)
    with pytest.raises(FormatError, match=r"impossible length .*expected 2 to 16777216, found 17825792"):
        open_statistics(tmp_path / "x")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_statistics(tmp_path / "none")
    with pytest.raises(UsageError, match="not a regular file"):
        open_statistics(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        open_statistics(tmp_path / "pipe")


def test_a_file_that_changes_while_it_is_in_use(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(made.read_bytes())
    statistics: Statistics = open_statistics(path)
    statistics.layer(1)
    path.write_bytes(made.read_bytes())  # the same bytes, yet nobody looks at all of them again
    with pytest.raises(FormatError, match="changed while they were in use"):
        statistics.layer(1)


def test_names_that_cannot_be_stored(tmp_path: Path, sums: LayerStatistics) -> None:
    sound = provenance_of(K3, LABELS)
    first, second = sound.labels
    for labels in (
        (msgspec.structs.replace(first, name="\udc80"), second),
        (msgspec.structs.replace(first, name="a\nb"), second),
        (msgspec.structs.replace(first, name=""), second),
        (msgspec.structs.replace(first, name="prose"), second),
    ):
        with pytest.raises(UsageError, match="provenance"):
            write_layer(tmp_path / "s", msgspec.structs.replace(sound, labels=labels), 1, sums)
    assert list(tmp_path.iterdir()) == []
