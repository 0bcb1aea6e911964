"""The pipeline as a whole: exact, reproducible, resumable, and careful with what stands in its way."""

import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from formats import kernels
from formats.checkpoint import open_checkpoint
from formats.container import expected_files, open_container
from formats.errors import EnvironmentProblem, FormatError, Interrupted, MoepackError, UsageError
from formats.families import bind
from formats.manifest import FILE_NAME, WORK_DIR
from packer.commands import run
from packer.pipeline import PackResult, pack
from packer.planning.plan import Plan, make_plan
from packer.planning.selection import parse_selection
from packer.preflight import JOURNAL_NAME, LOCK_NAME, check_begun
from packer.recipe.recipe import default_recipe, load_recipe, override
from packer.storage.lock import exclusive
from packer.storage.system import SYSTEM
from tests.support.checkpoints import write_checkpoint
from tests.support.specs import SPECS

DATA = Path(__file__).parent.parent / "data"
ROOT = Path(__file__).parent.parent.parent


def planned(source: Path, recipe: str | None = None, *settings: str, layers: str | None = None) -> Plan:
    checkpoint = open_checkpoint(source)
    model = bind(checkpoint)
    chosen = load_recipe(recipe) if recipe else default_recipe(model.architecture.family)
    return make_plan(
        checkpoint, model, override(chosen, settings), selection=parse_selection(layers, None, model.architecture)
    )


def packed(source: Path, out: Path, plan: Plan, **options: object) -> PackResult:
    checkpoint = open_checkpoint(source)
    return pack(checkpoint, bind(checkpoint), plan, out, **{"jobs": 2, **options})  # type: ignore[arg-type]


def identical(first: Path, second: Path) -> bool:
    """Whether two trees hold the same names and bytes, as ``diff -r`` sees it."""
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (first, second)]
    files = [name for name in names[0] if (first / name).is_file()]
    return names[0] == names[1] and all(filecmp.cmp(first / name, second / name, shallow=False) for name in files)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "tiny.moepack"
    packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny"), jobs=1)
    return out


@pytest.mark.parametrize("recipe", [None, "lossless"])
@pytest.mark.parametrize("name", ["k3-tiny", "kimi-linear-tiny"])
def test_planned_lengths_equal_the_written_ones(name: str, recipe: str | None, tmp_path: Path) -> None:
    """PLN-05: to the byte, file by file."""
    family = "kimi-k3" if name.startswith("k3") else "kimi-linear"
    plan = planned(DATA / name, recipe and f"{family}-{recipe}")
    out = tmp_path / "out.moepack"
    packed(DATA / name, out, plan)
    lengths = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert lengths == expected_files(plan.draft) | {FILE_NAME: plan.manifest_bytes}
    assert sum(lengths.values()) == plan.container_bytes


def test_jobs_do_not_change_a_byte(tiny: Path, tmp_path: Path) -> None:
    """NUM-01."""
    out = tmp_path / "two.moepack"
    packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny"), jobs=2)
    assert identical(tiny, out)


def test_another_folder_does_not_change_a_byte(tiny: Path, tmp_path: Path) -> None:
    """NUM-06: another path, other time stamps."""
    source = tmp_path / "elsewhere with blanks é"
    shutil.copytree(DATA / "k3-tiny", source)
    out = tmp_path / "-out"
    packed(source, out, planned(source))
    assert identical(tiny, out)


def test_rvq_bytes_do_not_depend_on_jobs(tmp_path: Path) -> None:
    plan = planned(DATA / "k3-small", None, "experts.entries=16", layers="1")
    for jobs in (1, 3):
        packed(DATA / "k3-small", tmp_path / f"jobs{jobs}", plan, jobs=jobs)
    assert identical(tmp_path / "jobs1", tmp_path / "jobs3")
    with open_container(tmp_path / "jobs1") as container:
        assert {row.codec.label for row in container.rows(1)} == {"rvq"}


def test_bytes_not_reproducible(tiny: Path, tmp_path: Path) -> None:
    """The rule of SPEC section 10 as one test: stopped after each unit and continued, with other jobs each time."""
    out = tmp_path / "out.moepack"
    plan = planned(DATA / "k3-tiny")
    stops = 0
    for attempt in range(200):
        stop = threading.Event()
        seen: list[int] = []

        def progress(
            report: object, stop: threading.Event = stop, seen: list[int] = seen, most: int = 3 + attempt
        ) -> None:
            seen.append(1)
            if len(seen) > most:
                stop.set()

        try:
            packed(DATA / "k3-tiny", out, plan, jobs=1 + attempt % 2, stop=stop, progress=progress)
        except Interrupted:
            stops += 1
            assert not (out / FILE_NAME).exists()
        else:
            break
    assert stops > 5
    assert identical(tiny, out)


def test_killed_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    """WRT-04 from outside: SIGKILL at several moments, then the same command until it is done."""
    plain, killed = tmp_path / "plain.moepack", tmp_path / "killed.moepack"
    command = [
        sys.executable,
        "-m",
        "packer",
        "pack",
        str(DATA / "k3-small"),
        "--layers",
        "1",
        "--set",
        "experts.entries=16",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(plain), "--jobs", "1", "--quiet"], env=environment, check=True, timeout=240)
    kills = 0
    for wanted in (1, 3, 6, 9):
        process = subprocess.Popen(
            [*command, str(killed), "--jobs", "2", "--quiet"], env=environment, stderr=subprocess.DEVNULL
        )
        journal = killed / WORK_DIR / JOURNAL_NAME
        while process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b'"kind":"unit"') >= wanted:
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
    subprocess.run([*command, str(killed), "--jobs", "2", "--quiet"], env=environment, check=True, timeout=240)
    assert kills >= 3
    assert identical(plain, killed)


def test_finished_container_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    """WRT-12."""
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tiny.rglob("*")}
    result = packed(DATA / "k3-tiny", tiny, planned(DATA / "k3-tiny"))
    assert result.already_complete
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tiny.rglob("*")} == before


def test_finished_container_of_another_recipe_is_never_overwritten(tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"container of another recipe: recipe\.name was ") as caught:
        packed(DATA / "k3-tiny", tiny, planned(DATA / "k3-tiny", "kimi-k3-lossless"))
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"finished container of another source$"):
        packed(DATA / "k3-small", tiny, planned(DATA / "k3-small"))


def test_resume_with_another_recipe_lists_the_differences(tmp_path: Path) -> None:
    """WRT-10."""
    out = tmp_path / "out"
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny"), stop=stop)
    with pytest.raises(UsageError, match=r"fitting\.seed was 0, is 7"):
        packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny", None, "fitting.seed=7"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    check_begun(out, planned(DATA / "k3-tiny"))
    with pytest.raises(UsageError, match=r"fitting\.seed was 0, is 7"):
        check_begun(out, planned(DATA / "k3-tiny", None, "fitting.seed=7"))
    dry = ["pack", str(DATA / "k3-tiny"), str(out), "--dry-run", "--quiet"]
    assert [run(dry), run([*dry, "--effort", "fast"]), run([*dry, "--effort", "fast", "--restart"])] == [0, 2, 0]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert (
        packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny", None, "fitting.seed=7"), restart=True).resumed_units
        == 0
    )


def test_resume_with_changed_weights_is_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(DATA / "k3-tiny", source)
    count: list[int] = []
    stop = threading.Event()

    def progress(report: object) -> None:
        count.append(1)
        if len(count) > 12:
            stop.set()

    with pytest.raises(Interrupted):
        packed(source, out, planned(source), stop=stop, progress=progress)
    shard = source / "model-00002-of-000009.safetensors"
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UsageError, match="not the one that this output was begun with") as caught:
        packed(source, out, planned(source))
    assert caught.value.where == shard.name


def test_output_in_the_way(tmp_path: Path) -> None:
    """WRT-13 and PLN-08: nothing of the user's is touched."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "k3-tiny", source)
    plan = planned(source)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    cases = {
        full: "not empty",
        source: "is the source",
        source / "inside": "inside it",
        source / "model-00002-of-000009.safetensors": "not a directory",
        tmp_path: "contains the source",
        tmp_path / "link": "not a directory",
        tmp_path / "link" / "inside": "inside it",
        tmp_path / "no" / "such": "does not exist",
    }
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for out, fragment in cases.items():
        with pytest.raises(UsageError, match=fragment):
            packed(source, out, plan)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert (full / "thesis.tex").read_text() == "mine"


def test_second_pack_of_the_same_output_is_refused(tmp_path: Path) -> None:
    """WRT-08."""
    out = tmp_path / "out"
    (out / WORK_DIR).mkdir(parents=True)
    with exclusive(out / WORK_DIR / LOCK_NAME), pytest.raises(EnvironmentProblem, match="another process"):
        packed(DATA / "k3-tiny", out, planned(DATA / "k3-tiny"))


def test_too_little_space_is_seen_before_the_first_byte(tmp_path: Path) -> None:
    """PLN-01."""
    plan = planned(DATA / "k3-tiny")

    poor = replace(SYSTEM, available=lambda path: plan.container_bytes - 1)
    with pytest.raises(EnvironmentProblem, match="not enough space") as caught:
        packed(DATA / "k3-tiny", tmp_path / "out", plan, system=poor)
    assert caught.value.exit_code == 4
    assert str(plan.container_bytes - 1) in str(caught.value)


@pytest.mark.parametrize("layers", ["1", "0-2,6", "3"])
def test_partial_container_is_valid_and_says_so(layers: str, tmp_path: Path) -> None:
    """WRT-17."""
    plan = planned(DATA / "k3-tiny", layers=layers)
    packed(DATA / "k3-tiny", tmp_path / "out", plan)
    with open_container(tmp_path / "out") as container:
        assert container.manifest.partial is not None
        chosen = set(container.manifest.partial.layers)
        assert {tensor.layer for tensor in container.manifest.tensors} == chosen
        assert {info.layer for info in container.manifest.layers} == chosen - {0}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_generated_checkpoints_pack(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SPECS[name])
    plan = planned(source)
    result = packed(source, tmp_path / "out", plan)
    assert result.records == plan.experts
    assert json.loads((tmp_path / "out" / FILE_NAME).read_bytes())["container_id"] == result.container_id


def test_source_not_finite(tmp_path: Path) -> None:
    """NaN in an expert's scale and in the trunk: refused, naming the tensor, and nothing gets its name."""
    for tensor, word in (("w2.weight_scale", "255"), ("q_proj.weight", "finite")):
        source, out = tmp_path / tensor, tmp_path / f"{tensor}.out"
        shutil.copytree(DATA / "k3-tiny", source)
        checkpoint = open_checkpoint(source)
        name = next(name for name in checkpoint.tensors if name.endswith(tensor))
        entry = checkpoint.tensors[name]
        with (source / entry.shard).open("r+b") as file:
            file.seek(entry.offset)
            file.write(b"\xff\xff")
        with pytest.raises(FormatError, match=word) as caught:
            packed(source, out, planned(source))
        assert name in str(caught.value)
        assert caught.value.exit_code == 3
        assert not (out / FILE_NAME).exists()


def test_padding_of_decay_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    """SHP-05."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "k3-tiny", source)
    entry = next(tensor for name, tensor in open_checkpoint(source).tensors.items() if name.endswith("A_log"))
    with (source / entry.shard).open("r+b") as file:
        file.seek(entry.offset + entry.bytes - 4)
        file.write(b"\0\0\x80\x3f")
    with pytest.raises(MoepackError, match="not zero past its 4 heads") as caught:
        packed(source, tmp_path / "out", planned(source))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("effort", "paths"), [("default", ("avx512", "avx2", "portable")), ("fast", ("numpy",))])
def test_kernel_path_does_not_change_a_byte(effort: str, paths: tuple[str, ...], tmp_path: Path) -> None:
    """NUM-02 and BLD-01: the same container from every path that this machine has, the numpy twins included."""
    command = [sys.executable, "-m", "packer", "pack", str(DATA / "k3-small"), "--layers", "1", "--experts", "3"]
    names = [name for name in ("", *paths) if name in ("", *kernels.available_paths())]
    for name in names:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOEPACK_KERNEL": name}
        out = str(tmp_path / f"out-{name}")
        subprocess.run([*command, out, "--effort", effort, "--quiet"], env=environment, check=True, timeout=240)
    assert len(names) > 1
    for name in names[1:]:
        assert identical(tmp_path / "out-", tmp_path / f"out-{name}"), name


def test_unknown_kernel_path_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOEPACK_KERNEL": "quantum"}
    command = [sys.executable, "-m", "packer", "plan", str(DATA / "k3-tiny")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 4
    assert "MOEPACK_KERNEL" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_numpy_twins_are_said_to_be_in_use() -> None:
    """BLD-01: once, by the commands that they slow down."""
    for name, said in (("numpy", True), (kernels.available_paths()[0], kernels.available_paths()[0] == "numpy")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOEPACK_KERNEL": name}
        command = [sys.executable, "-m", "packer", "plan", str(DATA / "k3-tiny")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr.count("no compiled kernels") == int(said)
