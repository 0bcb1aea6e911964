"""What a verifier finds in containers that lack experts: every lie about what was dropped, kept, or put where."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.errors import FormatError
from formats.layout import Codec
from packer.verify.verify import VerifyReport, verify
from runtime.session import Options, open_session
from tests.support.containers import INT8, RVQ_EXPERT, Forge, Layer, Spec, build_container
from tests.support.prunes import packed, plan_for, planned

K3 = Path(__file__).parent.parent / "data" / "k3-tiny"
KEEP = {1: (0, 3, 4, 7, 15), 2: (1, 2, 5, 6, 8, 14)}
LOSSLESS = {1: (5,)}
GATE = "language_model.model.layers.{}.block_sparse_moe.gate.{}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts as 8-bit integers, one of them lossless."""
    out = tmp_path_factory.mktemp("prune") / "pruned.moepack"
    settings = ["experts.codec=group_int", "experts.bits=8", "experts.group=32"]
    packed(K3, out, planned(K3, *settings, prune=plan_for(K3, KEEP, LOSSLESS)))
    return out


@pytest.fixture
def pruned(made: Path, tmp_path: Path) -> Forge:
    return Forge(Path(shutil.copytree(made, tmp_path / "copy")))


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(build_container(tmp_path / "model.moepack"))


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(problem.where, problem.what) for problem in report.problems]


def structure(forge: Forge) -> list[tuple[str, str]]:
    return found(verify(forge.save(), level="structure"))


def parity(forge: Forge) -> list[tuple[str, str]]:
    return found(verify(forge.save(), level="parity", source=K3))


def test_the_containers_are_sound(pruned: Forge, forge: Forge) -> None:
    assert parity(pruned) == []
    assert structure(forge) == []


def renumber(forge: Forge, layer: int, expert: int, source: int) -> None:
    forge.patch_row(layer, expert, 8, "<I", source)
    forge.patch_record(layer, expert, 24, "<I", source)


def test_source_expert_differs(forge: Forge, pruned: Forge) -> None:
    """Two experts of a layer that changed places, in rows and headers alike; names and counts stay right."""
    renumber(forge, 3, 1, 3)
    renumber(forge, 3, 2, 2)
    assert structure(forge) == [
        ("layer 3 expert 1", "holds another source expert than its number stands for (expected 2, found 3)"),
        ("layer 3 expert 2", "holds another source expert than its number stands for (expected 3, found 2)"),
    ]
    renumber(pruned, 1, 0, 3)
    renumber(pruned, 1, 1, 0)
    problems = parity(pruned)
    assert (
        "layer 1 expert 0",
        "holds another source expert than its number stands for (expected 0, found 3)",
    ) in problems
    assert any(where == "layer 1 expert 0 gate" and what.startswith("source bytes differ") for where, what in problems)


def test_dropped_without_rule(forge: Forge, pruned: Forge) -> None:
    plan = forge.document["recipe"].pop("prune")
    assert structure(forge) == [("layer 3", "1 expert dropped, and no plan of the recipe says so")]
    forge.document["recipe"]["prune"] = plan | {"layers": [{"layer": 3, "keep": "0-1,3", "lossless": ""}]}
    assert structure(forge) == [
        ("layer 3", "dropped experts are not those that the recipe's plan drops (expected 2, found 1)")
    ]
    forge.document["recipe"]["prune"]["layers"].append({"layer": 1, "keep": "0-2"})
    assert ("layer 1", "dropped experts are not those that the recipe's plan drops (expected 3, found none)") in (
        structure(forge)
    )
    for layer in pruned.document["recipe"]["prune"]["layers"]:
        layer["keep"] = "0,3-4,7,15" if layer["layer"] == 1 else "0-15"
    assert structure(pruned) == [
        ("layer 2", "dropped experts are not those that the recipe's plan drops (expected none, found 0,3-4,7,9-13,15)")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [{"layer": 3, "keep": "0,2-4"}]}, "layer 3: keep: number is out of range"),
        ({"layers": [{"layer": 3, "keep": "0,2-3", "lossless": "3"}]}, "layer 3: an expert stands in both lists"),
        ({"layers": [{"layer": 3, "keep": "2-3,0"}]}, "layer 3: keep: numbers do not ascend"),
        ({"blake3": "x"}, "recipe: prune.blake3: value is not allowed"),
        ({"lossless_codec": "rvq"}, "recipe: prune.lossless_codec: unknown value"),
        ({"more": 1}, "recipe: prune.more: unknown key"),
    ],
)
def test_a_plan_that_cannot_be_read_is_a_finding(forge: Forge, change: dict[str, Any], message: str) -> None:
    forge.document["recipe"]["prune"] |= change
    assert any(message in f"{where}: {what}" for where, what in structure(forge))


def test_tier_differs(tmp_path: Path, pruned: Forge) -> None:
    """A lossless expert stored otherwise, and another one stored lossless."""
    prune = pruned.document["recipe"]["prune"]
    assert prune["lossless_codec"] == "mxfp4"
    prune["layers"][0] |= {"keep": "0,3,5,7,15", "lossless": "4"}
    assert structure(pruned) == [
        ("layer 1 expert 2", "is in another tier than the recipe's plan says (expected mxfp4, found group_int)"),
        ("layer 1 expert 3", "is in another tier than the recipe's plan says (expected group_int, found mxfp4)"),
    ]
    spec = Spec(layers={1: Layer((INT8, RVQ_EXPERT))}, hidden_layers=2, tensors=Spec().tensors[:4])
    lossless = {"blake3": "ab" * 32, "made": None, "lossless_codec": "raw"}
    lossless["layers"] = [{"layer": 1, "keep": "1", "lossless": "0"}]
    recipe = spec.recipe | {"prune": lossless}
    forge = Forge(build_container(tmp_path / "tiers", Spec(**{**vars(spec), "recipe": recipe})))
    assert ("layer 1 expert 0", "is in another tier than the recipe's plan says (expected raw, found group_int)") in (
        structure(forge)
    )


def swap_rows(forge: Forge, name: str, first: int, second: int) -> None:
    """Two rows of a stored router change places, and the digests follow."""
    info = forge.tensor(name)
    row = info["bytes"] // info["shape"][0]
    starts = [info["offset"] + number * row for number in (first, second)]
    one, other = (bytes(forge.trunk[start : start + row]) for start in starts)
    forge.trunk[starts[0] : starts[0] + row], forge.trunk[starts[1] : starts[1] + row] = other, one


@pytest.mark.parametrize("part", ["weight", "e_score_correction_bias"])
def test_router_rows_wrong(pruned: Forge, part: str) -> None:
    """Rows of kept experts in another order: every digest is right, and the source says otherwise."""
    name = GATE.format(2, part)
    swap_rows(pruned, name, 1, 4)
    pruned.save()
    digest = pruned.tensor(name)["blake3"]
    assert parity(pruned)[-1] == (name, "stored bytes differ from the source's")
    pruned.tensor(name)["source_blake3"] = digest
    assert structure(pruned) == []
    problems = parity(pruned)
    assert [where for where, _ in problems] == [name, name]
    assert problems[0][1].startswith("source bytes differ")


def test_router_rows_of_dropped_experts_are_not_taken_for_kept_ones(pruned: Forge) -> None:
    """Another expert is said to be dropped, everywhere but in the router."""
    info = pruned.layer(2)
    assert info["dropped_experts"][0] == 0
    assert pruned.row(2, 0).source_expert == 1
    info["dropped_experts"][0] = 1
    pruned.document["recipe"]["prune"]["layers"][1]["keep"] = "0,2,5-6,8,14"
    renumber(pruned, 2, 0, 0)
    wheres = {where for where, _ in parity(pruned)}
    assert {GATE.format(2, "weight"), GATE.format(2, "e_score_correction_bias"), "layer 2 expert 0 gate"} <= wheres


def test_router_rows_differ(tmp_path: Path) -> None:
    """A runtime refuses a router with a row too many or too few; so does a verifier that has the source."""
    out = tmp_path / "out"
    packed(K3, out, planned(K3, prune=plan_for(K3, KEEP)))
    with open_session(out, Options(context=8)):
        pass
    forge = Forge(out)
    info = forge.tensor(GATE.format(1, "e_score_correction_bias"))
    assert (info["dtype"], info["shape"], info["bytes"]) == ("F32", [5], 20)
    for rows in (4, 6, 16):
        info |= {"shape": [rows], "bytes": 4 * rows}
        forge.save()  # the line of 64 bytes that the tensor lies on has room for it
        with pytest.raises(FormatError, match=r"tensor has another shape .*expected \(5,\), found \(" + str(rows)):
            open_session(out, Options(context=8))
        assert any(
            where == info["name"] and "of which 5 rows are kept" in what
            for where, what in found(verify(out, level="parity", source=K3))
        )


def test_a_kept_expert_that_is_not_there(pruned: Forge) -> None:
    """A record of an expert that the plan keeps may not vanish by being called dropped."""
    pruned.document["coverage"]["dropped"] -= 1
    pruned.document["coverage"]["packed"] += 1
    assert ("manifest.json: coverage", "dropped is not the number of such tensors (expected 120, found 119)") in (
        structure(pruned)
    )


def test_codes_of_a_lossless_expert_are_compared_with_the_source(pruned: Forge) -> None:
    row = pruned.row(1, 3)
    assert (row.source_expert, row.codec) == (5, Codec.MXFP4)
    bank = pruned.banks[1]
    section = pruned.header(1, 3).sections[0]
    at = row.offset + section.offset
    bank[at] ^= 1
    start = row.offset + 320 + 32
    digest = blake3(bytes(bank[at : at + section.bytes])).digest()
    bank[start : start + 32] = digest
    assert struct.unpack_from("<I", bank, row.offset + 24) == (5,)
    assert any(where == "layer 1 expert 3 gate" for where, _ in parity(pruned))
