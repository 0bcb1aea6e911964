"""The command line: exit codes, one error line, one JSON document, and every command with awkward paths."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from formats import kernels
from formats.errors import FormatError, Interrupted, LimitError, MoepackError, UsageError
from formats.manifest import WORK_DIR
from packer import cli
from packer.commands import moepack, run
from packer.commands import pack as pack_command
from packer.commands.errors import guarded
from packer.commands.source import note_memory
from packer.output import make_output
from packer.storage.system import SYSTEM
from packer.verify.verify import verify
from runtime.machine import processors
from tests.support.containers import Forge, build_container

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
K3 = str(DATA / "k3-tiny")
COMMANDS = ("fetch", "plan", "pack", "verify", "inspect", "eval", "run", "bench", "calibrate", "prune", "demo")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_container(tmp_path / "model.moepack")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "tiny.moepack"
    assert run(["pack", K3, str(out), "--quiet", "--jobs", "1"]) == 0
    return out


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    return subprocess.run(
        [sys.executable, "-m", "packer", *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        check=False,
        **options,
    )


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(item): (item.lstat().st_size, item.lstat().st_mtime_ns) for item in [directory, *directory.rglob("*")]}


# Help and usage


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"  moepack {command} " in shown
    assert [line.split()[0] for line in shown[shown.index("Exit codes:") :].splitlines()[1:]] == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "130",
    ]


def test_help_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    assert run(["--version"]) == 0
    assert "0.1.0" in capsys.readouterr().out
    assert run([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err[:6]) == ("", "Usage:")
    assert tuple(moepack.commands) == COMMANDS
    listed = shown[shown.index("Commands:") : shown.index("Exit codes:")]
    assert not [line for line in listed.splitlines() if line.endswith("...") and "fetch" not in line]
    assert "  moepack pack checkpoint/ model.moepack\n" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["verify"],
        ["verify", "x", "--wat"],
        ["verify", ""],
        ["verify", "x", "y"],
        ["verify", "x", "--level", "deep"],
        ["verify", "x", "--jobs", "0"],
        ["inspect", "x", "--layer", "-1"],
        ["inspect", "x", "--matrix", "middle"],
        ["pack", K3],
    ],
)
def test_cli_06_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Even where there is no such container: 2, one line, and where to read on."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, hint = captured.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: moepack")


def test_cli_06_a_deeper_option_needs_the_one_above(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(path), "--expert", "5"]) == 2
    assert "hint: add --layer N" in capsys.readouterr().err
    assert run(["inspect", str(path), "--layer", "1", "--matrix", "up"]) == 2
    assert "hint: add --layer N --expert M" in capsys.readouterr().err
    assert run(["inspect", str(path), "--layer", "9"]) == 2
    assert run(["inspect", str(path), "--layer", "1", "--expert", "4"]) == 2


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("absent/folder/deep", None),
        (f"{K3}/config.json", "with its config.json"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "pack", "verify"])
def test_a_source_that_is_no_directory(
    command: str, source: str, hint: str | None, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {"plan": [source], "pack": [source, str(tmp_path / "out")], "verify": [str(path), "--source", source]}[
        command
    ]
    assert run([command, *rest]) == 2
    error = capsys.readouterr().err
    assert source in error
    assert hint is None or hint in error


def test_verify_takes_a_folder_and_says_how_to_have_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan`` and ``pack`` take a repository's name; they are tested in test_staging.py."""
    assert run(["verify", str(path), "--source", "moonshotai/Kimi-K3"]) == 2
    assert "moepack fetch moonshotai/Kimi-K3" in capsys.readouterr().err


def test_a_slip_in_the_name_of_a_folder_is_told_as_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "notes").write_text("")
    assert run(["verify", str(path), "--source", "models/k3"]) == 2
    assert "hint: models is a folder here and has no k3; a repository is fetched first" in capsys.readouterr().err
    for arguments in (["verify", str(path), "--source"], ["plan"]):
        assert run([*arguments, "notes/k3"]) == 2  # no repository either, for a file has the owner's name
        error = capsys.readouterr().err
        assert "no such directory" in error
        assert "fetch" not in error


# Exit codes


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (LimitError("too large", where="x"), 1, "error: x: too large"),
        (UsageError("no", hint="do this"), 2, "hint: do this"),
        (FormatError("bad\x1b", where="f", offset=3), 3, "error: f at byte 3: bad\\x1b"),
        (Interrupted("stopped"), 130, "hint: continue with: moepack pack 'a b' out"),
        (KeyboardInterrupt(), 130, "hint: start again with: moepack pack 'a b' out"),
        (click.Abort(), 130, "error: interrupted"),
        (MemoryError(), 4, "hint: use fewer --jobs"),
        (ZeroDivisionError("division\nby zero"), 4, "error: internal error: ZeroDivisionError: division\\nby zero"),
        (OSError(28, "No space left on device"), 4, "error: internal error: OSError: [Errno 28]"),
        (PermissionError(13, "Permission denied", "a\nb/x"), 4, "error: a\\nb/x: Permission denied\n"),
        (OSError(36, "File name too long", b"\xff"), 2, "error: \\xff: File name too long\n"),
        (RecursionError(), 4, "hint: --verbose shows where"),
    ],
)
def test_one_table_from_error_to_exit_code(
    raised: BaseException, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> int:
        raise raised

    arguments = ["pack", "a b", "out", "--restart"]
    assert guarded(make_output(), action, arguments) == code
    captured = capsys.readouterr()
    assert shown in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert all(line.startswith(("error: ", "hint: ")) for line in captured.err.splitlines())


def test_a_name_that_no_system_takes_is_no_internal_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / ("x" * 300))
    for arguments in (["plan", name], ["pack", K3, name], ["run", name, "x"]):
        assert run(arguments) == 2
        captured = capsys.readouterr().err
        assert f"error: {name}" in captured
        assert "internal error" not in captured


def test_tracebacks_need_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise ValueError("unforeseen \x1b[2J")

    assert guarded(make_output(verbose=True), action, []) == 4
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "\x1b" not in error
    assert error.startswith("error: internal error: ValueError: unforeseen \\x1b[2J\n")


def test_every_error_class_has_its_code() -> None:
    codes = {kind.__name__: kind.exit_code for kind in MoepackError.__subclasses__()}
    assert codes == {"UsageError": 2, "FormatError": 3, "LimitError": 1, "EnvironmentProblem": 4, "Interrupted": 130}


# verify


def test_verify_says_what_it_found(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "ok"
    assert captured.err == ""
    forge = Forge(path)
    forge.banks[3][-1] ^= 1
    forge.save(keep=("records",))
    assert run(["verify", str(path)]) == 1
    assert "problem    layer 3 expert 2: " in capsys.readouterr().out
    assert run(["verify", str(path), "--json", "--sample", "0.1"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["level"], document["left_out"]["records"]) == (False, "hashes", 7)
    assert document["problems"][0].keys() == {"where", "what"}


def test_verify_lists_all_problems_in_json_and_some_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(120):
        (path / "assets" / f"stray{number:03d}").write_bytes(b"")
    assert run(["verify", str(path), "--level", "structure"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("problem    ") == 10
    assert "and 110 more; --json lists all\n" in captured.out
    assert run(["verify", str(path), "--level", "structure", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 120


def test_verify_against_its_source(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tiny), "--source", K3, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["level"], document["source_tensors"], document["unaccounted"], document["problems"]) == (
        "parity",
        772,
        0,
        [],
    )
    assert document["experts"] == {"rel_error": {"mean": 0.0, "max": 0.0}}
    assert 0.1 < document["trunk"]["rel_error"]["max"] < 0.2
    assert run(["verify", str(tiny), "--source", K3, "--level", "structure"]) == 0
    assert "note: --source is not used at level structure" in capsys.readouterr().err
    assert run(["verify", str(tiny), "--level", "parity"]) == 2
    capsys.readouterr()
    assert run(["verify", str(tiny), "--source", str(DATA / "kimi-linear-tiny")]) == 1
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem ")]
    assert shown[0].startswith(
        "problem    source: not the source that the container was packed from: family kimi_linear,"
    )
    assert len(shown) == 10


def test_verify_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path)]) == 3
    assert "hint: make one with moepack pack" in capsys.readouterr().err
    (tmp_path / "experts").mkdir()
    assert run(["verify", str(tmp_path)]) == 3
    assert "hint: get manifest.json from where the container comes from" in capsys.readouterr().err
    (tmp_path / WORK_DIR).mkdir()
    assert run(["verify", str(tmp_path)]) == 3
    assert "hint: an interrupted pack continues" in capsys.readouterr().err
    (tmp_path / "file").write_bytes(b"")
    for name in ("absent", "file"):
        for command in (["verify"], ["inspect"], ["inspect", "--layer", "1"]):
            assert run([*command, str(tmp_path / name)]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_checkpoint_in_place_of_a_container(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, K3]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith("this is a checkpoint, not a container")
    assert hint == f"hint: make a container of it: moepack pack {K3} NAME.moepack"


def test_a_container_or_nothing_in_place_of_a_checkpoint(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", str(path), str(tmp_path / "out")]) == 3
    assert f"this is a container, not a checkpoint\nhint: moepack inspect {path}\n" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["plan", str(tmp_path / "empty")]) == 3
    assert f"error: {tmp_path / 'empty'}: not a checkpoint" in capsys.readouterr().err


def test_exit_codes_for_damage_are_told_apart(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "exit code 1, and each problem is named" in text
    assert "Exit code 3 means that nothing could be checked" in text
    (path / "manifest.json").write_bytes(b"{")
    assert run(["verify", str(path)]) == 3
    assert "hint: the container is too damaged to be checked" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0.01", "1%", " 1 %"])
def test_what_a_sample_left_out_is_said(share: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4, 4 and 3 records one each is looked at, and the last one."""
    assert run(["verify", str(path), "--sample", share]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert line == (
        "left out   7 of 11 expert records: layer 1 experts 0-1,3; layer 2 experts 0-1,3; layer 3 experts 0"
    )


@pytest.mark.parametrize("share", ["lots", "", "%", "1%%", "1 in 100"])
def test_cli_06_what_is_no_share_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where there is no such container."""
    assert run(["verify", "x", "--sample", share]) == 2
    assert f"error: --sample: not a share (expected 0.01 or 1%, found {share!r})" in capsys.readouterr().err


def test_cli_03_names_from_files_are_escaped(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "x\x1b]0;owned\x07\n[red]y[/red]"
    forge = Forge(path)
    forge.document["tensors"][0]["name"] = evil
    forge.document["architecture"]["name"] = evil
    forge.document["recipe"]["summary"] = evil
    forge.document["recipe"]["families"] = [evil]
    forge.document["tensors"][0]["rel_error"] = 0.9
    forge.save_manifest()
    (path / "assets" / "a\x1b[2J").write_bytes(b"")
    for arguments in (
        ["inspect"],
        ["inspect", "--layer", "1"],
        ["verify"],
        ["inspect", "--json"],
        ["verify", "--json"],
    ):
        run([arguments[0], str(path), *arguments[1:], "--verbose"])
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        assert "\x07" not in captured.out + captured.err
        if arguments in (["inspect"], ["verify"]):
            assert "\\x1b]0;owned\\x07\\n[red]y[/red]" in captured.out


# inspect


def test_inspect_fits_one_screen(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tiny)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    for word in ("container", "format", "source", "recipe", "experts", "bits a weight", "expert errors", "trunk"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize(
    "options",
    [[], ["--layer", "2"], ["--layer", "2", "--expert", "1"], ["--layer", "2", "--expert", "1", "--matrix", "up"]],
)
def test_inspect_json_is_one_document(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(path), *options, "--json", "--verbose"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert f"kernels: {kernels.selection().name}" in captured.err
    assert run(["inspect", str(path), *options]) == 0
    assert capsys.readouterr().out


# plan


def test_plan_of_the_real_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K3 without a single shard: metadata is enough, and the sizes are those that the design states."""
    shutil.copy(DATA / "k3-metadata" / "config.json", tmp_path)
    index = gzip.decompress((DATA / "k3-metadata" / "model.safetensors.index.json.gz").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    before = snapshot(tmp_path)
    assert run(["plan", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["experts"], document["layers"], document["expert_record_bytes"]) == (82_432, 92, 12_419_072)
    assert document["expert_bytes"] == 82_432 * 12_419_072
    assert 982 << 30 < document["container_bytes"] < 986 << 30
    assert round(document["bits_per_weight"], 2) == 3.01
    assert "recipe kimi-k3, chosen for the family kimi_k3" in captured.err
    assert snapshot(tmp_path) == before


def test_plan_for_people_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", K3, "--set", "experts.codec=group_int", "--set", "experts.bits=4", "--layers", "1-2"]) == 0
    captured = capsys.readouterr()
    assert "32 in 2 layers as group_int" in captured.out
    assert "note: partial container: layers 1-2" in captured.err
    assert re.search(r"\ntime         about [0-9]+ (s|min) .*\(measured on", captured.out)
    assert "note: limit of experts: 0.25 -> 0.2, usual for 4 bits" in captured.err
    assert "recipe       kimi-k3+set: changed: experts.codec=group_int, experts.bits=4" in captured.out
    assert all(line == line.rstrip() for line in captured.out.splitlines())
    assert run(["plan", K3, "--layers", "0"]) == 0
    assert "experts      no experts in this selection\n" in capsys.readouterr().out
    assert run(["plan", K3, "--layers", "1", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    assert "in 1 layer as" in captured.out
    assert "with 1 job\n" in captured.out
    assert run(["plan", str(DATA / "k3-small"), "--layers", "1"]) == 0
    assert "bits a weight, codebooks, scales and padding included\n" in capsys.readouterr().out
    assert run(["plan", K3, "--recipe", "absent"]) == 2
    assert run(["plan", K3, "--recipe", "kimi-linear"]) == 2
    assert run(["plan", K3, "--set", "experts.stages"]) == 2
    assert run(["plan", K3, "--layers", "9-3"]) == 2
    assert run(["plan", str(DATA)]) == 3


# pack


def test_pack_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.moepack"
    arguments = [
        "pack",
        K3,
        str(out),
        "--recipe",
        "kimi-k3-lossless",
        "--layers",
        "1",
        "--repository",
        "org/name",
        "--commit",
        "abc",
    ]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    report = verify(out, level="parity", source=K3)
    assert report.ok
    assert document["container_id"] == report.container_id
    assert document["container_bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert (document["already_complete"], document["over_limit"]) == (False, [])
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert "complete already; its bytes were not checked again\n" in captured.err
    assert report.container_id in captured.out
    assert f"hint: moepack verify {shlex.quote(str(out))} --source " in captured.err
    assert run(["inspect", str(out), "--json"]) == 0
    source = json.loads(capsys.readouterr().out)["source"]
    assert (source["repository"], source["commit"]) == ("org/name", "abc")
    before = snapshot(out)
    assert run([*arguments, "--restart", "--json"]) == 0
    assert "a finished container is never overwritten, remove it first" in capsys.readouterr().err
    assert snapshot(out) == before
    assert run([*arguments, "--commit", "other"]) == 2


def test_pack_over_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """QNT-05: exit code 1, the worst named, and the container is there to be looked at."""
    settings = ["--set", "experts.codec=group_int", "--set", "experts.bits=4", "--set", "experts.max_rel_error=0.001"]
    assert run(["pack", K3, str(tmp_path / "out"), *settings, "--layers", "1", "--experts", "0"]) == 1
    captured = capsys.readouterr()
    assert "over limit    layer 1 expert 0" in captured.out
    assert f"remove {tmp_path / 'out'} or choose another output before packing again" in captured.err
    assert run(["verify", str(tmp_path / "out"), "--level", "structure"]) == 1


def test_pln_04_a_dry_run_changes_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    long = tmp_path / ("y" * 250)  # a name that a container can have, and a staging folder beside it cannot
    for out in (empty, long, tiny):
        before = snapshot(out.parent)
        assert run(["pack", K3, str(out), "--dry-run", "--json"]) == 0
        assert snapshot(out.parent) == before
        document = json.loads(capsys.readouterr().out)
        assert document["already_complete"] == (out == tiny)
    assert document["container_bytes"] == sum(file.stat().st_size for file in tiny.rglob("*") if file.is_file())
    assert run(["pack", K3, f"{K3}/inside", "--dry-run"]) == 2


def test_pln_05_a_dry_run_compares_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules[pack_command.callback.__module__]  # type: ignore[union-attr]
    full = dataclasses.replace(SYSTEM, available=lambda path: 1000)
    monkeypatch.setattr(module, "check_space", functools.partial(module.check_space, system=full))
    assert run(["pack", K3, str(tmp_path / "out"), "--dry-run"]) == 4
    captured = capsys.readouterr()
    assert "not enough space" in captured.err
    assert "container " in captured.out  # the plan is shown all the same
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_output_that_cannot_be_written(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    assert run(["pack", K3, str(tmp_path / "out"), *more]) == 4
    assert f"{tmp_path}: cannot create files here: not permitted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pln_06_fewer_jobs_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    available = [0]
    module = sys.modules[pack_command.callback.__module__]  # type: ignore[union-attr]
    monkeypatch.setattr(module, "available_memory", lambda: available[0])
    arguments = ["pack", K3, str(tmp_path / "out"), "--layers", "1", "--experts", "0", "--jobs", "64"]
    assert run(arguments) == 4
    assert "not enough memory for one job" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(["plan", K3, "--layers", "1", "--experts", "0", "--jobs", "3", "--json"]) == 0
    available[0] = json.loads(capsys.readouterr().out)["peak_memory_bytes"]
    assert run(arguments) == 0
    assert "3 jobs instead of 64" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan", K3], ["pack", K3, "out", "--dry-run"]])
def test_a_plan_says_how_many_jobs_memory_allows(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note and no more: the document is the same wherever it is made."""
    monkeypatch.chdir(tmp_path)
    available: list[int | None] = [None]
    monkeypatch.setattr(sys.modules[note_memory.__module__], "available_memory", lambda: available[0])
    found = {}
    for name, count in (("unknown", None), ("one job short", 3), ("nothing", 0)):
        if count is not None:
            document = json.loads(found["unknown"][0])
            memory = document["peak_memory_bytes"] - 1 if count else 0
            available[0] = memory
        assert run([*command, "--jobs", "4", "--json"]) == 0
        captured = capsys.readouterr()
        found[name] = captured.out, captured.err
    assert found["unknown"][0] == found["one job short"][0] == found["nothing"][0]
    assert "memory" not in found["unknown"][1]
    assert "note: 3 jobs of 4 would fit into the memory that is available here" in found["one job short"][1]
    assert "note: not enough memory for one job" in found["nothing"][1]


# Paths, locales, streams


@pytest.mark.parametrize("name", ["with blank", "é漢🙂", "-dash", "'quote\"", "new\nline"])
def test_cli_08_awkward_paths(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command, as source and as container."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(K3, tmp_path / name / "source" if name != "-dash" else tmp_path / "-source")
    source = f"{name}/source" if name != "-dash" else "-source"
    out = f"{name}.moepack"
    assert run(["plan", "--json", "--", source]) == 0
    assert json.loads(capsys.readouterr().out)
    assert run(["pack", "--layers", "1", "--experts", "0", "--", source, out]) == 0
    captured = capsys.readouterr()
    [hint] = [line for line in captured.err.splitlines() if line.startswith("hint: ")]
    if name != "new\nline":
        typed = shlex.split(hint.removeprefix("hint: moepack "))
        assert run(typed) == 0
    assert run(["verify", f"--source={source}", "--", out]) == 0
    assert run(["inspect", "--json", "--", out]) == 0


def test_tok_04_utf8_under_a_c_locale(tmp_path: Path) -> None:
    path = build_container(tmp_path / "é漢🙂.moepack")
    (path / "stray é").write_bytes(b"")
    done = process("verify", str(path), environment={"LC_ALL": "C"})
    assert done.returncode == 1
    assert "problem    stray é: file that the manifest does not list" in done.stdout


def test_a_name_that_is_not_utf8(path: Path) -> None:
    os.close(os.open(os.fsencode(path) + b"/stray\xff", os.O_CREAT | os.O_WRONLY))
    done = process("verify", str(path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem    stray\\xff: file" in done.stdout
    assert json.loads(process("verify", str(path), "--json").stdout)["problems"][0]["where"] == "stray\udcff"


def test_nobody_reads_on(path: Path) -> None:
    """A closed pipe is no reason for a message."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "packer", "inspect", str(path), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (4, b"")


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--layer", "1"], ["--help"], ["inspect", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_that_takes_nothing(path: Path, arguments: list[str], unbuffered: str) -> None:
    """A closed pipe is met in silence and a full device with one line, wherever it is noticed; always 4."""
    command = [sys.executable, "-m", "packer", *arguments, *([str(path)] if arguments[0] == "inspect" else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (4, b"")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False)
        assert (done.returncode, done.stderr) == (4, b"error: cannot write the output: no space left on device\n")
        done = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 4


# Start-up


@pytest.mark.parametrize("name", ["formats", "recipes"])
def test_bld_05_another_package_of_the_same_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('wrong module ran')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from packer import cli;"
        f"sys.path.insert(0, {str(tmp_path)!r}); sys.exit(cli.main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 4
    assert f"another package called {name} is in the way" in done.stderr
    assert str(tmp_path / name) in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.parametrize("name", ["numpy", "packer.commands"])
def test_an_interruption_while_importing(tmp_path: Path, name: str) -> None:
    """The libraries take a moment to import, and that is when people notice that they mistyped."""
    code = f"""
import importlib.abc, sys
class Stub(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stub())
from packer import cli
sys.exit(cli.main(['--version']))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_our_own_packages_are_recognised() -> None:
    assert cli.find_intruder() is None
    assert processors() >= 1


def test_python_m_packer() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, "moepack, version 0.1.0\n")


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cli_05_pack_stops_and_continues(tmp_path: Path, number: signal.Signals) -> None:
    """WRT-07: the first signal ends the unit; the printed command continues; a second one would leave at once."""
    out = tmp_path / "out dir"
    arguments = [
        "pack",
        str(DATA / "k3-small"),
        str(out),
        "--layers",
        "1",
        "--jobs",
        "1",
        "--set",
        "experts.entries=64",
    ]
    started = subprocess.Popen(
        [sys.executable, "-m", "packer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    journal = out / WORK_DIR / "journal.jsonl"
    while not journal.exists() or b'"kind":"unit"' not in journal.read_bytes():
        assert started.poll() is None, started.communicate()
        time.sleep(0.02)
    started.send_signal(number)
    shown, error = started.communicate()
    assert (started.returncode, shown) == (130, "")
    assert "stopping; what is done stays" in error
    [line] = [line for line in error.splitlines() if line.startswith("hint: continue with: moepack ")]
    again = shlex.split(line.removeprefix("hint: continue with: moepack "))
    assert again == arguments
    done = process(*again, cwd=ROOT)
    assert done.returncode == 0
    assert re.search(r"continued: [0-9]+ units? done before", done.stderr)
    assert verify(out).ok


def test_cli_05_verify_interrupted(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packer.verify.verify.check_record", interrupt)
    assert run(["verify", str(path), "--jobs", "2"]) == 130
    assert f"hint: start again with: moepack verify {path} --jobs 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "ABSENT"],
        ["pack", "ABSENT", "out"],
        ["verify", "ABSENT"],
        ["inspect", "ABSENT"],
        ["run", "ABSENT", "hello"],
        ["eval", "ABSENT", "--ids", "1"],
        ["bench", "ABSENT"],
        ["calibrate", "ABSENT", "--ids", "x=1,2", "--out", "out.stats"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_absent_path_is_wrong_usage_everywhere(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([str(tmp_path / "absent") if item == "ABSENT" else item for item in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"error: {tmp_path / 'absent'}: no such directory" in captured.err.splitlines()[0]
    assert list(tmp_path.iterdir()) == []
