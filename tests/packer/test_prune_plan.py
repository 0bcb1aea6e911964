"""The file of a prune plan: what people and programs write, and everything that is refused."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from formats.errors import UsageError
from packer.number_lists import MAX_LENGTH, parse_numbers
from packer.prune.plan import MAX_FILE_BYTES, LayerKeep, PrunePlan, prune_plan_bytes, read_prune_plan
from packer.recipe.pruned import Made
from tests.support.prunes import MADE, made_up_statistics, plan_for

DATA = Path(__file__).parent.parent / "data"
K3 = DATA / "k3-tiny"

TEXT = f"""
format = "moepack-prune-plan"
version = 1
[model]
family = "kimi_k3"
hidden_layers = 7
experts = 16
experts_per_token = 4
config_blake3 = "{"ab" * 32}"
[made]
by = "a person"   # with a comment
mode = 'by "hand"'
keep = "8"
sources = [
  "code",
  "prose",
]
[[layers]]
layer = 2
keep = "0-3,7"
lossless = "9,12-13"
[[layers]]
layer = 5
keep = ""
lossless = "0-15"
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_plan_by_hand(tmp_path: Path) -> None:
    plan = read_prune_plan(write(tmp_path, TEXT))
    assert (plan.model.family, plan.model.experts, plan.model.config_blake3) == ("kimi_k3", 16, "ab" * 32)
    assert plan.made == Made(by="a person", mode='by "hand"', keep="8", sources=("code", "prose"))
    assert plan.layers == (
        LayerKeep(2, (0, 1, 2, 3, 7), (9, 12, 13)),
        LayerKeep(5, (), tuple(range(16))),
    )


def test_written_and_read_again(tmp_path: Path) -> None:
    plan = plan_for(K3, {1: (0, 1, 2, 5), 6: range(16)}, {1: (4, 15)})
    path = write(tmp_path, prune_plan_bytes(plan))
    assert read_prune_plan(path) == plan
    assert plan.blake3 == blake3(path.read_bytes()).hexdigest()
    document = tomllib.loads(path.read_text())
    assert document["layers"] == [
        {"layer": 1, "keep": "0-2,5", "lossless": "4,15"},
        {"layer": 6, "keep": "0-15"},
    ]
    assert document["made"]["retained_saliency"] == MADE.retained_saliency
    assert list(document) == ["format", "version", "model", "made", "layers"]


def test_comments_and_blanks_do_not_make_another_plan(tmp_path: Path) -> None:
    plan = plan_for(K3, {1: (0, 1, 2, 5)}, made=None)
    path = write(tmp_path, b"# mine\r\n" + prune_plan_bytes(plan).replace(b"\n", b"  # x\r\n"))
    assert read_prune_plan(path) == plan
    assert read_prune_plan(path).blake3 == plan.blake3
    assert plan.blake3 != replace(plan, made=MADE).blake3
    assert plan.blake3 != plan_for(K3, {1: (0, 1, 2, 6)}, made=None).blake3


def test_a_plan_without_layers(tmp_path: Path) -> None:
    plan = PrunePlan(plan_for(K3, {}).model, None, ())
    assert read_prune_plan(write(tmp_path, prune_plan_bytes(plan))) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"moepack-prune-plan"', '"moepack"', "format: not a prune plan that this version reads"),
        ('format = "moepack-prune-plan"', "", "format: not a prune plan .* found nothing"),
        ("version = 1", "version = 2", "version: not a prune plan .*expected 1, found 2"),
        ("version = 1", "version = 1.0", "version: not a prune plan"),
        ("version = 1", "version = true", "version: not a prune plan"),
        ("[model]", "[model]\nsize = 1", "model.size: unknown key"),
        ("[made]", "[made]\nwhen = 2026-01-01", "made.when: unknown key"),
        ("layer = 2", "layer = 2\ndrop = 3", "layers.0.drop: unknown key"),
        ("[model]", "extra = 1\n[model]", "extra: unknown key"),
        ('family = "kimi_k3"', "", "model.family: key is absent"),
        ('keep = "0-3,7"', "", "layers.0.keep: key is absent"),
        ("experts = 16", "experts = 0", "model.experts: value is not allowed"),
        ("experts = 16", "experts = 99999999999", "model.experts: value is not allowed"),
        ("experts = 16", 'experts = "16"', "model.experts: value has the wrong type"),
        ("layer = 2", "layer = -1", "layers.0.layer: value is not allowed"),
        ("layer = 2", "layer = 4096", "layers.0.layer: value is not allowed"),
        ("ab" * 32, "ab" * 31, "model.config_blake3: value is not allowed"),
        ('keep = "0-3,7"', "keep = [0, 1]", "layers.0.keep: value has the wrong type"),
        ('by = "a person"', 'by = "a\\u0007"', "made.by: value is not allowed"),
        ('"code"', '"' + "c" * 300 + '"', "made.sources.*: value is not allowed"),
        ('keep = "8"', 'keep = "8"\nretained_saliency = 1.5', "made.retained_saliency: value is not allowed"),
        ('keep = "8"', 'keep = "8"\nretained_saliency = nan', "made.retained_saliency: value is not allowed"),
        ('keep = "8"', 'keep = "8"\nstatistics_blake3 = "x"', "made.statistics_blake3: value is not allowed"),
        ("layer = 5", "layer = 2", "layer 2: layers do not ascend, or one stands twice"),
        ("layer = 5", "layer = 1", "layer 1: layers do not ascend"),
        ("0-3,7", "0-3,16", "layer 2: keep: number is out of range .*expected 0 to 15, found 16"),
        ("0-3,7", "0-999999999", "keep: number is out of range"),
        ("0-3,7", "3-0", "keep: range runs backwards"),
        ("0-3,7", "7,0-3", "keep: numbers do not ascend, or one stands twice"),
        ("0-3,7", "0-3,3", "keep: numbers do not ascend"),
        ("0-3,7", "0-3,,7", "keep: not a list of numbers and ranges"),
        ("0-3,7", "0-3, 7", "keep: not a list of numbers"),
        ("0-3,7", "00", "keep: not a list of numbers"),
        ("0-3,7", "-1", "keep: not a list of numbers"),
        ("0-3,7", "٣", "keep: not a list of numbers"),
        ("9,12-13", "7,12", "layer 2: an expert stands in both lists .*found 7"),
        ("[[layers]]", "[layers]", "not TOML"),
        ("version = 1", "version = 1\nversion = 1", "not TOML"),
        ("version = 1", "version = ", "not TOML"),
        ("version = 1", "version = " + "1" * 5000, r"line 3: prune plan has a number or a key that is too long"),
        ("version = 1", "version = " + "[" * 5000, "prune plan has lists or tables that are nested too deeply$"),
    ],
)
def test_malformed(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = write(tmp_path, TEXT.replace(old, new, 1) if old != "layer = 2" else TEXT.replace("\nlayer = 2", "\n" + new))
    with pytest.raises(UsageError, match=message) as refused:
        read_prune_plan(path)
    assert str(path) in str(refused.value)
    assert "\n" not in refused.value.line()


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\x00" * 100, b"PK\x03\x04", b"{}", b"\x80\x02}q"])
def test_another_kind_of_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UsageError, match=r"not TOML|not a prune plan"):
        read_prune_plan(write(tmp_path, data))


def test_statistics_of_any_length_are_told_from_a_plan(tmp_path: Path) -> None:
    """Those of a large model are longer than any plan may be, and are named all the same."""
    path = tmp_path / "the stats"
    made_up_statistics(K3, path, labels={"code": 500})
    with path.open("r+b") as file:
        file.truncate(1 << 31)
    with pytest.raises(UsageError, match="this is a statistics file, not a prune plan") as refused:
        read_prune_plan(path)
    assert refused.value.hint == f"make a plan with moepack prune '{path}'"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at byte 6: prune plan is not TOML: not UTF-8$"):
        read_prune_plan(write(tmp_path, b"a = 1\n\xff"))


def test_bounds_come_before_the_parser(tmp_path: Path) -> None:
    """What a TOML parser makes of dotted keys grows with the square of them."""
    with pytest.raises(UsageError, match=r"line 1: prune plan has a key of too many parts .*expected at most 8 parts"):
        read_prune_plan(write(tmp_path, b"a" + b".a" * 100_000 + b" = 1"))
    with pytest.raises(UsageError, match="prune plan is too long"):
        read_prune_plan(write(tmp_path, b"#" * (MAX_FILE_BYTES + 1)))
    longest = b"".join(b"a%d.b.c.d.e.f.g.h = 1\n" % n for n in range(585)) + b"b = [" + b"[]," * 200_000 + b"]\n"
    assert len(longest) < MAX_FILE_BYTES
    with pytest.raises(UsageError, match="not a prune plan"):  # in seconds: a test that hangs is ended
        read_prune_plan(write(tmp_path, longest))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_prune_plan(tmp_path / "none")
    with pytest.raises(UsageError, match="not a regular file"):
        read_prune_plan(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        read_prune_plan(tmp_path / "pipe")


def test_lists_of_numbers() -> None:
    assert parse_numbers("", count=4, where="x") == ()
    assert parse_numbers("0,2-3", count=4, where="x") == (0, 2, 3)
    assert parse_numbers("5-5", count=6, where="x") == (5,)
    with pytest.raises(UsageError, match="list is too long"):
        parse_numbers("1" * (MAX_LENGTH + 1), count=4, where="x")


def test_a_plan_of_k3s_size(tmp_path: Path) -> None:
    """Every other expert of 92 layers: well within the limits."""
    stamp = plan_for(K3, {}).model
    layers = tuple(LayerKeep(n, tuple(range(0, 896, 2)), (1, 3)) for n in range(1, 93))
    plan = PrunePlan(msgspec.structs.replace(stamp, experts=896, hidden_layers=93), MADE, layers)
    assert len(prune_plan_bytes(plan)) < MAX_FILE_BYTES // 8
    assert read_prune_plan(write(tmp_path, prune_plan_bytes(plan))) == plan
