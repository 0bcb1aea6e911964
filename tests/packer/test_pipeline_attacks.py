"""The pipeline against hostile journals, links in its output, other sources, and ends at bad moments."""

import filecmp
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import EnvironmentProblem, FormatError, Interrupted, UsageError
from formats.families import bind
from formats.manifest import FILE_NAME, TRUNK_NAME, WORK_DIR
from packer import pipeline
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.preflight import JOURNAL_NAME, LOCK_NAME
from packer.recipe.recipe import load_recipe
from packer.storage.journal import FileBegun, FileDone, ShardSeen, _line
from packer.storage.system import SYSTEM
from packer.verify.verify import verify

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "k3-tiny"


def run(source: Path, out: Path, recipe: str = "kimi-k3", **options: Any) -> Any:
    checkpoint = open_checkpoint(source)
    model = bind(checkpoint)
    plan = make_plan(checkpoint, model, load_recipe(recipe))
    return pack(checkpoint, model, plan, out, **{"jobs": 2, **options})


def stopped(source: Path, out: Path, reports: int = 12) -> None:
    """A pack that was stopped after some reports of progress."""
    stop = threading.Event()
    seen: list[object] = []

    def progress(report: object) -> None:
        seen.append(report)
        if len(seen) >= reports:
            stop.set()

    with pytest.raises(Interrupted):
        run(source, out, stop=stop, progress=progress)


def same(first: Path, second: Path) -> bool:
    compared = filecmp.dircmp(first, second)
    return not (compared.left_only or compared.right_only) and all(
        filecmp.cmp(path, second / path.relative_to(first), shallow=False)
        for path in first.rglob("*")
        if path.is_file()
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "tiny.moepack"
    run(TINY, out)
    return out


def append(out: Path, entry: object) -> None:
    """A line that checks, as somebody who can write the journal would make it."""
    import msgspec

    journal = out / WORK_DIR / JOURNAL_NAME
    number = journal.read_bytes().count(b"\n")
    with journal.open("ab") as file:
        file.write(_line(number, msgspec.json.encode(entry)))


DIGEST = "a" * 64
STAMP = (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["../victim", "{victim}", "/", ".", "experts", "x" * 320, "assets/../../victim"])
@pytest.mark.parametrize("kind", [FileDone, FileBegun, ShardSeen])
def test_journal_cannot_reach_outside(kind: Any, name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    stopped(TINY, out)
    name = name.format(victim=victim)
    made = {FileDone: (name, 4, DIGEST), FileBegun: (name,), ShardSeen: (name, 4, DIGEST, STAMP)}
    append(out, kind(*made[kind]))
    with pytest.raises(FormatError, match="not of this plan") as caught:
        run(TINY, out)
    assert caught.value.exit_code == 3
    assert victim.read_text() == "mine"


def test_journal_with_another_length(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(TINY, out)
    append(out, FileDone(TRUNK_NAME, 4096, DIGEST))
    with pytest.raises(FormatError, match="another length"):
        run(TINY, out)


def test_end_between_length_and_header_of_the_trunk(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary that the journal does not know is never continued."""
    out = tmp_path / "out"
    real = pipeline.durable.set_length

    class Killed(BaseException):
        pass

    def killed(output: Any, length: int, **options: Any) -> None:
        real(output, length, **options)
        if output.path.name == TRUNK_NAME:
            raise Killed

    monkeypatch.setattr(pipeline.durable, "set_length", killed)
    monkeypatch.setattr(pipeline.durable, "abandon", lambda output, **options: os.close(output.fd))
    with pytest.raises(Killed):
        run(TINY, out)
    monkeypatch.undo()
    assert (out / "trunk.bin.part").exists()
    run(TINY, out)
    assert same(whole, out)


@pytest.mark.parametrize("offset", [0, 4095])
def test_header_page_and_padding_are_read_back(offset: int, tmp_path: Path) -> None:
    """What the device lost of the trunk's first page or of the zeros is found before the file gets its name."""
    out = tmp_path / "out"
    spoiled: list[Path] = []

    def progress(report: Any) -> None:
        part = out / "trunk.bin.part"
        if part.exists():
            with part.open("r+b") as file:
                file.seek(offset)
                file.write(b"\x01")
            spoiled.append(part)

    with pytest.raises(EnvironmentProblem, match="other bytes are here than were written") as caught:
        run(TINY, out, progress=progress, jobs=1)
    assert spoiled
    assert caught.value.exit_code == 4
    assert not (out / FILE_NAME).exists()
    assert not (out / TRUNK_NAME).exists()


def test_full_disk_while_space_is_set_aside(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    calls: list[int] = []

    def full(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 7:  # six banks, then the trunk
            raise OSError(28, "No space left on device")
        SYSTEM.allocate(fd, offset, length)

    with pytest.raises(EnvironmentProblem, match="no space left"):
        run(TINY, out, system=replace(SYSTEM, allocate=full))
    run(TINY, out)
    assert same(whole, out)


@pytest.mark.parametrize(
    "left", [[LOCK_NAME], [JOURNAL_NAME], [JOURNAL_NAME + ".reserve", LOCK_NAME], [JOURNAL_NAME + ".part"]]
)
def test_end_after_the_last_rename(whole: Path, left: list[str], tmp_path: Path) -> None:
    """Whatever is left in the work folder of a finished pack is cleaned up by the same command."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / WORK_DIR).mkdir()
    for name in left:
        (out / WORK_DIR / name).write_bytes(b"left over")
    assert run(TINY, out).already_complete
    assert same(whole, out)


def test_finished_container_of_another_source(whole: Path, tmp_path: Path) -> None:
    """The same shapes, other weights: not complete for that source."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(TINY, source)
    shutil.copytree(whole, out)
    shard = source / "model-00003-of-000009.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1000:] = bytes(byte ^ 1 for byte in data[-1000:])
    shard.write_bytes(data)
    with pytest.raises(UsageError, match="finished container of another source") as caught:
        run(source, out)
    assert caught.value.where == shard.name


def test_finished_container_with_another_asset(whole: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(TINY, source)
    shutil.copytree(whole, out)
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text.replace(": 4096", ":  4096").replace("\n ", "\n", 1))
    assert len((source / "config.json").read_text()) == len(text)
    with pytest.raises(UsageError, match="finished container of another source"):
        run(source, out)


def test_resume_from_a_source_of_equal_length_and_time(tmp_path: Path) -> None:
    """Times of modification can be copied; the file's number and time of change cannot."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    shutil.copytree(TINY, first)
    shutil.copytree(TINY, second)
    for shard in second.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-64:] = bytes(byte ^ 1 for byte in data[-64:])
        shard.write_bytes(data)
        stamp = (first / shard.name).stat()
        os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    stopped(first, out)
    with pytest.raises(UsageError, match="not the one that this output was begun with"):
        run(second, out)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["experts", WORK_DIR])
def test_link_in_the_output(name: str, restart: bool, tmp_path: Path) -> None:
    """Nothing is written or deleted behind a link."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    stopped(TINY, out)
    shutil.move(out / name, elsewhere)
    (elsewhere / "layer-00009.bank").write_text("mine")
    before = sorted(path.name for path in elsewhere.iterdir())
    (out / name).symlink_to(elsewhere)
    with pytest.raises(UsageError, match="link"):
        run(TINY, out, restart=restart)
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_dropped_tensors_keep_their_shard_in_the_provenance(tmp_path: Path) -> None:
    """A shard of nothing but dropped tensors is hashed and listed, so parity can account for it."""
    recipe = tmp_path / "drop.toml"
    text = (Path(__file__).parent.parent.parent / "recipes" / "kimi-k3.toml").read_text()
    before, _, after = text.rpartition('codec = "raw"')
    recipe.write_text(f'{before}codec = "drop"{after}')
    out = tmp_path / "out"
    run(TINY, out, recipe=str(recipe))
    manifest = json.loads((out / FILE_NAME).read_bytes())
    assert manifest["coverage"]["dropped"] > 0
    assert len(manifest["source"]["shards"]) == 9
    report = verify(out, level="parity", source=TINY)
    assert report.problems == ()
    assert report.parity is not None
    assert report.parity.unaccounted == 0


def test_plan_from_metadata_equals_the_plan_with_headers(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(TINY / name, tmp_path / name)
    lengths = []
    for source, headers in ((TINY, True), (tmp_path, False)):
        checkpoint = open_checkpoint(source, need_headers=headers)
        assert checkpoint.has_headers == headers
        lengths.append(make_plan(checkpoint, bind(checkpoint), load_recipe("kimi-k3")).container_bytes)
    assert lengths[0] == lengths[1]
