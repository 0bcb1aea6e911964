"""Reading, planning and packing the released Kimi K3 at its real size, with holes for weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.container import open_container
from formats.families import bind
from formats.layout import Matrix, SectionKind
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.planning.selection import parse_selection
from packer.recipe.recipe import load_recipe
from packer.shards import hash_shard
from packer.storage.journal import ShardSeen
from packer.verify.verify import verify
from tests.fullsize.conftest import NORM, ROUTER, whole
from tests.support.measure import Measured, measured
from tests.support.sparse_checkpoint import (
    SHARDS,
    TENSOR_BYTES,
    TENSORS,
    SparseCheckpoint,
    allocated_bytes,
    apparent_bytes,
    make_contents,
    sparse_sha256,
    write_sparse_shard,
)

# Three stages of 256 entries; codes of 48 blocks x 448 vectors (gate, up) and 56 x 384 (down) x 3 stages x 64 rows.
RECORD_BYTES = 1024 + 3 * 256 * 8 * 2 + 3 * (48 * 448 * 3 * 64) + 2 * (3072 + 3072 + 3584)
LOSSLESS_RECORD_BYTES = 1024 + 3 * 3072 * 3584 // 2 + 3 * 3072 * 3584 // 32 + 3072  # 3,072 to the next page

# The bytes of layer 1 or 92 that cost little: experts as they are, no large matrix of the trunk.
SMALL_RECIPE = """
name = "experts-alone"
families = ["kimi_k3"]
[experts]
codec = "source"
[[trunk]]
roles = ["attention", "attention_gate", "shared_expert", "latent"]
codec = "drop"
[[trunk]]
names = ["*"]
codec = "raw"
"""


@pytest.fixture(scope="module")
def plan(metadata: Path) -> Measured:
    """The plan of the metadata alone."""
    return measured("plan", metadata, "--json")


@pytest.fixture(scope="module")
def dry_run(checkpoint: SparseCheckpoint, space: Path) -> Measured:
    """The plan with all headers at hand."""
    return measured("pack", checkpoint.directory, space / "none.moepack", "--dry-run", "--json")


@pytest.fixture(scope="module")
def opened(checkpoint: SparseCheckpoint) -> Iterator[Checkpoint]:
    """The checkpoint, opened once for all tests that only read."""
    with open_checkpoint(checkpoint.directory) as source:
        yield source


def test_the_checkpoint_has_the_released_size(checkpoint: SparseCheckpoint, opened: Checkpoint) -> None:
    assert len(opened.shards) == SHARDS
    assert len(opened.tensors) == TENSORS
    assert sum(tensor.bytes for tensor in opened.tensors.values()) == TENSOR_BYTES
    assert apparent_bytes(checkpoint.directory) > TENSOR_BYTES
    assert allocated_bytes(checkpoint.directory) < 400 << 20


def test_plan_of_metadata_alone(plan: Measured) -> None:
    """The figures by hand, in less than 1 GiB of memory."""
    print(f"plan of metadata: {plan.seconds:.1f} s, {plan.peak_bytes >> 20} MiB")
    assert plan.code == 0, plan.stderr
    document = plan.document
    assert document["experts"] == 92 * 896 == 82_432
    assert document["expert_record_bytes"] == RECORD_BYTES == 12_419_072
    assert document["expert_bytes"] == 82_432 * RECORD_BYTES
    assert document["index_bytes"] == 128 * 82_433
    assert document["source_bytes"] == TENSOR_BYTES
    assert plan.peak_bytes < 1 << 30


def test_plan_of_metadata_and_of_headers_are_the_same(plan: Measured, dry_run: Measured) -> None:
    print(f"dry run with 96 headers: {dry_run.seconds:.1f} s, {dry_run.peak_bytes >> 20} MiB")
    assert dry_run.code == 0 or (dry_run.code == 4 and "not enough space" in dry_run.stderr), dry_run.stderr
    left, right = plan.document, dry_run.document
    assert right.pop("already_complete") is False
    assert set(left) == set(right)
    # One says that no shard is here; and the journal, a file of the work itself, spells the lengths of the shards.
    assert {key for key in left if left[key] != right[key]} <= {"notes", "peak_disk_bytes"}
    assert abs(left["peak_disk_bytes"] - right["peak_disk_bytes"]) < 4096


def test_dry_run_stays_below_its_own_statement_of_memory(dry_run: Measured) -> None:
    assert dry_run.peak_bytes < dry_run.document["peak_memory_bytes"]


@pytest.mark.parametrize("boundary", [1 << 31, 1 << 32], ids=["2^31", "2^32"])
def test_tensor_across_a_boundary_of_its_shard(checkpoint: SparseCheckpoint, opened: Checkpoint, boundary: int) -> None:
    shard = opened.weight_map["language_model.model.layers.1.input_layernorm.weight"]
    tensors = [tensor for tensor in opened.tensors.values() if tensor.shard == shard]
    (tensor,) = (item for item in tensors if item.offset < boundary < item.offset + item.bytes)
    data = checkpoint.contents[tensor.name]
    assert opened.read(tensor.name) == data
    middle = boundary - tensor.offset
    assert opened.read(tensor.name, middle - 3, middle + 5) == data[middle - 3 : middle + 5]
    assert opened.read(tensor.name, middle, middle + 7) == data[middle : middle + 7]


def test_every_tensor_with_contents_reads_as_it_was_written(checkpoint: SparseCheckpoint, opened: Checkpoint) -> None:
    for name, data in checkpoint.contents.items():
        assert (opened.tensors[name].shard, opened.tensors[name].offset) == checkpoint.places[name]
        assert opened.read(name) == data
    assert max(opened.tensors[name].offset for name in checkpoint.contents) > 1 << 33


def test_offsets_beyond_two_to_the_fortieth(space: Path) -> None:
    """One shard of more than a tebibyte: a tensor that long, and one behind it."""
    folder = space / "giant"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    length = (1 << 40) + 12_345
    header = {
        "long": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]},
        "last": {"dtype": "U8", "shape": [1000], "data_offsets": [length, length + 1000]},
    }
    data = make_contents("last", "U8", (1000,), 0)
    start = write_sparse_shard(folder / "model.safetensors", header, length + 1000, {"last": data})
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(start + (1 << 40))
        file.write(b"deep inside")
    with open_checkpoint(folder) as giant:
        assert giant.tensors["last"].offset == start + length
        assert giant.read("last") == data
        assert giant.read("long", (1 << 40) - 2, (1 << 40) + 11) == b"\0\0deep inside"
        assert giant.read("long", length - 5) == bytes(5)


def _fast_hash(directory: Path, name: str, *, stop: threading.Event, expected: str | None = None) -> ShardSeen:
    status = (directory / name).stat()
    stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return ShardSeen(name, status.st_size, sparse_sha256(directory / name), stamp)


def test_pack_of_the_first_and_the_last_expert_layer(
    checkpoint: SparseCheckpoint, opened: Checkpoint, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends of both layers; bytes as planned, experts bit for bit. Holes are hashed without being read."""
    monkeypatch.setattr("packer.pipeline.hash_shard", _fast_hash)
    recipe, out = space / "small.toml", space / "ends.moepack"
    recipe.write_text(SMALL_RECIPE)
    model = bind(opened)
    selection = parse_selection("1,92", "0-3,892-895", model.architecture)
    plan = make_plan(opened, model, load_recipe(str(recipe)), selection=selection, jobs=2)
    assert plan.expert_bytes == 16 * LOSSLESS_RECORD_BYTES
    result = pack(opened, model, plan, out, jobs=2)
    assert result.container_bytes == plan.container_bytes == apparent_bytes(out)
    report = verify(out, level="hashes")
    assert report.ok, report.problems
    assert report.records_checked == 16
    _compare(checkpoint, out, [(1, expert) for expert in range(4)] + [(92, expert) for expert in range(892, 896)])
    with open_container(out) as container:
        for name in (ROUTER, NORM):
            assert container.tensor_bytes(container.tensor(name)) == checkpoint.contents[name]
        shards = {shard.name: shard.bytes for shard in container.manifest.source.shards}
    assert set(shards) == {"model-00002-of-000096.safetensors", "model-00093-of-000096.safetensors"}
    assert min(shards.values()) > 16 * 10**9


def _compare(checkpoint: SparseCheckpoint, out: Path, experts: list[tuple[int, int]]) -> None:
    """Codes and scales of lossless records are the source's bytes."""
    with open_container(out) as container:
        for layer, expert in experts:
            record = container.record(layer, expert)
            for matrix, names in zip(Matrix, checkpoint.model.expert_names(layer, expert).values(), strict=True):
                for kind, name in zip((SectionKind.CODES, SectionKind.SCALES), names, strict=True):
                    assert bytes(record.section(kind, matrix)) == checkpoint.contents[name], name


@whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layer", "experts"), [(1, "0-3"), (92, "892-895")])
def test_pack_of_one_layer_with_the_bundled_recipe(
    checkpoint: SparseCheckpoint, space: Path, layer: int, experts: str
) -> None:
    """The whole path: the shard is hashed byte by byte, the layer's trunk quantised, all compared with the source."""
    out = space / f"layer-{layer}.moepack"
    arguments = [checkpoint.directory, out, "--layers", str(layer), "--experts", experts, "--json"]
    planned = measured("pack", *arguments, "--dry-run").document
    packed = measured("pack", *arguments)
    print(f"pack of layer {layer}: {packed.seconds:.0f} s, {packed.peak_bytes >> 20} MiB")
    assert packed.code == 0, packed.stderr
    assert packed.document["container_bytes"] == planned["container_bytes"] == apparent_bytes(out)
    assert packed.peak_bytes < planned["peak_memory_bytes"]
    with open_container(out) as container:
        for shard in container.manifest.source.shards:
            assert shard.sha256 == sparse_sha256(checkpoint.directory / shard.name)
    checked = measured("verify", out, "--level", "parity", "--source", checkpoint.directory, "--sample", "1", "--json")
    assert checked.code == 0, checked.stdout
    assert checked.document["records_checked"] == 4
    assert checked.document["experts"]["rel_error"]["max"] < 0.25


@whole
@pytest.mark.timeout(3600)
def test_holes_hash_like_zeros(checkpoint: SparseCheckpoint) -> None:
    """The shortcut of the tests above gives what reading the shard gives."""
    name = "model-00093-of-000096.safetensors"
    seen = hash_shard(checkpoint.directory, name, stop=threading.Event())
    assert seen.sha256 == sparse_sha256(checkpoint.directory / name)
