"""The shipped demo model is a released checkpoint of the promised size; no torch is needed to say so."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from math import prod
from pathlib import Path

from formats.checkpoint import open_checkpoint
from formats.families import bind

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo"
CHECKPOINT = DEMO / "checkpoint"
MAX_FOLDER_BYTES = 30_000_000
RANKS = 4096


def test_the_checkpoint_binds_without_complaint() -> None:
    checkpoint = open_checkpoint(CHECKPOINT)
    architecture = bind(checkpoint).architecture
    assert (architecture.family, architecture.expert_format, architecture.group_size) == ("kimi_k3", "mxfp4", 32)
    assert architecture.attention == ("kda", "kda", "kda", "mla", "kda", "kda", "mla")
    assert architecture.moe_layers == (1, 2, 3, 4, 5, 6)
    assert architecture.vocab_size == RANKS + 256
    assert checkpoint.total_size == sum(tensor.bytes for tensor in checkpoint.tensors.values())
    assert 2 <= len(checkpoint.shards) <= 4


def test_experts_are_large_enough_for_codebooks() -> None:
    architecture = bind(open_checkpoint(CHECKPOINT)).architecture
    assert architecture.experts >= 16
    assert sum(prod(shape) for shape in architecture.expert_shapes) // 8 >= 20_000
    assert all(columns % 32 == 0 for _, columns in architecture.expert_shapes)


def test_float32_tensors_are_those_of_the_release() -> None:
    tensors = open_checkpoint(CHECKPOINT).tensors.values()
    stems = {tensor.name.split(".", 4)[-1] for tensor in tensors if tensor.dtype == "F32"}
    state = {f"self_attn.{name}" for name in ("A_log", "dt_bias", "o_norm.weight")}
    convolutions = {f"self_attn.{name}_conv1d.weight" for name in "qkv"}
    assert stems == state | convolutions | {"block_sparse_moe.gate.e_score_correction_bias"}


def test_every_byte_has_a_token_and_every_rank_one_token() -> None:
    lines = (CHECKPOINT / "tiktoken.model").read_text(encoding="ascii").splitlines()
    pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in map(str.split, lines)]
    assert [rank for _, rank in pairs] == list(range(RANKS))
    assert len({token for token, _ in pairs}) == RANKS
    assert {bytes((byte,)) for byte in range(256)} <= {token for token, _ in pairs}


def test_special_tokens_stand_above_the_ranks() -> None:
    settings = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = settings["added_tokens_decoder"]
    assert sorted(map(int, special)) == list(range(RANKS, RANKS + 256))
    assert len({entry["content"] for entry in special.values()}) == 256
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert special[str(config["bos_token_id"])]["content"] == settings["bos_token"] == "[BOS]"
    assert special[str(config["eos_token_id"])]["content"] == settings["eos_token"] == "[EOS]"


def test_the_folder_stays_small() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MAX_FOLDER_BYTES


def test_held_out_texts_are_there_and_are_text() -> None:
    for name in ("code", "prose"):
        text = (DEMO / "heldout" / f"{name}.txt").read_text(encoding="utf-8")
        assert 60_000 <= len(text.encode()) <= 100_000


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, recipes.demo; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
