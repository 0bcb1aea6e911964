"""Opening and reading sound checkpoints; the malformed ones are in tests/attacks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import blake3
import numpy as np
import pytest
import safetensors

from formats.checkpoint import open_checkpoint
from formats.errors import FormatError, UsageError
from tests.support.checkpoints import K3, SPECS, make_tensors, write_checkpoint
from tests.support.shards import Tensor, write_safetensors, write_shards

DATA = Path(__file__).parents[1] / "data"


def oracle(path: Path) -> dict[str, dict]:
    return dict(safetensors.deserialize(path.read_bytes()))


@pytest.mark.parametrize("name", ["k3-tiny", "k3-small", "kimi-linear-tiny"])
def test_released_layouts_agree_with_the_safetensors_library(name: str) -> None:
    with open_checkpoint(DATA / name) as checkpoint:
        assert checkpoint.ignored == ("golden.safetensors",)
        assert checkpoint.assets == ("config.json",)
        assert checkpoint.config_bytes == (DATA / name / "config.json").read_bytes()
        seen = 0
        for shard in checkpoint.shards:
            for key, entry in oracle(DATA / name / shard.name).items():
                tensor = checkpoint.tensors[key]
                assert (tensor.shard, tensor.dtype, list(tensor.shape)) == (shard.name, entry["dtype"], entry["shape"])
                assert checkpoint.read(key) == bytes(entry["data"])
                seen += 1
        assert seen == len(checkpoint.tensors) == len(checkpoint.weight_map)
        assert checkpoint.total_size == sum(tensor.bytes for tensor in checkpoint.tensors.values())


@pytest.mark.parametrize("name", list(SPECS))
def test_generated_checkpoints_are_read_as_written(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, SPECS[name]))
    expected = make_tensors(SPECS[name])
    assert checkpoint.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        found = checkpoint.tensors[key]
        assert (found.dtype, found.shape, found.bytes) == (tensor.dtype, tensor.shape, len(tensor.data))
        assert checkpoint.read(key) == tensor.data
    assert checkpoint.assets == (
        "chat_template.jinja", "config.json", "figures/x.png", "tiktoken.model", "tokenizer_config.json",
    )  # fmt: skip
    assert checkpoint.ignored == ()


def test_shards_are_sorted_and_carry_their_length_and_header_digest(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    assert [shard.name for shard in checkpoint.shards] == sorted(shard.name for shard in checkpoint.shards)
    for shard in checkpoint.shards:
        data = (tmp_path / shard.name).read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        assert (shard.bytes, shard.header_blake3) == (len(data), blake3.blake3(header).hexdigest())


def test_reads_of_ranges(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    name = "language_model.model.embed_tokens.weight"
    whole = checkpoint.read(name)
    assert checkpoint.read(name, 3, 11) == whole[3:11]
    assert checkpoint.read(name, 5) == whole[5:]
    assert checkpoint.read(name, len(whole)) == b""
    for start, stop in ((-1, 2), (0, len(whole) + 1), (5, 4)):
        with pytest.raises(UsageError, match="range outside"):
            checkpoint.read(name, start, stop)
    with pytest.raises(UsageError, match="no such tensor"):
        checkpoint.read("nothing")


def test_run_01_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, K3)
    expected = make_tensors(K3)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, min(count, 7), offset))
    checkpoint = open_checkpoint(directory)
    for key in list(expected)[:5]:
        assert checkpoint.read(key) == expected[key].data


def test_reads_from_many_threads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    expected = make_tensors(K3)
    wrong: list[str] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(sorted(expected))
        wrong.extend(key for key in order if checkpoint.read(str(key)) != expected[str(key)].data)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_descriptor_keeps_a_released_shard(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    key = next(iter(checkpoint.tensors))
    checkpoint.read(key)
    if Path("/proc/self/fd").exists():
        targets = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert not [target for target in targets if target.startswith(str(tmp_path))]
    (tmp_path / checkpoint.tensors[key].shard).unlink()
    with pytest.raises(FormatError, match="file is absent"):
        checkpoint.read(key)


def test_shard_that_changes_while_in_use_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    key = next(iter(checkpoint.tensors))
    path = tmp_path / checkpoint.tensors[key].shard
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="changed while it was in use"):
        checkpoint.read(key)


def test_src_12_entries_in_any_order_and_blanks_at_the_end(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPECS["k3-single-file"])
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    keys = list(np.random.default_rng(3).permutation(list(header)))
    text = json.dumps({str(key): header[str(key)] for key in keys}, indent=1).encode() + b" " * 100 + b"\n"
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    checkpoint = open_checkpoint(tmp_path)
    offsets = [tensor.offset for tensor in checkpoint.tensors.values()]
    assert offsets == sorted(offsets)
    for key, tensor in make_tensors(SPECS["k3-single-file"]).items():
        assert checkpoint.read(key) == tensor.data


def test_shp_07_scalars_and_empty_tensors_are_legal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    extra = {
        "empty": Tensor("F32", (0, (1 << 63) - 1), b""),
        "scalar": Tensor("F32", (), b"\0\0\x80?"),
        "void": Tensor("U8", (3, 0), b""),
        "rank8": Tensor("I8", (1,) * 8, b"\7"),
    }
    write_shards(tmp_path, make_tensors(K3) | extra, 3)
    checkpoint = open_checkpoint(tmp_path)
    for key, tensor in extra.items():
        assert checkpoint.tensors[key].shape == tensor.shape
        assert checkpoint.read(key) == tensor.data


def test_shard_whose_length_field_looks_like_another_format(tmp_path: Path) -> None:
    """A header of 640 bytes begins with 80 02, as a pickle does."""
    write_checkpoint(tmp_path, SPECS["k3-single-file"])
    tensors = {"t": Tensor("U8", (1,), b"x")}
    for pad in range(1, 700):
        write_safetensors(tmp_path / "model.safetensors", tensors, {"pad": "x" * pad})
        if (tmp_path / "model.safetensors").read_bytes()[:2] == b"\x80\x02":
            assert list(open_checkpoint(tmp_path).tensors) == ["t"]
            return
    raise AssertionError("no such header")


def test_symbolic_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "blobs", K3)
    (tmp_path / "snapshot" / "figures").mkdir(parents=True)
    for path in (tmp_path / "blobs").rglob("*"):
        if path.is_file():
            (tmp_path / "snapshot" / path.relative_to(tmp_path / "blobs")).symlink_to(path)
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    assert "figures/x.png" in checkpoint.assets
    for key, tensor in make_tensors(K3).items():
        assert checkpoint.read(key) == tensor.data


def test_assets_and_what_is_left_out(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "source", K3)
    (directory / "README.md").write_text("x")
    (directory / "readme.md").write_text("y")
    (directory / "CON.txt").write_text("x")
    (directory / ".hidden").mkdir()
    (directory / ".hidden" / "x").write_text("x")
    (directory / "sub").mkdir()
    (directory / "sub" / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (directory / "other.safetensors.index.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (directory / "link").symlink_to(tmp_path / "elsewhere")
    (directory / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(directory / "pipe")
    with (directory / "large.txt").open("wb") as file:
        file.truncate((64 << 20) + 1)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.assets == (
        "README.md", "chat_template.jinja", "config.json", "figures/x.png", "tiktoken.model", "tokenizer_config.json",
    )  # fmt: skip
    assert checkpoint.ignored == (
        "CON.txt", "dangling", "large.txt", "link", "other.safetensors.index.json", "pipe", "readme.md",
        "sub/pytorch_model.bin",
    )  # fmt: skip


def test_metadata_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, K3)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    checkpoint = open_checkpoint(directory, need_headers=False)
    assert not checkpoint.has_headers
    assert (checkpoint.shards, dict(checkpoint.tensors)) == ((), {})
    assert checkpoint.weight_map.keys() == make_tensors(K3).keys()
    with pytest.raises(UsageError, match="only metadata"):
        checkpoint.read(next(iter(checkpoint.weight_map)))
    with pytest.raises(FormatError, match="3 of 3 shards are absent"):
        open_checkpoint(directory)


def test_headers_are_read_when_they_are_there_though_not_needed(tmp_path: Path) -> None:
    assert open_checkpoint(write_checkpoint(tmp_path, K3), need_headers=False).has_headers


def test_cli_08_odd_paths(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "-dir with blanks é", K3)
    assert open_checkpoint(str(directory)).tensors


def test_a_copy_in_another_place_is_the_same_checkpoint(tmp_path: Path) -> None:
    first = open_checkpoint(write_checkpoint(tmp_path / "a", K3))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    second = open_checkpoint(tmp_path / "b")
    assert (first.shards, dict(first.tensors)) == (second.shards, dict(second.tensors))
