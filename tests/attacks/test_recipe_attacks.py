"""Recipes that make no sense or were written to do harm, each with the verdict of ``moepack plan --recipe``.

A recipe is the user's own file: what is wrong with it is wrong usage, exit code 2, and the key is named.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from packer.commands import run
from tests.support.checkpoints import write_checkpoint
from tests.support.packs import SMALL

SOUND = """\
name = "mine"
families = ["kimi_linear"]

[experts]
codec = "group_int"
bits = 8
group = 32
max_rel_error = 0.5

[[trunk]]
names = ["*_proj.weight"]
codec = "group_int"
bits = 4
group = 64
max_rel_error = 0.5

[[trunk]]
names = ["*"]
codec = "raw"
"""

USAGE = 2


@dataclass(frozen=True)
class Case:
    """A change of the text, and what must be said about it."""

    message: str
    change: Callable[[str], str | bytes]
    exit_code: int = USAGE


def swap(old: str, new: str) -> Callable[[str], str]:
    """Replace the first ``old``."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def whole(text: str | bytes) -> Callable[[str], str | bytes]:
    return lambda _: text


def experts(table: str) -> Callable[[str], str]:
    """Another table of the experts."""
    start, end = SOUND.index("[experts]"), SOUND.index("[[trunk]]")
    return lambda text: text[:start] + "[experts]\n" + table + "\n\n" + text[end:]


RVQ = 'codec = "rvq"\nstages = 3\nentries = 16\nmax_rel_error = 1.0'

CASES: dict[str, Case] = {
    # not TOML
    "empty": Case("name: key is absent", whole("")),
    "zeros": Case("recipe is not TOML", whole(bytes(100))),
    "JSON": Case("recipe is not TOML", whole('{"name": "mine"}')),
    "not UTF-8": Case("recipe is not TOML", lambda text: text.encode() + b"\nx = '\xff'\n"),
    "UTF-16": Case("recipe is not TOML", lambda text: text.encode("utf-16")),
    "byte order mark within": Case("recipe is not TOML", lambda text: b"\xef\xbb\xbf" * 2 + text.encode()),
    "cut in a string": Case("recipe is not TOML", lambda text: text[:10]),
    "key twice": Case("recipe is not TOML", swap("bits = 8", "bits = 8\nbits = 4")),
    "table twice": Case("recipe is not TOML", lambda text: text + "[experts]\n"),
    "two mebibytes": Case("recipe is too long .expected at most [0-9]+ bytes", lambda text: text + "#" * (2 << 20)),
    "bottomless list": Case(
        "recipe has lists or tables that are nested too deeply", swap("bits = 8", "bits = " + "[" * 6000)
    ),
    "bottomless keys": Case(
        "line 1: recipe has a key of too many parts", lambda text: ".".join("a" * 2000) + " = 1\n" + text
    ),
    "endless hexadecimal digits": Case("line 6: recipe has a number or a key that", swap("= 8", "= 0x" + "f" * 6000)),
    "endless digits": Case("recipe has a number or a key that is too long", swap("bits = 8", "bits = " + "9" * 6000)),
    # keys
    "unknown key": Case("surprise: unknown key", lambda text: "surprise = 1\n" + text),
    "unknown key of a rule": Case("trunk.1.*level: unknown key", lambda text: text + "level = 9\n"),
    "escape codes in a key": Case(r"unknown key", lambda text: '"\\u001b[31mred" = 1\n' + text),
    "no name": Case("name: key is absent", swap('name = "mine"', "")),
    "no experts": Case(
        "experts: key is absent", lambda text: text[: text.index("[experts]")] + text[text.index("[[trunk]]") :]
    ),
    "no trunk": Case("trunk: key is absent", lambda text: text[: text.index("[[trunk]]")]),
    "name with a path": Case("name", swap('"mine"', '"../mine"')),
    "name of 65 letters": Case("name", swap('"mine"', f'"{"x" * 65}"')),
    "name with a newline": Case("name", swap('"mine"', '"mi\\nne"')),
    "families empty": Case("families", swap('["kimi_linear"]', "[]")),
    "family of another": Case(
        "recipe is for another family .expected kimi_linear, found kimi_k3", swap("kimi_linear", "kimi_k3")
    ),
    "trunk is a table": Case("trunk", lambda text: text[: text.index("[[trunk]]")] + '[trunk]\ncodec = "raw"\n'),
    "1001 rules": Case("trunk", lambda text: text + '[[trunk]]\nnames = ["*"]\ncodec = "raw"\n' * 1000),
    # types and ranges
    "bits of 5": Case("experts.bits.*expected 4 or 8, found 5", swap("bits = 8", "bits = 5")),
    "bits as text": Case("experts.bits", swap("bits = 8", 'bits = "8"')),
    "bits true": Case("experts.bits", swap("bits = 8", "bits = true")),
    "bits real": Case("experts.bits", swap("bits = 8", "bits = 8.0")),
    "bits a date": Case("experts.bits", swap("bits = 8", "bits = 2026-01-01")),
    "group of 0": Case("experts.group", swap("group = 32", "group = 0")),
    "group of 33": Case("experts.group", swap("group = 32", "group = 33")),
    "group of 2^63": Case("experts.group", swap("group = 32", f"group = {1 << 63}")),
    "group below zero": Case("experts.group", swap("group = 32", "group = -32")),
    "limit is no number": Case("experts.max_rel_error", swap("0.5", "nan")),
    "limit infinite": Case("experts.max_rel_error", swap("0.5", "inf")),
    "limit below zero": Case("experts.max_rel_error", swap("0.5", "-0.5")),
    "limit absent": Case("experts.max_rel_error: key is absent", swap("max_rel_error = 0.5\n", "")),
    "seed of 2^64": Case(
        "fitting.seed|not TOML", lambda text: text.replace("[experts]", f"[fitting]\nseed = {1 << 64}\n[experts]", 1)
    ),
    "seed below zero": Case(
        "fitting.seed", lambda text: text.replace("[experts]", "[fitting]\nseed = -1\n[experts]", 1)
    ),
    "effort unknown": Case(
        "fitting.effort.*expected fast, default or max",
        lambda text: text.replace("[experts]", '[fitting]\neffort = "all"\n[experts]', 1),
    ),
    "bias of 0": Case(
        "source.mxfp4_bias", lambda text: text.replace("[experts]", "[source]\nmxfp4_bias = 0\n[experts]", 1)
    ),
    # codecs
    "codec unknown": Case("experts.codec.*found 'zip'", experts('codec = "zip"')),
    "codec absent": Case("experts.codec", experts("bits = 8")),
    "stages of 5": Case("experts.stages", experts(RVQ.replace("stages = 3", "stages = 5"))),
    "qnt-08 entries of 0": Case("experts.entries", experts(RVQ.replace("entries = 16", "entries = 0"))),
    "qnt-08 entries of 300": Case("experts.entries", experts(RVQ.replace("entries = 16", "entries = 300"))),
    "codebooks of a layer": Case(
        "experts.codebooks.*expected expert or matrix", experts(RVQ + '\ncodebooks = "layer"')
    ),
    "fallback of rvq": Case("experts.fallback", experts(RVQ + "\n[experts.fallback]\n" + RVQ)),
    "mxfp4 for dense experts": Case(
        "mxfp4 copies MXFP4 bytes, which this checkpoint's experts do not have", experts('codec = "mxfp4"')
    ),
    "raw with a limit": Case("experts.max_rel_error: raw is lossless", experts('codec = "raw"\nmax_rel_error = 0.1')),
    "drop experts": Case("experts.codec", experts('codec = "drop"')),
    # rules
    "rule for nothing": Case("trunk.0.*neither roles nor names", swap('names = ["*_proj.weight"]\n', "")),
    "rule of an unknown role": Case(
        "trunk.0.roles: unknown role 'wheel'", swap('names = ["*_proj.weight"]', 'roles = ["wheel"]')
    ),
    "rule of no rank": Case("trunk.1.ranks", lambda text: text + "ranks = []\n"),
    "rule of rank 9": Case("trunk.1.ranks", lambda text: text + "ranks = [9]\n"),
    "integers of rank 3": Case("trunk.0.ranks", swap("bits = 4", "bits = 4\nranks = [3]")),
    "pln-03 nobody takes a tensor": Case(
        "no rule of recipe mine takes this tensor", swap('names = ["*"]', 'names = ["nothing"]')
    ),
    "pattern that backtracks": Case(
        "trunk.1.names: a pattern has more than 8 stars", swap('names = ["*"]', f'names = ["{"*a" * 60}*zz"]')
    ),
    "pattern of 5000 letters": Case("trunk.1.names", swap('names = ["*"]', f'names = ["{"x" * 5000}"]')),
    "pattern with a broken set": Case(
        "no rule of recipe mine takes this tensor", swap('names = ["*"]', 'names = ["[!"]')
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), SMALL)


def plan(source: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = run(["plan", str(source), "--recipe", str(recipe)])
    return code, "".join(capsys.readouterr())


def test_the_recipe_is_sound_before(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(SOUND)
    code, text = plan(source, tmp_path / "mine.toml", capsys)
    assert code == 0, text


@pytest.mark.parametrize("case", list(CASES))
def test_recipe(case: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = CASES[case]
    text = wanted.change(SOUND)
    assert text != SOUND
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    began = time.process_time()
    code, printed = plan(source, path, capsys)
    assert time.process_time() - began < 60, "no input may hang it"
    assert "internal error" not in printed, printed
    assert "\x1b[31m" not in printed
    assert re.search(wanted.message, printed), printed
    assert code == wanted.exit_code, printed
