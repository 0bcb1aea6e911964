"""Models that are damaged or incomplete are never run on: the error is the kind that says so, and names the place."""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.container import open_container
from formats.errors import FormatError, IntegrityError, UsageError
from runtime.session import Options, open_session
from tests.support.runs import run
from tests.support.small_models import Small, pack_with

LAYER = 2
BANK = f"experts/layer-{LAYER:05d}.bank"
STREAMED = {"trunk": "streamed"}
RESIDENT = {"trunk": "resident"}


@dataclass(frozen=True)
class Copy:
    """A container to be damaged, and ids that make it use expert ``expert`` of layer ``LAYER``."""

    path: Path
    ids: list[int]
    expert: int

    def flip(self, name: str, offset: int) -> None:
        """Change one bit of a file."""
        with (self.path / name).open("r+b") as file:
            file.seek(offset)
            (value,) = file.read(1)
            file.seek(offset)
            file.write(bytes([value ^ 4]))

    def refused(self, kind: type[FormatError], **options: Any) -> str:
        """Insist that running it fails so, and return the message."""
        with pytest.raises(kind) as caught:
            run(self.path, self.ids, **options)
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def copy(small: Small, tmp_path: Path) -> Copy:
    ids = small.shape.ids(12)
    chosen = run(small.container, ids).chosen[LAYER]
    return Copy(shutil.copytree(small.container, tmp_path / "copy.moepack"), ids, int(chosen[-1, 0]))


@pytest.mark.parametrize("options", [{}, {"threads": 1}, {"threads": 3, "chunk": 1}, STREAMED], ids=str)
@pytest.mark.parametrize("place", ["header", "sections", "last byte"])
def test_record_with_a_flipped_bit(copy: Copy, place: str, options: dict[str, Any]) -> None:
    with open_container(copy.path) as container:
        row = container.row(LAYER, copy.expert)
    offset = {"header": 8, "sections": row.bytes // 2, "last byte": row.bytes - 1}[place]
    copy.flip(BANK, row.offset + offset)
    assert f"layer {LAYER} expert {copy.expert}" in copy.refused(IntegrityError, **options)


def test_session_after_a_damaged_record(copy: Copy) -> None:
    """It does not go on from a spoilt state; from a fresh one it runs what is sound, and fails at the same place."""
    with open_container(copy.path) as container:
        row = container.row(LAYER, copy.expert)
    copy.flip(BANK, row.offset + 700)
    with open_session(copy.path, Options(context=64)) as session:
        with pytest.raises(IntegrityError):
            session.feed(copy.ids)
        with pytest.raises(UsageError) as caught:
            session.feed(copy.ids)
        assert "reset" in (caught.value.hint or "")
        session.reset()
        with pytest.raises(IntegrityError, match=f"layer {LAYER} expert {copy.expert}"):
            session.feed(copy.ids)


@pytest.mark.parametrize("options", [RESIDENT, STREAMED, {**STREAMED, "read_ahead": False}], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.A_log",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.2.block_sparse_moe.gate.weight",
        "model.layers.2.self_attn.kv_b_proj.weight",
        "model.norm.weight",
        "model.output_attn_res_proj.weight",
        "lm_head.weight",
    ],
)
def test_trunk_tensor_with_a_flipped_bit(copy: Copy, name: str, options: dict[str, Any]) -> None:
    name = "language_model." + name
    with open_container(copy.path) as container:
        info = container.tensor(name)
        trunk = container.manifest.trunk.file
    copy.flip(trunk, info.offset + info.bytes - 1)
    assert name in copy.refused(IntegrityError, **options)


def test_index_with_a_flipped_bit(copy: Copy) -> None:
    with open_container(copy.path) as container:
        first = container.layer(LAYER).first_row
    copy.flip("index.bin", 128 * (1 + first) + 40)
    assert f"layer {LAYER}" in copy.refused(IntegrityError)


def test_configuration_with_other_arithmetic(copy: Copy) -> None:
    """A valid configuration of the same length that the container was not made with: every shape still agrees."""
    config = copy.path / "assets" / "config.json"
    text = config.read_text(encoding="utf-8")
    assert text.count('"rms_norm_eps": 1e-05') == 1
    config.write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-03'), encoding="utf-8")
    assert "config.json" in copy.refused(IntegrityError)


def absent(bank: Path) -> None:
    bank.unlink()


def short(bank: Path) -> None:
    with bank.open("r+b") as file:
        file.truncate(bank.stat().st_size - 128)


def empty(bank: Path) -> None:
    bank.write_bytes(b"")


def directory(bank: Path) -> None:
    bank.unlink()
    bank.mkdir()


@pytest.mark.parametrize("damage", [absent, short, empty, directory])
def test_bank(copy: Copy, damage: Callable[[Path], None]) -> None:
    damage(copy.path / BANK)
    assert BANK in copy.refused(FormatError)


@pytest.mark.parametrize("threads", [1, 2])
def test_bank_that_shrinks_while_it_is_used(copy: Copy, threads: int) -> None:
    """Nothing of the bank is left: the message names an expert of it, and no other weights take its place."""
    with open_session(copy.path, Options(context=64, threads=threads, look_ahead=False)) as session:
        with (copy.path / BANK).open("r+b") as file:
            file.truncate(0)
        with pytest.raises(FormatError, match=rf"layer {LAYER} expert [0-9]+") as caught:
            session.feed(copy.ids)
    assert BANK in str(caught.value)


@pytest.mark.parametrize("damage", [absent, short])
@pytest.mark.parametrize("name", ["trunk.bin", "index.bin"])
def test_other_files(copy: Copy, name: str, damage: Callable[[Path], None]) -> None:
    damage(copy.path / name)
    assert name in copy.refused(FormatError)


@pytest.mark.parametrize(("layers", "named"), [("1", "2,? ?-?3|2 to 3|2, 3"), ("1,3", "2")])
def test_container_of_some_layers(small: Small, tmp_path: Path, layers: str, named: str) -> None:
    container = pack_with(small.checkpoint, tmp_path / "some.moepack", "-lossless", layers=layers)
    with pytest.raises(FormatError, match="partial") as caught:
        open_session(container)
    assert re.search(rf"layers? ({named})", str(caught.value)), str(caught.value)


NOT_FINITE = {"F32": struct.pack("<f", math.nan), "BF16": b"\xc0\x7f"}


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "layers.0.self_attn.dt_bias",
        "layers.0.self_attn.q_proj.weight",
        "layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "layers.1.block_sparse_moe.gate.weight",
        "layers.2.post_attention_layernorm.weight",
        "norm.weight",
    ],
)
def test_weight_that_is_not_a_number(small: Small, tmp_path: Path, name: str) -> None:
    """Also where it would only keep an expert from ever being chosen, and all logits would look sound."""
    source = Path(shutil.copytree(small.checkpoint, tmp_path / "source"))
    with open_checkpoint(source) as checkpoint:
        tensor = checkpoint.tensors["language_model.model." + name]
    with (source / tensor.shard).open("r+b") as file:
        file.seek(tensor.offset)
        file.write(NOT_FINITE[tensor.dtype] * (tensor.bytes // len(NOT_FINITE[tensor.dtype]) if "embed" in name else 1))
    with pytest.raises(FormatError, match="finite"):
        run(source, small.shape.ids(12))


def test_unfinished_container(copy: Copy) -> None:
    (copy.path / "manifest.json").unlink()
    copy.refused(FormatError)


def test_checkpoint_with_a_shard_that_shrinks_while_it_is_used(small: Small, tmp_path: Path) -> None:
    source = Path(shutil.copytree(small.checkpoint, tmp_path / "source"))
    with open_session(source, Options(context=64, trunk="resident", look_ahead=False)) as session:
        for shard in source.glob("*.safetensors"):
            with shard.open("r+b") as file:
                file.truncate(shard.stat().st_size // 2)
        with pytest.raises(FormatError, match=r"\.safetensors"):
            session.feed(small.shape.ids(12))
