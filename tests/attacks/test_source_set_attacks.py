"""Indices, folders and sets of shards that do not belong together, each with the verdict it must get."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.families import bind
from tests.attacks.alter import check_refused, document, folder, pipe
from tests.support.checkpoints import K3, make_tensors, write_checkpoint
from tests.support.shards import INDEX_NAME, write_raw_shard
from tests.support.spoil import PAGE, POINTER, SHARD, Attack, file, split, verdict


def index(change: Callable[[dict[str, Any]], Any]) -> Attack:
    return document(INDEX_NAME, change)


def weight_map(change: Callable[[dict[str, Any], list[str]], Any]) -> Attack:
    return index(lambda document: change(document["weight_map"], list(document["weight_map"])))


def shard_called(name: Any) -> Attack:
    return weight_map(lambda m, names: m.__setitem__(names[0], name))


def same_name_in_two_shards(directory: Path) -> None:
    header, data = split(directory / SHARD)
    other, other_data = split(directory / SHARD.replace("00002", "00003"))
    name = next(n for n in header if n != "__metadata__")
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    start = len(other_data)
    other[name] = header[name] | {"data_offsets": [start, start + size]}
    write_raw_shard(directory / SHARD.replace("00002", "00003"), json.dumps(other).encode(), other_data + data[:size])


def no_weights(directory: Path) -> None:
    for path in [*directory.glob("*.safetensors"), directory / INDEX_NAME]:
        path.unlink()


def only_a_pickle(directory: Path) -> None:
    no_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


SET_ATTACKS: dict[str, tuple[Attack, str]] = {
    "src-04 one tensor in two shards": (
        same_name_in_two_shards,
        r"model-00003.*duplicate tensor .*expected only in model-00002",
    ),
    "src-04 one name twice in the index": (
        lambda d: (d / INDEX_NAME).write_text(
            (d / INDEX_NAME).read_text().replace('"weight_map": {', '"weight_map": {"a": "x", "a": "y",')
        ),
        "duplicate key 'a'",
    ),
    "src-09 absent shard": (
        lambda d: (d / SHARD).unlink(),
        rf"1 of 3 shards are absent: {SHARD} .*98 tensors out of reach in layers 2-3",
    ),
    "src-11 another shard": (
        weight_map(lambda m, n: m.__setitem__(n[0], SHARD)),
        rf"disagree about 1 tensors .*index says {SHARD}, it is in model-00001",
    ),
    "src-11 of another model": (
        index(lambda i: i.__setitem__("weight_map", {f"other.{n}": s for n, s in i["weight_map"].items()})),
        r"disagree about 392 tensors .*; .*; .*; .*; .*; .*; .*; .*; .*; [^;]*$",
    ),
    "src-11 tensor that the index does not name": (
        weight_map(lambda m, n: m.pop(n[5])),
        r"disagree about 1 tensors .*not in the index",
    ),
    "src-11 tensor that no shard has": (
        weight_map(lambda m, n: m.__setitem__("ghost", SHARD)),
        r"ghost: index says .*, no shard has it",
    ),
    "index escapes": (shard_called("../../x.safetensors"), "unsafe file name: leaves its directory"),
    "index is absolute": (shard_called("/x.safetensors"), "unsafe file name: absolute"),
    "index has backslashes": (shard_called("a\\..\\b.safetensors"), "unsafe file name: forbidden character"),
    "index names a pickle": (shard_called("pytorch_model.bin"), "another kind, which is never opened"),
    "index names a number": (shard_called(3), r"weight_map names no file .*found 3"),
    "index names a NUL": (shard_called("x\0.safetensors"), "NUL"),
    "index is empty": (index(lambda i: i.__setitem__("weight_map", {})), "no weight_map, or an empty one"),
    "index without a map": (index(lambda i: i.pop("weight_map")), "no weight_map"),
    "index is a list": (file(INDEX_NAME, "[]"), "not an object"),
    "index is a pointer": (
        file(INDEX_NAME, POINTER),
        "index.json: the object that this pointer stands for is absent .*Git LFS pointer",
    ),
    "index is a page": (file(INDEX_NAME, PAGE), "an HTML page"),
    "index is cut": (lambda d: (d / INDEX_NAME).write_bytes((d / INDEX_NAME).read_bytes()[:-20]), "not JSON"),
    "index is empty of bytes": (file(INDEX_NAME, ""), "not JSON"),
    "config is a pointer": (file("config.json", POINTER), "config.json: .*Git LFS pointer"),
    "config is a page": (file("config.json", PAGE), "config.json: .*an HTML page"),
    "config is absent": (
        lambda d: (d / "config.json").unlink(),
        "not a checkpoint: the directory has no configuration .expected config.json",
    ),
    "config is no object": (file("config.json", "[]"), "config.json: JSON document is not an object"),
    "config with a duplicate": (
        file("config.json", '{"model_type": "kimi_k3", "model_type": "kimi_k3"}'),
        "duplicate key",
    ),
    "config is large": (lambda d: os.truncate(d / "config.json", 1 << 30), "file is too large .*found 1073741824"),
    "asset is a pointer": (file("tiktoken.model", POINTER), "tiktoken.model: .*Git LFS pointer"),
    "src-16 only a pickle": (only_a_pickle, r"Python pickles.*never opened .*found pytorch_model.bin"),
    "no weights": (no_weights, "no weights"),
    "no index": (lambda d: (d / INDEX_NAME).unlink(), "shards without an index"),
    "shard is a pipe": (pipe(SHARD), "not a regular file"),
    "shard is a folder": (folder(SHARD), "not a regular file"),
}


@pytest.mark.parametrize("case", list(SET_ATTACKS))
def test_malformed_set(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *SET_ATTACKS[case])


def test_src_09_absent_shards_are_refused_even_where_metadata_would_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    (tmp_path / SHARD).unlink()
    assert "1 of 3 shards are absent" in verdict(tmp_path, need_headers=False)


def test_src_10_stray_weights_are_named_and_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even a shard")
    (tmp_path / "model.safetensors").write_bytes(b"")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.ignored == ("consolidated.safetensors", "model.safetensors")
    assert bind(checkpoint).tensor_count == len(make_tensors(K3))


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("formats.assets.MAX_FILES", 5)
    write_checkpoint(tmp_path, K3)
    assert "too many files" in verdict(tmp_path)
