"""Plans: exact bytes from headers alone, and refusals before any work."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.codecs import group_int, mxfp4, raw, rvq
from formats.errors import UsageError
from formats.families import Architecture, BoundTensor, Model, Role, bind
from formats.layout import Codec
from formats.manifest import decode, encode
from packer.planning.layout_plan import expert_codec, plan_layers, plan_trunk
from packer.planning.plan import Plan, make_plan
from packer.planning.selection import Selection, parse_selection
from packer.recipe.recipe import (
    DropRule,
    GroupInt,
    GroupIntRule,
    Mxfp4,
    RawRule,
    Recipe,
    Rvq,
    default_recipe,
    load_recipe,
    override,
)
from packer.storage.journal import (
    FileBegun,
    FileDone,
    FileIntent,
    RecordDone,
    ShardSeen,
    TensorDone,
    UnitDone,
    open_or_create,
    reserve_path,
)
from tests.support.faults import Faults

DATA = Path(__file__).resolve().parents[1] / "data"
GIB = 1 << 30
PAIRS = [
    ("k3-tiny", "kimi-k3"),
    ("k3-tiny", "kimi-k3-lossless"),
    ("k3-small", "kimi-k3"),
    ("k3-small", "kimi-k3-lossless"),
    ("kimi-linear-tiny", "kimi-linear"),
    ("kimi-linear-tiny", "kimi-linear-lossless"),
]

RECIPE = Recipe(name="mine", families=("kimi_k3",), experts=Mxfp4(), trunk=(RawRule(names=("*",)),))
RVQ = Rvq(stages=3, entries=256, max_rel_error=0.25, fallback=Mxfp4())
ARCHITECTURE = Architecture(
    family="kimi_k3",
    name="KimiK3ForConditionalGeneration",
    hidden_layers=5,
    moe_layers=(1, 2, 4),
    experts=6,
    experts_per_token=2,
    hidden_size=64,
    expert_shapes=((97, 100), (97, 100), (100, 97)),
    expert_format="mxfp4",
    expert_dtype="U8",
    group_size=32,
    vocab_size=512,
    latent_size=None,
    attention=("kda",) * 5,
    decay_heads=4,
    tied_embeddings=False,
)


def bound(name: str, kind: str, *shape: int, layer: int | None = None, dtype: str = "BF16") -> BoundTensor:
    size = {"BF16": 2, "F32": 4, "I32": 4}[dtype]
    for side in shape:
        size *= side
    return BoundTensor(name, Role(kind, layer, part=name), dtype, shape, size, "model.safetensors")


@pytest.fixture(scope="module")
def source() -> dict[str, tuple[Checkpoint, Model]]:
    found = {}
    for name in ("k3-tiny", "k3-small", "kimi-linear-tiny"):
        checkpoint = open_checkpoint(DATA / name)
        found[name] = (checkpoint, bind(checkpoint))
    return found


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Model]:
    """The released metadata of Kimi K3: 497,220 names, no shard."""
    folder = tmp_path_factory.mktemp("k3")
    (folder / "config.json").write_bytes((DATA / "k3-metadata" / "config.json").read_bytes())
    index = gzip.decompress((DATA / "k3-metadata" / "model.safetensors.index.json.gz").read_bytes())
    (folder / "model.safetensors.index.json").write_bytes(index)
    checkpoint = open_checkpoint(folder, need_headers=False)
    return checkpoint, bind(checkpoint)


# --- Kimi K3 in full size -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def k3_plan(k3: tuple[Checkpoint, Model]) -> Plan:
    return make_plan(*k3, default_recipe("kimi_k3"))


def test_kimi_k3_at_three_bits(k3_plan: Plan) -> None:
    plan = k3_plan
    # 1,024 of header, 12,288 of codebooks, three bits a weight, one float16 a row; all section lengths divide by 64.
    payload = 1024 + 3 * 256 * 8 * 2 + 3 * 33_030_144 // 8 + 2 * (3072 + 3072 + 3584)
    record = -(-payload // 4096) * 4096
    assert plan.expert_record_bytes == record == 12_419_072
    assert (plan.experts, len(plan.layers)) == (82_432, 92)
    assert plan.expert_bytes == 82_432 * record
    assert round(plan.expert_bytes / GIB, 1) == 953.4
    assert round(plan.container_bytes / GIB, 1) == 983.6
    assert plan.bits_per_weight == pytest.approx(3.0079, abs=1e-4)
    assert plan.container_bytes == plan.expert_bytes + plan.trunk_bytes + plan.other_bytes
    assert any("no shard is here" in note for note in plan.notes)


def test_kimi_k3_trunk_by_role(k3_plan: Plan) -> None:
    """The trunk's roles from the figures of the architecture, by hand."""
    plan = k3_plan
    found: Counter[str] = Counter()
    for segment in plan.segments:
        for tensor in segment.tensors:
            found[tensor.role] += tensor.bytes

    def quantised(bits: int, *matrices: tuple[int, int, int]) -> int:
        return sum(n * rows * (cols * bits // 8 + 2 * -(-cols // 128)) for n, rows, cols in matrices)

    hidden, wide = 7168, 96 * 128
    kda, mla = 69, 24
    assert found["embedding"] == found["head"] == quantised(8, (1, 163_840, hidden))
    assert found["attention"] == quantised(
        4,
        (4 * kda, wide, hidden),  # q, k, v, g
        (kda + mla, hidden, wide),  # o
        (mla, 1536, hidden),
        (mla, 96 * 192, 1536),
        (mla, 512 + 64, hidden),
        (mla, 96 * 256, 512),
        (mla, wide, hidden),  # g
    )
    assert found["attention_gate"] == quantised(8, (kda, 128, hidden), (kda, wide, 128), (kda, 96, hidden))
    assert found["latent"] == quantised(4, (92, 3584, hidden), (92, hidden, 3584))
    assert found["shared_expert"] == quantised(4, (2 * 92, 6144, hidden), (92, hidden, 6144))
    assert found["dense_mlp"] == quantised(4, (2, 33_792, hidden), (1, hidden, 33_792))
    assert found["router"] == 92 * 896 * hidden * 2
    assert found["router_bias"] == 92 * 896 * 4
    assert round(plan.trunk_bytes / GIB, 1) == 30.1


def test_kimi_k3_lossless(k3: tuple[Checkpoint, Model]) -> None:
    plan = make_plan(*k3, load_recipe("kimi-k3-lossless"))
    # 4 bits a weight and a byte for 32: 17,547,264 bytes of payload and 1,024 of header, in whole pages.
    assert plan.expert_record_bytes == -(-(17_547_264 + 1024) // 4096) * 4096
    assert int(plan.expert_bytes / GIB) == 1347
    assert sum(t.bytes for s in plan.segments for t in s.tensors) + 82_432 * 17_547_264 == plan.draft.source.bytes


def test_kimi_k3_units_are_bounded_and_memory_is_that_of_an_expert(k3_plan: Plan) -> None:
    plan = k3_plan.with_jobs(8)
    assert all(unit.bytes <= 128 << 20 for unit in plan.units if unit.layer is not None)
    per_job = plan.peak_memory_bytes - plan.with_jobs(7).peak_memory_bytes
    assert per_job < 384 << 20  # 126 MiB of it are the vectors of all three matrices, which the fit needs at once
    assert plan.peak_memory_bytes < 4 * GIB
    assert plan.peak_disk_bytes - plan.container_bytes < 100 << 20


# --- every bundled recipe on every small checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize(("folder", "recipe"), PAIRS)
def test_everything_lies_where_the_format_wants_it(
    source: dict[str, tuple[Checkpoint, Model]], folder: str, recipe: str
) -> None:
    checkpoint, model = source[folder]
    plan = make_plan(checkpoint, model, load_recipe(recipe))
    assert [layer.layer for layer in plan.layers] == list(model.architecture.moe_layers)
    for layer in plan.layers:
        end = 0
        for number, record in enumerate(layer.records):
            assert (record.expert, record.source_expert, record.offset) == (number, number, end)
            assert record.bytes % 4096 == 0
            end += record.bytes
        assert (layer.bytes, len(layer.records)) == (end, model.architecture.experts)
    end = 4096
    names = []
    for segment in plan.segments:
        assert segment.offset == end
        inside = end
        for tensor in segment.tensors:
            assert tensor.offset == -(-inside // 64) * 64
            inside = tensor.offset + tensor.bytes
            names.append(tensor.name)
        assert segment.bytes % 4096 == 0
        assert 0 <= segment.offset + segment.bytes - inside < 4096
        end += segment.bytes
    assert plan.trunk_bytes == end
    assert names == [tensor.name for tensor in model.trunk]  # the order of the forward pass


@pytest.mark.parametrize(("folder", "recipe"), PAIRS)
def test_the_draft_is_a_manifest_that_readers_accept(
    source: dict[str, tuple[Checkpoint, Model]], folder: str, recipe: str
) -> None:
    checkpoint, model = source[folder]
    plan = make_plan(checkpoint, model, load_recipe(recipe))
    data = encode(plan.draft)
    assert len(data) == plan.manifest_bytes
    assert decode(data)[0] == plan.draft
    assets = sum((checkpoint.directory / name).stat().st_size for name in checkpoint.assets)
    index = 128 * (1 + plan.experts)
    assert plan.other_bytes == len(data) + index + assets
    coverage = plan.draft.coverage
    assert coverage.packed + coverage.copied == len(checkpoint.tensors)
    assert (coverage.dropped, coverage.omitted) == (0, 0)


@pytest.mark.parametrize(("folder", "recipe"), PAIRS)
def test_units_cover_everything_once(source: dict[str, tuple[Checkpoint, Model]], folder: str, recipe: str) -> None:
    plan = make_plan(*source[folder], load_recipe(recipe))
    records: list[tuple[int | None, int]] = []
    tensors: list[str] = []
    for unit in plan.units:
        experts, names = plan.contents(unit)
        records += [(unit.layer, expert) for expert in experts]
        tensors += names
        assert plan.unit(unit.name) == unit
        assert unit in plan.units_of(unit.file)
    assert records == [(layer.layer, record.expert) for layer in plan.layers for record in layer.records]
    assert tensors == [tensor.name for segment in plan.segments for tensor in segment.tensors]
    assert len({unit.name for unit in plan.units}) == len(plan.units)
    for name in plan.unit_files:
        header = 4096 if name == "trunk.bin" else 0
        assert header + sum(unit.bytes for unit in plan.units_of(name)) == plan.file_bytes(name)


def test_segments_are_named_by_the_part_of_the_forward_pass(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    plan = make_plan(*source["k3-tiny"], default_recipe("kimi_k3"))
    assert [segment.name for segment in plan.segments] == [
        "embedding",
        *(f"layer.{number}" for number in range(7)),
        "output",
        "vision",
        "projector",
    ]
    output = [tensor.role for tensor in plan.segment("output").tensors]
    assert output == ["residual", "residual", "norm", "head"]


def test_experts_smaller_than_their_codebooks_fall_back_and_it_is_said(
    source: dict[str, tuple[Checkpoint, Model]],
) -> None:
    tiny = make_plan(*source["k3-tiny"], default_recipe("kimi_k3"))
    assert {record.codec for layer in tiny.layers for record in layer.records} == {Codec.MXFP4}
    # 96 x 64 twice and 64 x 96: 2,304 vectors, 6,912 bytes of indices, under 12,288 bytes of codebooks
    assert [note for note in tiny.notes if "instead of rvq" in note] == [
        "experts are stored as mxfp4 instead of rvq, the recipe's fallback: "
        "12288 bytes of codebooks would serve 6912 bytes of indices"
    ]
    small = make_plan(*source["k3-small"], default_recipe("kimi_k3"))
    assert {record.codec for layer in small.layers for record in layer.records} == {Codec.RVQ}
    assert not [note for note in small.notes if "instead of" in note]


def test_the_number_of_jobs_changes_nothing_but_memory(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    one = make_plan(*source["k3-small"], default_recipe("kimi_k3"), jobs=1)
    four = make_plan(*source["k3-small"], default_recipe("kimi_k3"), jobs=4)
    assert one.with_jobs(4) == four
    assert dataclasses.replace(four, jobs=1) == one
    assert four.peak_memory_bytes > one.peak_memory_bytes


@pytest.mark.parametrize("jobs", [0, -1, 1025])
def test_qnt_08_jobs_that_make_no_sense(source: dict[str, tuple[Checkpoint, Model]], jobs: int) -> None:
    with pytest.raises(UsageError, match="--jobs"):
        make_plan(*source["k3-tiny"], default_recipe("kimi_k3"), jobs=jobs)


def test_the_dictionary_is_json_and_has_what_other_tools_read(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    plan = make_plan(*source["k3-small"], default_recipe("kimi_k3"), selection=Selection(layers=(1, 2)))
    document = plan.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document)[:10] == [
        "container_bytes",
        "expert_bytes",
        "trunk_bytes",
        "other_bytes",
        "experts",
        "layers",
        "expert_record_bytes",
        "bits_per_weight",
        "peak_memory_bytes",
        "peak_disk_bytes",
    ]
    assert (document["layers"], document["experts"]) == (2, 24)
    assert document["bits_per_weight"] == 8 * plan.expert_bytes / (24 * 245_760)  # 320 x 256, three times
    assert [bank["records"][0]["experts"] for bank in document["banks"]] == [[0, 11], [0, 11]]
    assert sum(tensor["bytes"] for tensor in document["tensors"]) <= document["trunk_bytes"]


def test_pln_04_planning_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in (DATA / "k3-tiny").iterdir():
        (folder / path.name).symlink_to(path)
    before = [(path, path.lstat().st_mtime_ns) for path in [tmp_path, *sorted(tmp_path.rglob("*"))]]
    checkpoint = open_checkpoint(folder)
    make_plan(checkpoint, bind(checkpoint), default_recipe("kimi_k3")).to_dict()
    assert before == [(path, path.lstat().st_mtime_ns) for path in [tmp_path, *sorted(tmp_path.rglob("*"))]]


# --- identity -------------------------------------------------------------------------------------------------------


def identity(plan: Plan) -> str:
    return json.dumps(dict(plan.identity), sort_keys=True, allow_nan=False)


def test_wrt_10_whatever_decides_bytes_is_in_the_identity(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    recipe = default_recipe("kimi_k3")
    base = make_plan(*source["k3-small"], recipe)
    assert identity(base) == identity(make_plan(*source["k3-small"], recipe, jobs=3))
    others = [
        make_plan(*source["k3-tiny"], recipe),
        make_plan(*source["k3-small"], override(recipe, ["fitting.seed=1"])),
        make_plan(*source["k3-small"], override(recipe, ["fitting.effort=fast"])),
        make_plan(*source["k3-small"], override(recipe, ["experts.stages=2"])),
        make_plan(*source["k3-small"], override(recipe, ["source.mxfp4_bias=125"])),
        make_plan(*source["k3-small"], recipe, selection=Selection(layers=(1,))),
        make_plan(*source["k3-small"], recipe, selection=Selection(experts=(1,))),
        make_plan(*source["k3-small"], recipe, repository="a/b"),
        make_plan(*source["k3-small"], recipe, commit="0" * 40),
    ]
    found = [identity(plan) for plan in [base, *others]]
    assert len(set(found)) == len(found)


# --- selections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "experts", "expected"),
    [
        (None, None, None),
        ("1,3", None, Selection((1, 3), None)),
        ("3, 1 ,1-2", None, Selection((1, 2, 3), None)),
        (" 1 - 2 , 3", None, Selection((1, 2, 3), None)),
        ("0-4", None, None),
        ("0,1,2,3,4", "0-5", None),
        (None, "0-5", None),
        ("1", "0-5", Selection((1,), None)),
        (None, "3,0", Selection((1, 2, 4), (0, 3))),
        ("0-4", "5", Selection((0, 1, 2, 3, 4), (5,))),
        ("0-1", "5", Selection((0, 1), (5,))),
        ("00,01", None, Selection((0, 1), None)),
    ],
)
def test_pln_09_selections(layers: str | None, experts: str | None, expected: Selection | None) -> None:
    assert parse_selection(layers, experts, ARCHITECTURE) == expected


@pytest.mark.parametrize(
    ("layers", "experts", "word"),
    [
        ("9-3", None, "backwards"),
        ("3-1", None, "backwards"),
        ("5", None, "not in this model"),
        ("0-5", None, "not in this model"),
        ("0-999999999", None, "not in this model"),
        ("9999999999", None, "out of range, not in this model"),
        ("0-99999999999", None, r"out of range.*expected 0 to 4, found 99999999999\)"),
        (None, "9" * 1000, "out of range"),
        ("9" * 1001, None, "not a list"),
        ("", None, "not a list"),
        (",", None, "not a list"),
        ("1,", None, "not a list"),
        ("-1", None, "not a list"),
        ("1-", None, "not a list"),
        ("1-2-3", None, "not a list"),
        ("one", None, "not a list"),
        ("1.0", None, "not a list"),
        ("0x1", None, "not a list"),
        ("١", None, "not a list"),
        (None, "6", "not in this model"),
        (None, "2-1", "backwards"),
        (None, "", "not a list"),
        ("0,3", "0", "none of the selected layers has experts"),
    ],
)
def test_pln_09_selections_that_make_no_sense(layers: str | None, experts: str | None, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_selection(layers, experts, ARCHITECTURE)


@pytest.mark.parametrize("selection", [Selection(layers=()), Selection(experts=()), Selection(layers=(7,))])
def test_pln_09_selections_made_in_python_are_checked_too(
    source: dict[str, tuple[Checkpoint, Model]], selection: Selection
) -> None:
    with pytest.raises(UsageError, match=r"nothing is selected|not in this model"):
        make_plan(*source["k3-tiny"], default_recipe("kimi_k3"), selection=selection)


def test_a_selection_of_everything_is_no_selection(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    whole = make_plan(*source["k3-tiny"], default_recipe("kimi_k3"))
    named = Selection(layers=tuple(range(7)), experts=tuple(range(16)))
    assert make_plan(*source["k3-tiny"], default_recipe("kimi_k3"), selection=named) == whole
    assert whole.draft.partial is None


def test_wrt_17_a_partial_container_says_what_it_holds(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    checkpoint, model = source["k3-tiny"]
    plan = make_plan(checkpoint, model, default_recipe("kimi_k3"), selection=Selection((0, 2), (1, 3)))
    assert [segment.name for segment in plan.segments] == ["layer.0", "layer.2"]
    assert [(layer.layer, [r.expert for r in layer.records]) for layer in plan.layers] == [(2, [1, 3])]
    assert [record.offset for record in plan.layers[0].records] == [0, plan.layers[0].records[0].bytes]
    partial = plan.draft.partial
    assert partial is not None
    assert (partial.layers, partial.experts) == ((0, 2), (1, 3))
    coverage = plan.draft.coverage
    in_trunk = sum(tensor.role.layer in (0, 2) for tensor in model.trunk)
    assert coverage.packed + coverage.copied == in_trunk + 2 * 6  # two experts of six tensors
    assert coverage.omitted == len(checkpoint.tensors) - in_trunk - 12
    assert set(plan.omitted) == {tensor.name for tensor in model.trunk if tensor.role.layer not in (0, 2)}
    assert {shard.name for shard in plan.draft.source.shards} == {
        tensor.shard
        for tensor in checkpoint.tensors.values()
        if ".layers.0." in tensor.name or ".layers.2." in tensor.name
    }
    assert any("partial" in note and "0,2" in note for note in plan.notes)
    assert decode(encode(plan.draft))[0] == plan.draft


def test_a_dense_layer_alone_has_a_trunk_and_no_experts(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    plan = make_plan(*source["k3-tiny"], default_recipe("kimi_k3"), selection=Selection(layers=(0,)))
    assert (plan.experts, plan.expert_bytes, plan.layers) == (0, 0, ())
    assert plan.expert_record_bytes is None
    assert plan.bits_per_weight is None
    assert [segment.name for segment in plan.segments] == ["layer.0"]
    assert not any("instead of rvq" in note for note in plan.notes)
    assert json.loads(json.dumps(plan.to_dict()))["bits_per_weight"] is None
    assert decode(encode(plan.draft))[0] == plan.draft


# --- experts --------------------------------------------------------------------------------------------------------


def with_shapes(*shapes: tuple[int, int]) -> Architecture:
    return dataclasses.replace(ARCHITECTURE, expert_shapes=(shapes[0], shapes[1], shapes[2]))


def chosen(experts: Rvq, architecture: Architecture) -> tuple[Codec, str | None]:
    codec, _, note = expert_codec(dataclass_recipe(experts), architecture)
    return codec, note


def dataclass_recipe(experts: Rvq | Mxfp4 | GroupInt) -> Recipe:
    return Recipe(name="mine", families=("kimi_k3",), experts=experts, trunk=RECIPE.trunk)


def test_the_fallback_begins_where_codebooks_outgrow_their_indices() -> None:
    # Codebooks take 16 bytes an entry and stage, indices one byte a vector and stage: 16 vectors an entry.
    even = with_shapes((1024, 8), (1024, 8), (2048, 8))  # 4,096 vectors for 256 entries
    assert chosen(RVQ, even) == (Codec.RVQ, None)
    codec, note = chosen(RVQ, with_shapes((1024, 8), (1024, 8), (2047, 8)))
    assert codec == Codec.MXFP4
    assert note is not None
    assert "12288 bytes of codebooks would serve 12285 bytes of indices" in note


def test_the_fallback_counts_true_vectors_not_padding() -> None:
    # 1 row of 8 columns is one vector, though its codes are stored for 64 rows; 9 columns are two vectors.
    small = Rvq(stages=1, entries=1, max_rel_error=1, fallback=Mxfp4())
    assert chosen(small, with_shapes((1, 40), (1, 40), (1, 48)))[0] == Codec.RVQ
    assert chosen(small, with_shapes((1, 40), (1, 40), (1, 40)))[0] == Codec.MXFP4
    assert chosen(small, with_shapes((1, 40), (1, 40), (1, 41)))[0] == Codec.RVQ


def test_the_fallback_with_fewer_vectors_than_entries() -> None:
    codec, note = chosen(RVQ, with_shapes((5, 16), (5, 16), (16, 5)))
    assert codec == Codec.MXFP4
    assert note is not None
    assert "36 vectors cannot fill 256 entries" in note


def test_with_codebooks_a_matrix_the_smallest_decides() -> None:
    shapes = with_shapes((4096, 8), (4096, 8), (4095, 8))
    matrix = Rvq(stages=3, entries=256, codebooks="matrix", max_rel_error=0.25, fallback=Mxfp4())
    assert chosen(RVQ, shapes) == (Codec.RVQ, None)
    assert chosen(matrix, shapes)[0] == Codec.MXFP4
    assert chosen(matrix, with_shapes((4096, 8), (4096, 8), (4096, 8)))[0] == Codec.RVQ


def test_without_a_fallback_small_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="too small for rvq") as caught:
        chosen(Rvq(stages=3, entries=256, max_rel_error=0.25), ARCHITECTURE)
    assert "fallback" in (caught.value.hint or "")


def test_parameters_come_from_the_recipe() -> None:
    large = with_shapes((1024, 512), (1024, 512), (512, 1024))
    recipe = override(dataclass_recipe(RVQ), ["experts.stages=2", "experts.entries=16", "experts.codebooks=matrix"])
    assert expert_codec(recipe, large)[:2] == (Codec.RVQ, rvq.Parameters(stages=2, entries=16, scope="matrix"))
    recipe = override(dataclass_recipe(Mxfp4()), ["source.mxfp4_bias=125"])
    assert expert_codec(recipe, large)[:2] == (Codec.MXFP4, mxfp4.Parameters(bias=125))
    recipe = dataclass_recipe(GroupInt(bits=4, group=64, max_rel_error=0.2))
    assert expert_codec(recipe, large)[:2] == (Codec.GROUP_INT, group_int.Parameters(bits=4, group=64))
    dense = dataclasses.replace(large, expert_format="dense", expert_dtype="BF16")
    assert expert_codec(override(recipe, ["experts.codec=raw"]), dense)[:2] == (Codec.RAW, raw.Parameters("BF16"))


def test_record_lengths_by_hand() -> None:
    """97 x 100, 97 x 100 and 100 x 97: odd on purpose."""
    # mxfp4: scales of 97 x 4, 97 x 4 and 100 x 4 bytes, codes of 97 x 50, 97 x 50 and 100 x 49, each on a line of 64.
    lengths = [388, 4850, 388, 4850, 400, 4900]
    end = 1024
    for length in lengths:
        end = -(-end // 64) * 64 + length
    (bank, *_) = plan_layers(ARCHITECTURE, Codec.MXFP4, mxfp4.Parameters(), None)
    assert bank.records[0].bytes == -(-end // 4096) * 4096 == 20_480
    assert bank.bytes == 6 * 20_480
    # rvq: 2 codebooks of 16 entries; 2 blocks of 64 rows, 13 vectors a row, 2 stages.
    lengths = [2 * 16 * 16, 194, 2 * 13 * 2 * 64, 194, 2 * 13 * 2 * 64, 200, 2 * 13 * 2 * 64]
    end = 1024
    for length in lengths:
        end = -(-end // 64) * 64 + length
    (bank, *_) = plan_layers(ARCHITECTURE, Codec.RVQ, rvq.Parameters(stages=2, entries=16), None)
    assert bank.records[0].bytes == -(-end // 4096) * 4096


@pytest.mark.parametrize(
    ("folder", "setting", "hint"),
    [("k3-tiny", "experts.codec=raw", "source"), ("kimi-linear-tiny", "experts.codec=mxfp4", "source")],
)
def test_lossless_codecs_must_suit_the_source(
    source: dict[str, tuple[Checkpoint, Model]], folder: str, setting: str, hint: str
) -> None:
    checkpoint, model = source[folder]
    recipe = override(default_recipe(model.architecture.family), [setting])
    with pytest.raises(UsageError, match=r"experts\.codec") as caught:
        make_plan(checkpoint, model, recipe)
    assert hint in (caught.value.hint or "")


def test_a_recipe_for_another_family_is_refused(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    with pytest.raises(UsageError, match="another family"):
        make_plan(*source["k3-tiny"], default_recipe("kimi_linear"))


# --- trunk ----------------------------------------------------------------------------------------------------------


def test_pln_03_a_tensor_that_no_rule_takes(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    recipe = override(default_recipe("kimi_k3"), ['trunk.4.roles=["vision"]'])
    with pytest.raises(UsageError, match=r"mm_projector\.[a-z0-9_.]+: no rule") as caught:
        make_plan(*source["k3-tiny"], recipe)
    assert caught.value.exit_code == 2


def test_dropped_tensors_are_listed_with_their_rule(source: dict[str, tuple[Checkpoint, Model]]) -> None:
    checkpoint, model = source["k3-tiny"]
    plan = make_plan(checkpoint, model, override(default_recipe("kimi_k3"), ["trunk.4.codec=drop"]))
    names = [tensor.name for tensor in model.trunk if tensor.role.kind in ("vision", "projector")]
    assert [(item.name, item.rule) for item in plan.dropped] == [(name, 4) for name in names]
    assert plan.draft.coverage.dropped == len(names)
    assert [segment.name for segment in plan.segments][-1] == "output"
    assert any(f"dropped by rules of the recipe, {len(names)} tensors: {names[0]}" in note for note in plan.notes)
    assert {shard.name for shard in plan.draft.source.shards} <= {shard.name for shard in checkpoint.shards}
    assert decode(encode(plan.draft))[0] == plan.draft


def test_trunk_offsets_by_hand() -> None:
    recipe = Recipe(
        name="mine",
        families=("kimi_k3",),
        experts=Mxfp4(),
        trunk=(
            GroupIntRule(roles=("embedding",), bits=8, group=32, max_rel_error=1),
            GroupIntRule(roles=("attention",), bits=4, group=32, max_rel_error=1),
            DropRule(names=("*.unused",)),
            RawRule(names=("*",)),
        ),
    )
    trunk = (
        bound("embed", "embedding", 3, 70),
        bound("a", "attention", 5, 33, layer=0),
        bound("b", "norm", 7, layer=0, dtype="F32"),
        bound("b.unused", "norm", 7, layer=0),
        bound("c", "norm", 9, layer=1),
        bound("final", "norm", 2),
        bound("head", "head", 2, 2),
        bound("v", "vision", 2, 3, 4, 5),
        bound("p", "projector"),
        bound("?", "unknown", 1),
    )
    plan = plan_trunk(trunk, recipe, None)
    assert [(item.name, item.offset, item.bytes) for item in plan.segments] == [
        ("embedding", 4096, 4096),
        ("layer.0", 8192, 4096),
        ("layer.1", 12288, 4096),
        ("output", 16384, 4096),
        ("vision", 20480, 4096),
        ("projector", 24576, 4096),
        ("other", 28672, 4096),
    ]
    found = {item.name: (item.offset, item.bytes) for segment in plan.segments for item in segment.tensors}
    assert found == {
        "embed": (4096, 256 + 3 * 3 * 2),  # 210 bytes of codes, then on a line of 64 three scales a row
        "a": (8192, 128 + 5 * 2 * 2),  # 16 + 1 bytes a row: the second group has a single column
        "b": (8192 + 192, 28),
        "c": (12288, 18),
        "final": (16384, 4),
        "head": (16448, 8),
        "v": (20480, 240),
        "p": (24576, 2),
        "?": (28672, 2),
    }
    assert [(item.name, item.rule) for item in plan.dropped] == [("b.unused", 2)]
    assert plan.omitted == ()


def test_shp_06_a_convolution_is_not_taken_for_a_matrix() -> None:
    recipe = override(RECIPE, ["trunk.0.codec=group_int"])
    with pytest.raises(UsageError, match=r"patch.*no rule"):
        plan_trunk((bound("patch", "vision", 32, 3, 14, 14),), recipe, None)


def test_integers_are_not_quantised() -> None:
    recipe = override(RECIPE, ["trunk.0.codec=group_int"])
    with pytest.raises(UsageError, match=r"position_ids.*rule 0"):
        plan_trunk((bound("position_ids", "unknown", 4, 4, dtype="I32"),), recipe, None)


def test_shp_07_tensors_without_elements_take_no_segment() -> None:
    trunk = (
        bound("first", "embedding", 0, 8),
        bound("a", "norm", 5, layer=0),
        bound("b", "norm", 0, layer=1),
        bound("c", "norm", 2048, layer=2),
        bound("d", "unknown", 3, 0),
    )
    plan = plan_trunk(trunk, RECIPE, None)
    assert [(item.name, item.offset, item.bytes) for item in plan.segments] == [
        ("layer.0", 4096, 4096),
        ("layer.2", 8192, 4096),
    ]
    assert [(t.name, t.offset, t.bytes) for s in plan.segments for t in s.tensors] == [
        ("first", 4096, 0),
        ("a", 4096, 10),
        ("b", 4096 + 64, 0),
        ("c", 8192, 4096),
        ("d", 12288, 0),
    ]
    with pytest.raises(UsageError, match="without elements"):
        plan_trunk(trunk[:1], RECIPE, None)


def test_rules_are_not_asked_about_what_is_not_selected() -> None:
    recipe = override(RECIPE, ['trunk.0.names=["a"]'])
    trunk = (bound("a", "norm", 5, layer=0), bound("b", "norm", 5, layer=1), bound("c", "head", 2, 2))
    plan = plan_trunk(trunk, recipe, Selection(layers=(0,)))
    assert plan.omitted == ("b", "c")
    with pytest.raises(UsageError, match="b: no rule"):
        plan_trunk(trunk, recipe, Selection(layers=(0, 1)))


def test_qnt_10_memory_follows_the_largest_expert_not_their_number(
    source: dict[str, tuple[Checkpoint, Model]],
) -> None:
    plan = make_plan(*source["k3-small"], default_recipe("kimi_k3"))
    part = make_plan(*source["k3-small"], default_recipe("kimi_k3"), selection=Selection((1,), (0,)))
    assert plan.memory.per_job == part.memory.per_job
    assert plan.peak_memory_bytes < 256 << 20


@pytest.mark.parametrize(("folder", "recipe"), [("k3-small", "kimi-k3"), ("kimi-linear-tiny", "kimi-linear-lossless")])
def test_the_journal_keeps_to_its_bound(
    source: dict[str, tuple[Checkpoint, Model]], folder: str, recipe: str, tmp_path: Path
) -> None:
    plan = make_plan(*source[folder], load_recipe(recipe))
    digest, widest = "f" * 64, 1.2345678901234567e-300
    path = tmp_path / "journal"
    with open_or_create(path, plan.identity, system=Faults(fsync=lambda _fd: None).system) as journal:
        for shard in plan.draft.source.shards:
            journal.append(ShardSeen(shard.name, shard.bytes, digest, 1_700_000_000_123_456_789))
        for unit in plan.units:
            records = [RecordDone(r.expert, digest, (widest,) * 3, widest) for r in plan.records_of(unit)]
            tensors = [TensorDone(t.name, digest, digest, widest, -100) for t in plan.tensors_of(unit)]
            journal.append(UnitDone(unit.name, tuple(records), tuple(tensors)))
        for name in [*plan.unit_files, *(asset.path for asset in plan.draft.assets), "index.bin", "manifest.json"]:
            journal.append(FileBegun(name))
            journal.append(FileIntent(name, 1 << 50, digest))
            journal.append(FileDone(name, 1 << 50, digest))
        length = path.stat().st_size + reserve_path(path).stat().st_size
    assert 0.5 * length < plan.journal_bytes
    assert length <= plan.journal_bytes
    assert plan.peak_disk_bytes >= plan.container_bytes + length


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell the peak")
def test_peak_memory_is_kept(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.recipe.recipe import load_recipe
checkpoint = open_checkpoint(Path(sys.argv[1]))
model = bind(checkpoint)
plan = make_plan(checkpoint, model, load_recipe("kimi-k3"), jobs=2)
pack(checkpoint, model, plan, Path(sys.argv[2]), jobs=2)
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, plan.peak_memory_bytes)
"""
    arguments = [sys.executable, "-c", code, str(DATA / "k3-tiny"), str(tmp_path / "out.moepack")]
    done = subprocess.run(arguments, cwd=DATA.parents[1], capture_output=True, text=True, check=True, timeout=240)
    peak, planned = map(int, done.stdout.split())
    assert planned / 8 < peak <= planned
