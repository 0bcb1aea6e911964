"""Packs with a prune plan: what stays is as it was, what goes is accounted for, and impossible plans are refused."""

from __future__ import annotations

import filecmp
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.container import expected_files, open_container
from formats.errors import Interrupted, UsageError
from formats.families import bind
from formats.layout import Codec, Matrix
from formats.manifest import FILE_NAME
from packer.commands import run
from packer.inspect.reading import inspect_layer, inspect_summary
from packer.inspect.views import Summary
from packer.planning.plan import Plan, make_plan
from packer.prune.plan import LayerKeep, prune_plan_bytes
from packer.recipe.recipe import recipe_from_builtins
from packer.verify.verify import verify
from tests.support import independent_reader as independent
from tests.support.model_checkpoints import SHAPES, write_model
from tests.support.prunes import MADE, packed, plan_for, planned, rotate_router
from tests.support.runs import run as run_model

DATA = Path(__file__).parent.parent / "data"
K3 = DATA / "k3-tiny"
SMALL = DATA / "k3-small"
LINEAR = DATA / "kimi-linear-tiny"

# Unequal numbers in the layers, first and last experts among the kept and among the dropped; layers 3 and 4 keep all.
KEEP = {1: (0, 3, 4, 7, 15), 2: (1, 2, 5, 6, 8, 14), 5: tuple(range(16)), 6: (12, 13, 14, 15)}
INTEGERS = ("experts.codec=group_int", "experts.bits=8", "experts.group=32")
RVQ = ("experts.entries=16", "experts.max_rel_error=1.0")


def router(layer: int) -> str:
    return f"language_model.model.layers.{layer}.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prune") / "whole.moepack"
    packed(K3, out, planned(K3))
    return out


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prune") / "pruned.moepack"
    packed(K3, out, planned(K3, prune=plan_for(K3, KEEP)))
    return out


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_identity_plan_changes_nothing_but_the_recorded_rule(whole: Path, tmp_path: Path) -> None:
    plan = planned(K3, prune=plan_for(K3, {n: range(16) for n in range(1, 7)}))
    packed(K3, tmp_path / "same", plan)
    before, after = tree(whole), tree(tmp_path / "same")
    manifest_before, manifest_after = (json.loads(files.pop(FILE_NAME)) for files in (before, after))
    assert before == after
    assert manifest_after["recipe"].pop("prune")["layers"][0] == {"layer": 1, "keep": "0-15", "lossless": ""}
    assert manifest_before.pop("container_id") != manifest_after.pop("container_id")
    assert manifest_before == manifest_after
    assert verify(tmp_path / "same", level="parity", source=K3).ok


def test_a_pruned_container_is_whole_and_what_its_source_says(pruned: Path) -> None:
    report = verify(pruned, level="parity", source=K3)
    assert report.problems == ()
    assert report.parity is not None
    assert report.parity.unaccounted == 0
    assert report.records_checked == 5 + 6 + 16 + 16 + 16 + 4
    with open_container(pruned) as container:
        manifest = container.manifest
        assert [info.experts for info in manifest.layers] == [5, 6, 16, 16, 16, 4]
        for info in manifest.layers:
            kept = KEEP.get(info.layer, tuple(range(16)))
            assert [row.source_expert for row in container.rows(info.layer)] == list(kept)
            assert [row.expert for row in container.rows(info.layer)] == list(range(len(kept)))
            assert info.dropped_experts == tuple(number for number in range(16) if number not in kept)
        dropped = 11 + 10 + 12
        assert manifest.coverage.dropped == 6 * dropped  # three matrices of codes and scales each
        assert manifest.coverage.omitted == 0
        assert manifest.partial is None
        with open_checkpoint(K3) as checkpoint:
            assert manifest.source.tensors == len(checkpoint.tensors)
            assert len(manifest.source.shards) == len(checkpoint.shards)


def test_kept_experts_and_routers_are_the_bytes_of_the_source(whole: Path, pruned: Path) -> None:
    """Records but for their numbers, decoded weights, router rows and correction biases, by two readers."""
    manifest = independent.read_manifest(pruned)
    with open_container(whole) as before, open_container(pruned) as after:
        for layer in range(1, 7):
            kept = list(KEEP.get(layer, range(16)))
            for name in (router(layer), router(layer).replace("weight", "e_score_correction_bias")):
                values = before.tensor_values(before.tensor(name))[kept]
                assert np.array_equal(after.tensor_values(after.tensor(name)), values)
                assert np.array_equal(independent.decode_tensor(pruned, manifest, name), values)
            for new, old in enumerate(kept):
                full, mine = before.record(layer, old), after.record(layer, new)
                assert mine.data[1024:] == full.data[1024:]
                assert replace(mine.header, expert=old) == full.header
                theirs = independent.decode_record(independent.read_record(pruned, manifest, layer, new))
                for matrix in Matrix:
                    assert np.array_equal(theirs[matrix], full.matrix(matrix))


def test_codebooks_follow_the_source_expert(tmp_path: Path) -> None:
    """An expert's rvq record is the same in a pruned container, whatever its new number; jobs change nothing."""
    packed(SMALL, tmp_path / "whole", planned(SMALL, *RVQ, layers="1"))
    plan = planned(SMALL, *RVQ, layers="1", prune=plan_for(SMALL, {1: (1, 4, 5, 8, 9, 10, 11)}))
    for jobs in (1, 3):
        packed(SMALL, tmp_path / f"jobs{jobs}", plan, jobs=jobs)
    assert tree(tmp_path / "jobs1") == tree(tmp_path / "jobs3")
    with open_container(tmp_path / "whole") as before, open_container(tmp_path / "jobs1") as after:
        assert after.manifest.partial is not None
        assert after.manifest.layers[0].experts == 7
        for row in after.rows(1):
            assert row.codec == Codec.RVQ
            full = before.record(1, row.source_expert)
            assert after.record(1, row.expert).data[1024:] == full.data[1024:]
    assert verify(tmp_path / "jobs1", level="parity", source=SMALL).ok


def test_a_mixed_layer_has_a_lossless_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prune = plan_for(SMALL, {1: (0, 2, 3, 7)}, {1: (1, 11), 2: tuple(range(12))})
    plan = planned(SMALL, *RVQ, layers="1-2", prune=prune)
    assert plan.expert_record_bytes is None
    out = tmp_path / "mixed"
    result = packed(SMALL, out, plan)
    assert result.over_limit == ()
    lengths = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert lengths == expected_files(plan.draft) | {FILE_NAME: plan.manifest_bytes}
    with open_container(out) as container:
        found = [(row.source_expert, row.codec.label, row.rel_error) for row in container.rows(1)]
        assert [(source, codec) for source, codec, _ in found] == [
            (0, "rvq"), (1, "mxfp4"), (2, "rvq"), (3, "rvq"), (7, "rvq"), (11, "mxfp4")
        ]  # fmt: skip
        assert [error == 0.0 for _, _, error in found] == [False, True, False, False, False, True]
        assert {row.codec for row in container.rows(2)} == {Codec.MXFP4}
        manifest = independent.read_manifest(out)
        for row in container.rows(1):
            theirs = independent.decode_record(independent.read_record(out, manifest, 1, row.expert))
            record = container.record(1, row.expert)
            assert all(np.array_equal(record.matrix(matrix), theirs[matrix]) for matrix in Matrix)
    report = verify(out, level="parity", source=SMALL)
    assert report.problems == ()
    assert report.parity is not None
    assert report.parity.exact_tensors >= 6 * 14
    summary = inspect_summary(out)
    assert isinstance(summary, Summary)
    assert summary.pruned is not None
    assert summary.codecs == {"mxfp4": 14, "rvq": 4}
    assert (summary.pruned.source_experts, summary.pruned.dropped, summary.pruned.lossless) == (24, 6, 14)
    assert run(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "pruned        6 of 24 experts dropped, 6 to 12 a layer kept, 14 of them lossless" in shown
    assert "as mxfp4 (14), rvq (4)" in shown
    assert "bits a weight, all codecs together" in shown


def test_lossless_experts_of_a_dense_source_are_raw(tmp_path: Path) -> None:
    prune = plan_for(LINEAR, {1: (0, 2, 3)}, {1: (1,)})
    packed(LINEAR, tmp_path / "out", planned(LINEAR, *INTEGERS, layers="1", prune=prune))
    with open_container(tmp_path / "out") as container:
        assert [row.codec.label for row in container.rows(1)] == ["group_int", "raw", "group_int", "group_int"]
    assert verify(tmp_path / "out", level="parity", source=LINEAR).ok


def test_plan_is_exact_to_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan``, ``pack --dry-run`` and the files agree, and both record the plan."""
    prune = plan_for(K3, KEEP, {3: (0, 1, 2, 3)})
    (tmp_path / "plan.toml").write_bytes(prune_plan_bytes(prune))
    options = ["--prune", str(tmp_path / "plan.toml"), "--json", "--jobs", "1"]
    assert run(["plan", str(K3), *options]) == 0
    said = json.loads(capsys.readouterr().out)
    out = tmp_path / "out.moepack"
    assert run(["pack", str(K3), str(out), *options]) == 0
    done = json.loads(capsys.readouterr().out)
    assert said["container_bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert said["prune"] == done["prune"] == prune.blake3
    assert said["statistics"] is done["statistics"] is done["weighted_error"] is None
    assert said["experts"] == done["experts"] == 5 + 6 + 4 + 16 + 16 + 4
    assert said["recipe"]["prune"]["made"]["mode"] == MADE.mode
    assert said["banks"][0]["dropped_experts"] == [1, 2, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    assert done["pruned"] == {"source_experts": 96, "dropped": 45, "kept_min": 4, "kept_max": 16, "lossless": 0 + 51}
    assert run(["pack", str(K3), str(out), *options]) == 0
    assert json.loads(capsys.readouterr().out)["already_complete"]
    assert run(["plan", str(K3), *options[:2]]) == 0
    captured = capsys.readouterr()
    assert "note: pruned: 45 of 96 experts are dropped, 4 to 16 of 16 stay in a layer;" in captured.err
    assert "; the plan does not name layer 4, where all stay\n" in captured.err


def test_inspect_shows_what_was_dropped(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = inspect_layer(pruned, 1)
    assert view.dropped_experts == (1, 2, 5, 6, 8, 9, 10, 11, 12, 13, 14)
    assert [(record.expert, record.source_expert) for record in view.records] == list(enumerate(KEEP[1]))
    assert run(["inspect", str(pruned), "--layer", "1"]) == 0
    assert "without source experts 1-2,5-6,8-14" in capsys.readouterr().out
    assert run(["inspect", str(pruned)]) == 0
    assert "33 of 96 experts dropped, 4 to 16 a layer kept" in capsys.readouterr().out
    assert run(["inspect", str(pruned), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"]["prune"]["layers"][0] == {"layer": 1, "keep": "0,3-4,7,15", "lossless": ""}


def test_recorded_plan_is_enough_to_pack_again(pruned: Path, tmp_path: Path) -> None:
    """The recipe of the manifest, without the plan's file, gives the same container."""
    with open_container(pruned) as container:
        recipe = recipe_from_builtins(container.manifest.recipe, where="manifest.json")
    with open_checkpoint(K3) as checkpoint:
        packed(K3, tmp_path / "again", make_plan(checkpoint, bind(checkpoint), recipe))
    assert tree(tmp_path / "again") == tree(pruned)


# Interruption


def stopped_after(out: Path, plan: Plan, units: int) -> None:
    stop = threading.Event()
    seen: list[object] = []

    def progress(_: object) -> None:
        seen.append(None)
        if len(seen) > units:
            stop.set()

    with pytest.raises(Interrupted):
        packed(K3, out, plan, jobs=1, progress=progress, stop=stop)


def test_interrupted_and_continued_with_the_plan(pruned: Path, tmp_path: Path) -> None:
    plan = planned(K3, prune=plan_for(K3, KEEP))
    for units in (3, 12, 25):
        out = tmp_path / f"after{units}"
        stopped_after(out, plan, units)
        packed(K3, out, plan)
        comparison = filecmp.dircmp(out, pruned)
        assert tree(out) == tree(pruned), comparison.diff_files


def test_another_plan_on_resume_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped_after(out, planned(K3, prune=plan_for(K3, KEEP)), 12)
    with pytest.raises(UsageError, match="settings differ") as refused:
        packed(K3, out, planned(K3, prune=plan_for(K3, KEEP | {2: (1, 2, 5, 6, 8, 15)})))
    message = str(refused.value)
    assert 'recipe.prune.layers.1.keep was "1-2,5-6,8,14", is "1-2,5-6,8,15"' in message
    assert "recipe.prune.blake3 was" in message
    with pytest.raises(UsageError, match=r"recipe\.prune.* is absent"):
        packed(K3, out, planned(K3))
    finished = tmp_path / "finished"
    packed(K3, finished, planned(K3, prune=plan_for(K3, KEEP)))
    with pytest.raises(UsageError, match=r"finished container of another recipe: recipe\.prune.* is absent"):
        packed(K3, finished, planned(K3))


# Refusals


def test_too_few_experts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"layer 2: fewer experts stay than a token uses .*expected 4, found 3"):
        planned(K3, prune=plan_for(K3, {2: (0, 5)}, {2: (3,)}))
    planned(K3, prune=plan_for(K3, {2: (0, 5)}, {2: (3, 4)}))


@pytest.mark.parametrize(("layer", "experts"), [(0, range(16)), (7, range(16)), (12, (0, 1, 2, 3))])
def test_layers_without_experts_are_refused(layer: int, experts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"layer {layer}: layer has no routed experts in this model"):
        planned(K3, prune=plan_for(K3, {layer: experts}))


def test_layers_that_stand_twice_are_refused() -> None:
    plan = plan_for(K3, {2: range(8)})
    with pytest.raises(UsageError, match="layer 2: layer stands twice"):
        planned(K3, prune=replace(plan, layers=plan.layers * 2))


def test_experts_out_of_range_are_refused() -> None:
    plan = replace(plan_for(K3, {}), layers=(LayerKeep(1, tuple(range(10, 20))),))
    with pytest.raises(UsageError, match=r"layer 1: keep: number is out of range .*expected 0 to 15, found 19"):
        planned(K3, prune=plan)


@pytest.mark.parametrize(
    "change",
    [{"family": "kimi_linear"}, {"hidden_layers": 8}, {"experts": 17}, {"experts_per_token": 2},
     {"config_blake3": "ab" * 32}],
)  # fmt: skip
def test_plan_of_another_model_is_refused(change: dict[str, object]) -> None:
    plan = plan_for(K3, KEEP)
    other = replace(plan, model=msgspec.structs.replace(plan.model, **change))
    with pytest.raises(UsageError, match=f"{next(iter(change))}: prune plan of another model"):
        planned(K3, prune=other)


def test_plan_and_selected_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_bytes(prune_plan_bytes(plan_for(K3, KEEP)))
    options = ["--prune", str(tmp_path / "plan.toml"), "--experts", "0-3"]
    assert run(["plan", str(K3), *options]) == 2
    assert "--experts: a prune plan says already which experts stay" in capsys.readouterr().err
    assert run(["pack", str(K3), str(tmp_path / "out"), "--prune", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_recipe_does_not_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = (Path(__file__).parent.parent.parent / "recipes" / "kimi-k3.toml").read_text()
    for table in ("prune", "statistics"):
        (tmp_path / "mine.toml").write_text(f'{recipe}\n[{table}]\nblake3 = "{"ab" * 32}"\n')
        assert run(["plan", str(K3), "--recipe", str(tmp_path / "mine.toml")]) == 2
        assert f"mine.toml: {table}: a recipe does not say {table}" in capsys.readouterr().err
    assert run(["plan", str(K3), "--set", "prune.blake3=x"]) == 2
    assert "unknown key" in capsys.readouterr().err


GROUPS = DATA / "transformers-groups"  # 12 experts in 4 groups of 3, of which a token uses 2; 4 experts a token


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ((0, 1, 3, 4, 6, 7, 9, 10), None),
        ((1, 2, 4, 5, 6, 8, 9, 11), None),
        ((0, 1, 2, 3, 4, 6, 7, 9, 10), r"must all keep equally many .*expected 4 groups alike, found 2 to 3 kept"),
        ((0, 1, 2, 3, 4, 5, 6, 7, 8), r"must all keep equally many .*found 0 to 3 kept in a group of 3"),
        ((0, 3, 6, 9), r"keep too few .*expected 2 of 3 in each.*found 1"),
    ],
)
def test_groups_of_experts_are_kept_whole(keep: tuple[int, ...], message: str | None) -> None:
    plan = plan_for(GROUPS, {1: keep})
    if message is None:
        assert len(planned(GROUPS, prune=plan).layers[0].records) == len(keep)
        return
    with pytest.raises(UsageError, match=message):
        planned(GROUPS, prune=plan)


def test_weights_that_are_shares_of_all_experts_cannot_be_pruned(tmp_path: Path) -> None:
    """A softmax over all experts, not divided by the sum of the chosen ones."""
    shape = SHAPES["k3-latent-without-norm"]
    source = write_model(tmp_path / "model", shape)
    plan = plan_for(source, {1: (0, 1, 2, 3, 4)})
    with pytest.raises(UsageError, match="layer 1: experts cannot be dropped: this router's weights are shares of all"):
        planned(source, prune=plan)
    planned(source, prune=plan_for(source, {1: range(9)}))


# What a pruned model computes


def without_dropped(source: Path, target: Path, keep: dict[int, tuple[int, ...]]) -> Path:
    """A copy of a checkpoint whose dropped experts have a correction bias far below any score."""
    shutil.copytree(source, target)
    with open_checkpoint(target) as checkpoint:
        for layer, kept in keep.items():
            (tensor,) = [
                item
                for name, item in checkpoint.tensors.items()
                if name.endswith(f"layers.{layer}.block_sparse_moe.gate.e_score_correction_bias")
            ]
            path = target / tensor.shard
            data = bytearray(path.read_bytes())
            values = np.frombuffer(data, "<f4", tensor.bytes // 4, tensor.offset)
            values[[number for number in range(len(values)) if number not in kept]] = -1e30
            path.write_bytes(data)
    return target


CASES = {
    "k3-tiny": (K3, {1: (0, 3, 4, 7, 15), 2: (1, 2, 5, 6, 8, 14), 6: (12, 13, 14, 15)}),
    "kimi-linear-tiny": (LINEAR, {1: (2, 3, 5, 7, 11, 13), 3: (0, 1, 14, 15)}),
    "groups": (GROUPS, {1: (0, 2, 3, 4, 6, 7, 10, 11), 3: (1, 2, 3, 5, 7, 8, 9, 10)}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_pruned_model_chooses_as_the_full_one_without_the_dropped_experts(case: str, tmp_path: Path) -> None:
    """Bit for bit; with its router's rows turned by one it does not."""
    source, keep = CASES[case]
    family = "kimi-k3" if case.startswith("k3") else "kimi-linear"
    packed(source, tmp_path / "out", planned(source, recipe=f"{family}-lossless", prune=plan_for(source, keep)))
    assert verify(tmp_path / "out", level="parity", source=source).ok
    ids = np.random.default_rng(0).integers(0, 96, 40).tolist()
    expected = run_model(without_dropped(source, tmp_path / "biased", keep), ids)
    found = run_model(tmp_path / "out", ids)
    assert np.array_equal(found.logits, expected.logits)
    for layer, kept in keep.items():
        assert np.array_equal(np.array(kept)[found.chosen[layer]], expected.chosen[layer])
    assert not np.array_equal(run_model(source, ids).logits, expected.logits)
    turned = run_model(rotate_router(tmp_path / "out", next(iter(keep))), ids)
    assert np.abs(turned.logits - expected.logits).max() > 0.01
