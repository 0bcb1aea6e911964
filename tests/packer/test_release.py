"""Failure cases REL-01 to REL-07: source shards are deleted in the one order in which nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.checkpoint import open_checkpoint
from formats.errors import EnvironmentProblem, Interrupted, MoepackError
from formats.families import bind
from formats.manifest import WORK_DIR
from packer.disk import with_relief
from packer.fetch.provenance import provenance_of
from packer.fetch.receipt import read_receipt
from packer.local_release import kept_headers, open_local_release
from packer.pipeline import PackResult, pack
from packer.planning.plan import Plan, make_plan
from packer.preflight import JOURNAL_NAME
from packer.recipe.recipe import default_recipe
from packer.steps import consumers, unit_shards
from packer.storage.durable import SUFFIX
from packer.storage.journal import (
    FileDone,
    JournalContents,
    ShardReleased,
    ShardReleasing,
    ShardSeen,
    UnitDone,
    read_journal,
)
from packer.storage.system import SYSTEM, System, WriteLost
from tests.support.hub_server import HubServer, serve
from tests.support.repositories import folder_repository
from tests.support.staged import Watcher, identical, moepack, provenance, start

TINY = Path(__file__).parent.parent / "data" / "k3-tiny"
NAMES = [f"model-{number:05d}-of-000009.safetensors" for number in range(1, 10)]
LIMIT = 3 * 544_472
KILLS = int(os.environ.get("MOEPACK_RELEASE_KILLS", "12"))


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with serve(folder_repository(TINY)) as server:
        yield server


@pytest.fixture(scope="module")
def fetched(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``moepack fetch`` made; tests take copies of it."""
    folder = tmp_path_factory.mktemp("fetched") / "source"
    moepack(hub, "fetch", hub.repository, "--to", folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack from a checkout, without any release."""
    out = tmp_path_factory.mktemp("whole") / "whole.moepack"
    moepack(None, "pack", TINY, out, *provenance())
    return out


@pytest.fixture
def source(fetched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fetched, tmp_path / "source"))


def make(source: Path) -> Plan:
    checkpoint = open_checkpoint(source, headers=kept_headers(source))
    model = bind(checkpoint)
    origin = provenance_of(checkpoint)
    recipe = default_recipe(model.architecture.family)
    return make_plan(checkpoint, model, recipe, repository=origin.repository, commit=origin.commit)


def run(source: Path, out: Path, *, release: bool = True, **options: Any) -> PackResult:
    """A pack of a local folder in this process."""
    checkpoint = open_checkpoint(source, headers=kept_headers(source))
    model, plan, origin = bind(checkpoint), make(source), provenance_of(checkpoint)
    arguments = {"jobs": 1, "expected": origin.sha256, **options}
    if not release:
        return pack(checkpoint, model, plan, out, **arguments)
    with open_local_release(checkpoint, plan, origin) as local:
        return pack(checkpoint, model, plan, out, release=local, **arguments)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def journal(out: Path) -> JournalContents:
    return read_journal(out / WORK_DIR / JOURNAL_NAME)


def test_local_folder_is_released_with_both_flags(source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, messages = moepack(None, "pack", source, out, "--release-source", code=2)
    assert "--release-local" in messages
    assert shards(source) == NAMES
    printed, _ = moepack(None, "pack", source, out, "--release-source", "--release-local", "--json")
    assert json.loads(printed)["released"] == NAMES
    assert shards(source) == []
    assert identical(whole, out)
    # WRT-12: once more, without its source
    _, messages = moepack(None, "pack", source, out, "--release-source", "--release-local")
    assert "complete already" in messages
    assert identical(whole, out)
    # Another output needs the shards, and says which and how
    _, messages = moepack(None, "pack", source, tmp_path / "second", code=3)
    assert NAMES[0] in messages
    assert "fetch --released" in messages


class Killed(BaseException):
    """Stands for the end of the process: nothing after it is tidied up by the code under test on purpose."""


def killing(name: str, when: Callable[[Path], bool], *, after: bool) -> System:
    """A system that ends the run at the first call ``name`` whose path suits, before it or after it."""

    def call(path: Path, *rest: Any) -> Any:
        if when(Path(path)) and not after:
            raise Killed
        result = getattr(SYSTEM, name)(path, *rest)
        if when(Path(path)):
            raise Killed
        return result

    return replace(SYSTEM, **{name: call})


@pytest.mark.parametrize("after", [False, True])
def test_rel_01_killed_around_the_unlink(source: Path, whole: Path, tmp_path: Path, after: bool) -> None:
    """Between *releasing* and the unlink, and between the unlink and *released*."""
    out, victim = tmp_path / "out", NAMES[2]
    with pytest.raises(Killed):
        run(source, out, system=killing("unlink", lambda path: path.name == victim, after=after))
    entries = journal(out).entries
    assert isinstance(entries[-1], ShardReleasing)
    assert entries[-1].name == victim
    assert (source / victim).exists() is not after
    run(source, out)
    assert shards(source) == []
    assert identical(whole, out)
    receipt = read_receipt(source)
    assert receipt is not None
    assert list(receipt.released) == NAMES


def test_rel_01_checks_are_repeated(source: Path, tmp_path: Path) -> None:
    """The shard was changed between the announcement and the restart: it stays, and the pack is refused."""
    out, victim = tmp_path / "out", NAMES[2]
    with pytest.raises(Killed):
        run(source, out, system=killing("unlink", lambda path: path.name == victim, after=False))
    data = bytearray((source / victim).read_bytes())
    data[-1] ^= 1
    (source / victim).write_bytes(data)
    with pytest.raises(MoepackError):
        run(source, out)
    assert (source / victim).read_bytes() == data
    assert not isinstance(journal(out).entries[-1], ShardReleased)


def test_rel_01_output_lost_between_announcement_and_restart(source: Path, whole: Path, tmp_path: Path) -> None:
    """What was made from the announced shard is damaged: the shard is needed once more, and goes after that."""
    out, victim = tmp_path / "out", NAMES[2]
    with pytest.raises(Killed):
        run(source, out, system=killing("unlink", lambda path: path.name == victim, after=False))
    bank = out / "experts" / "layer-00002.bank"
    flip(bank, 4500)
    gone: list[str] = []

    def unlink(path: Path) -> None:
        if path.name == victim:
            assert bank.exists()
            assert bank.read_bytes() == (whole / "experts" / "layer-00002.bank").read_bytes()
            gone.append(path.name)
        SYSTEM.unlink(path)

    run(source, out, system=replace(SYSTEM, unlink=unlink))
    assert gone == [victim]
    assert identical(whole, out)


def test_rel_01_without_the_flag_what_is_gone_is_confirmed_and_what_is_there_stays(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", NAMES[2]
    with pytest.raises(Killed):
        run(source, out, system=killing("unlink", lambda path: path.name == victim, after=False))
    left = shards(source)
    assert victim in left
    run(source, out, release=False)
    assert shards(source) == left
    assert identical(whole, out)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def users_of(source: Path) -> dict[str, set[str]]:
    """By shard, the names of all units that need it."""
    checkpoint = open_checkpoint(source, headers=kept_headers(source))
    plan = make(source)
    needs = unit_shards(checkpoint, bind(checkpoint), plan)
    return {shard: {unit.name for unit in units} for shard, units in consumers(plan, needs).items()}


def check_order(entries: tuple[Any, ...], users: dict[str, set[str]]) -> int:
    """1.4 as the journal tells it: digest known and all units done before *releasing*, that before *released*."""
    units: set[str] = set()
    seen: set[str] = set()
    releasing: set[str] = set()
    released = 0
    for entry in entries:
        match entry:
            case UnitDone():
                units.add(entry.unit)
            case ShardSeen():
                seen.add(entry.name)
            case ShardReleasing():
                assert users[entry.name] <= units
                assert entry.name in seen
                releasing.add(entry.name)
            case ShardReleased():
                assert entry.name in releasing
                released += 1
    return released


def test_rel_02_shard_of_several_units_is_kept_to_the_last(source: Path, tmp_path: Path) -> None:
    """Vision needs shards 8 and 9, embedding and output shard 8; the pack is stopped between them."""
    users = users_of(source)
    assert len(users[NAMES[7]]) == 3
    out = tmp_path / "out"
    done: list[str] = []

    def progress(report: Any) -> None:
        units = {entry.unit for entry in journal(out).entries if isinstance(entry, UnitDone)}
        for name in NAMES:
            if not (source / name).exists():
                assert users[name] <= units, name
                done.append(name)

    run(source, out, progress=progress)
    assert set(done) >= set(NAMES[:8])


def test_rel_02_stopped_after_each_unit(source: Path, whole: Path, tmp_path: Path) -> None:
    users = users_of(source)
    out = tmp_path / "out"
    stops = 0
    for most in range(1, 200, 5):
        stop = threading.Event()
        count: list[int] = []

        def progress(report: Any, stop: threading.Event = stop, count: list[int] = count, most: int = most) -> None:
            count.append(1)
            if len(count) > most:
                stop.set()

        try:
            run(source, out, stop=stop, progress=progress)
        except Interrupted:
            stops += 1
            released = check_order(journal(out).entries, users)
            assert released == len(NAMES) - len(shards(source))
        else:
            break
    assert stops > 3
    assert identical(whole, out)


@pytest.mark.parametrize("file", ["experts/layer-00002.bank", "trunk.bin"])
def test_rel_03_read_back_differs(source: Path, whole: Path, tmp_path: Path, file: str) -> None:
    """The device keeps another byte than was written. Nothing made from the shard is believed, and the shard stays."""
    out, victim = tmp_path / "out", NAMES[2]
    part = out / (file + SUFFIX)
    state = {"done": False}
    real = SYSTEM.drop_cache

    def drop_cache(fd: int, offset: int, length: int) -> None:
        # Called right before bytes are read back: what was in the cache is replaced by what "the device" has.
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if not state["done"] and path == part and (file != "trunk.bin" or offset > 4096):
            state["done"] = True
            with part.open("r+b") as damaged:
                damaged.seek(offset + 64)
                byte = damaged.read(1)
                damaged.seek(offset + 64)
                damaged.write(bytes([byte[0] ^ 1]))
        real(fd, offset, length)

    before = shards(source)
    with pytest.raises(WriteLost):
        run(source, out, system=replace(SYSTEM, drop_cache=drop_cache))
    assert state["done"]
    assert victim in shards(source)
    assert not part.exists()
    if file == "trunk.bin":
        assert shards(source) == before
    result = run(source, out)
    assert result.records > 0
    assert shards(source) == []
    assert identical(whole, out)


def test_rel_04_links_are_never_released(fetched: Path, tmp_path: Path) -> None:
    """The layout of the Hub's cache: blobs, and a tree of links to them."""
    blobs, tree = tmp_path / "blobs", tmp_path / "tree"
    blobs.mkdir()
    tree.mkdir()
    for path in fetched.iterdir():
        if path.suffix == ".safetensors":
            blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
            shutil.copy(path, blob)
            (tree / path.name).symlink_to(blob)
        elif path.is_file():
            shutil.copy(path, tree / path.name)
    before = sorted((path.name, path.stat().st_size) for path in blobs.iterdir())
    _, messages = moepack(None, "pack", tree, tmp_path / "out", "--release-source", "--release-local", code=2)
    assert "link" in messages
    assert not (tmp_path / "out").exists()
    assert sorted((path.name, path.stat().st_size) for path in blobs.iterdir()) == before
    moepack(None, "pack", tree, tmp_path / "out")  # reading follows links


def test_rel_04_link_that_comes_later(source: Path, tmp_path: Path) -> None:
    """A shard is replaced by a link to the same bytes after the pack has begun."""
    out, victim, blob = tmp_path / "out", source / NAMES[2], tmp_path / "blob"

    def progress(report: Any) -> None:
        if not blob.exists():
            victim.rename(blob)
            victim.symlink_to(blob)

    with pytest.raises(MoepackError):
        run(source, out, progress=progress)
    assert victim.is_symlink()
    assert blob.exists()


def test_rel_05_partial_selection_and_unknown_digests(source: Path, tmp_path: Path) -> None:
    flags = ["--release-source", "--release-local"]
    for options in (["--layers", "1-3"], ["--experts", "0-3"]):
        _, messages = moepack(None, "pack", source, tmp_path / "out", *flags, *options, code=2)
        assert "part of the model" in messages
    _, messages = moepack(None, "pack", TINY, tmp_path / "out", *flags, code=2)
    assert "digest" in messages
    (source / ".moepack-source.json").unlink()
    moepack(None, "pack", source, tmp_path / "out", *flags, code=2)
    assert not (tmp_path / "out").exists()
    assert shards(source) == NAMES
    assert len(list(TINY.glob("model-*.safetensors"))) == 9


def test_rel_05_shard_that_is_not_the_repository_s(source: Path, tmp_path: Path) -> None:
    """One bit of a weight: the digest decides, before anything made from it could let it go."""
    flip(source / NAMES[2], 300_000)
    _, messages = moepack(
        None, "pack", source, tmp_path / "out", "--release-source", "--release-local", "--jobs", 1, code=3
    )
    assert NAMES[2] in messages
    assert (source / NAMES[2]).exists()


def test_rel_06_released_is_a_known_state_for_fetch(hub: HubServer, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(source, out, system=killing("unlink", lambda path: path.name == NAMES[4], after=False))
    gone = sorted(set(NAMES) - set(shards(source)))
    assert gone
    before = hub.sent
    _, messages = moepack(hub, "fetch", hub.repository, "--to", source)
    assert hub.sent == before
    assert f"left so ({len(gone)})" in messages
    moepack(hub, "fetch", hub.repository, "--to", source, "--released")
    assert shards(source) == NAMES
    moepack(None, "pack", source, out, "--release-source", "--release-local")
    assert shards(source) == []


def test_rel_06_killed_before_the_receipt_knows(source: Path, whole: Path, tmp_path: Path) -> None:
    """The journal says *released*, the receipt still *present*, the file is gone: the next run tells the receipt."""
    out, victim = tmp_path / "out", NAMES[2]
    with pytest.raises(Killed):
        run(source, out, progress=raise_once_released(source / victim))
    receipt = read_receipt(source)
    assert receipt is not None
    assert receipt.entries[victim].state == "released"
    data = json.loads((source / ".moepack-source.json").read_bytes())
    for item in data["files"]:
        if item["path"] == victim:
            item["state"], item["mtime_ns"] = "present", 5
    (source / ".moepack-source.json").write_text(json.dumps(data))
    run(source, out)
    after = read_receipt(source)
    assert after is not None
    assert list(after.released) == NAMES
    assert identical(whole, out)


def raise_once_released(path: Path) -> Callable[[Any], None]:
    def progress(report: Any) -> None:
        if not path.exists():
            raise Killed

    return progress


def test_rel_06_released_shard_that_is_needed_again_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    """A local folder cannot bring a shard back: the bank that needs it is named before any other work."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(source, out, progress=raise_once_released(source / NAMES[4]))
    flip(out / "experts" / "layer-00001.bank", 4500)
    left = shards(source)
    _, messages = moepack(None, "pack", source, out, "--release-source", "--release-local", code=3)
    assert NAMES[1] in messages
    assert "fetch --released" in messages
    assert shards(source) == left
    _, messages = moepack(None, "pack", source, out, "--restart", code=3)
    assert NAMES[1] in messages
    assert (out / WORK_DIR / JOURNAL_NAME).exists()


def test_rel_07_hard_link_keeps_the_space(source: Path, whole: Path, tmp_path: Path) -> None:
    """Freed bytes are those that come back: none of a shard with a second name; the plan does not count on them."""
    checkpoint = open_checkpoint(source)
    plan = make(source)
    needs = unit_shards(checkpoint, bind(checkpoint), plan)
    single = with_relief(plan, needs, directory=source, out=tmp_path / "out").peak_disk_bytes
    for name in NAMES[:8]:
        os.link(source / name, tmp_path / name)
    linked = with_relief(plan, needs, directory=source, out=tmp_path / "out").peak_disk_bytes
    assert single < linked <= plan.peak_disk_bytes
    os.link(source / NAMES[8], tmp_path / NAMES[8])
    assert with_relief(plan, needs, directory=source, out=tmp_path / "out").peak_disk_bytes == plan.peak_disk_bytes
    (tmp_path / NAMES[8]).unlink()
    said: list[str] = []
    result = run(source, tmp_path / "out", progress=lambda report: said.append(report.what))
    assert result.released == tuple(NAMES)
    assert result.freed_bytes == 87_520  # the one without a second name
    assert sum("frees nothing" in what for what in said) == 8
    assert shards(source) == []
    assert shards(tmp_path) == NAMES[:8]
    assert identical(whole, tmp_path / "out")


def test_full_device_for_a_pack_that_relies_on_release(source: Path, tmp_path: Path) -> None:
    """The preflight counts on what goes meanwhile, and not on more."""
    checkpoint = open_checkpoint(source)
    plan = make(source)
    relieved = with_relief(plan, unit_shards(checkpoint, bind(checkpoint), plan), directory=source, out=tmp_path / "x")
    assert relieved.peak_disk_bytes < plan.peak_disk_bytes
    need = relieved.peak_disk_bytes
    origin = provenance_of(checkpoint)
    with open_local_release(checkpoint, plan, origin) as local:
        arguments: dict[str, Any] = {"jobs": 1, "expected": origin.sha256, "release": local}
        poor = replace(SYSTEM, available=lambda path: need - 1)
        with pytest.raises(EnvironmentProblem, match="not enough space"):
            pack(checkpoint, bind(checkpoint), relieved, tmp_path / "out", system=poor, **arguments)
        assert shards(source) == NAMES
        enough = replace(SYSTEM, available=lambda path: need)
        pack(checkpoint, bind(checkpoint), relieved, tmp_path / "out", system=enough, **arguments)


def test_hostile_journal_releases_nothing_that_is_needed(source: Path, tmp_path: Path) -> None:
    """A journal with a forged *releasing* and no units: the checks are repeated, and the shard stays."""
    out = tmp_path / "out"
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        run(source, out, stop=stop)
    path = out / WORK_DIR / JOURNAL_NAME
    number = path.read_bytes().count(b"\n")
    size, digest = (source / NAMES[6]).stat().st_size, hashlib.sha256((source / NAMES[6]).read_bytes()).hexdigest()
    for forged in (
        {"kind": "releasing", "name": NAMES[6], "bytes": size, "sha256": digest},
        {"kind": "releasing", "name": "../../thesis", "bytes": 1, "sha256": digest},
    ):
        body = b'{"seq":%d,"entry":%s' % (number, json.dumps(forged, separators=(",", ":")).encode())
        line = b'%s,"check":"%s"}\n' % (body, blake3(body).hexdigest()[:16].encode())
        kept = path.read_bytes()
        path.write_bytes(kept + line)
        stop = threading.Event()
        stop.set()
        with pytest.raises(MoepackError):
            run(source, out, stop=stop)
        assert shards(source) == NAMES
        path.write_bytes(kept)


# Kills, from a repository


def test_killed_at_random_with_release(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    """SIGKILL again and again: whatever is gone, everything made from it is durable; the result is the same."""
    users = users_of(TINY)
    rng = random.Random(4)
    bodies = sum(len(hub.files[name]) for name in NAMES)
    kills = early = packs = most = 0
    hub.requests.clear()
    hub.piece = 16 << 10
    while kills < KILLS:
        packs += 1
        staging, out = tmp_path / f"staging{packs}", tmp_path / f"out{packs}.moepack"
        arguments = ["pack", hub.repository, out, "--staging", staging, "--staging-limit", LIMIT]
        arguments += ["--release-source", "--jobs", 1 + packs % 2]
        met: set[str] = set()
        with Watcher(staging) as watcher:
            code = -signal.SIGKILL
            while code == -signal.SIGKILL:
                hub.pace = 0.003 if kills < KILLS else 0.0
                process = start(hub, *arguments)
                if kills < KILLS:
                    wait_for_journal(out, process, rng.randrange(1, 12))
                    time.sleep(rng.random() * 0.03)
                    process.kill()
                _, messages = process.communicate(timeout=120)
                code = process.returncode
                met |= watcher.met
                if code == -signal.SIGKILL:
                    kills += 1
                    early += check_kill(out, staging, users, met)
        assert code == 0, messages
        most = max(most, watcher.most)
        assert identical(whole, out)
        assert not list(staging.glob("*.safetensors"))
    hub.pace = 0.0
    sent = sum(request.sent for request in hub.requests if request.path in NAMES)
    print(f"{kills} kills in {packs} packs, {early} with shards gone, most {most} of {LIMIT} bytes staged,")
    print(f"sent {sent / bodies / packs:.3f} times the shards")
    assert early > kills // 3
    assert most <= LIMIT


def wait_for_journal(out: Path, process: Any, more: int) -> None:
    """Until the journal has some lines more than now, or the process has ended."""
    path = out / WORK_DIR / JOURNAL_NAME
    wanted = (path.read_bytes().count(b"\n") if path.exists() else 0) + more
    deadline = time.monotonic() + 120
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < wanted):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_kill(out: Path, staging: Path, users: dict[str, set[str]], met: set[str]) -> int:
    """After a kill: every shard that was here and is gone was used up, and what it was used for is in the output."""
    path = out / WORK_DIR / JOURNAL_NAME
    if not path.exists():
        return 0
    entries = journal(out).entries
    check_order(entries, users)
    announced = {entry.name for entry in entries if isinstance(entry, ShardReleasing)}
    gone = {name for name in met if not (staging / name).exists()}
    assert gone <= announced
    finished = {entry.name: entry.blake3 for entry in entries if isinstance(entry, FileDone)}
    for name in gone:
        for bank in banks_of(users[name]):
            assert blake3((out / bank).read_bytes()).hexdigest() == finished[bank]
    return bool(gone)


def banks_of(units: set[str]) -> list[str]:
    """The files of the units that are a layer's experts: each is its bank's only unit."""
    return [f"experts/layer-{int(unit.split()[1]):05d}.bank" for unit in units if unit.startswith("layer ")]


def test_without_proof_the_kill_test_would_notice(tmp_path: Path) -> None:
    """Negative control: a journal in which a shard goes before its last unit is found out."""
    shard = ShardSeen("a", 1, "0" * 64, (0, 0, 0, 0))
    early = (shard, UnitDone("one"), ShardReleasing("a", 1, "0" * 64), ShardReleased("a"), UnitDone("two"))
    with pytest.raises(AssertionError):
        check_order(early, {"a": {"one", "two"}})
    assert check_order((*early[:2], early[4], *early[2:4]), {"a": {"one", "two"}}) == 1


def test_release_that_asks_nobody_is_noticed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the check of a shard's users switched off, the order in the journal is wrong."""
    users = users_of(source)
    monkeypatch.setattr("packer.pipeline.consumers", lambda plan, needs: dict.fromkeys(NAMES, ()))
    with pytest.raises(MoepackError):
        run(source, tmp_path / "out")
    with pytest.raises(AssertionError):
        check_order(journal(tmp_path / "out").entries, users)


@pytest.mark.parametrize("file", ["experts/layer-00002.bank", "trunk.bin"])
@pytest.mark.parametrize("after", [False, True])
def test_rel_01_killed_around_a_rename(source: Path, whole: Path, tmp_path: Path, file: str, after: bool) -> None:
    """*Intent* without *done*: the file is checked and kept, or renamed again, and its shards go after that."""
    out = tmp_path / "out"
    killer = killing("rename", lambda path: path == out / (file + SUFFIX), after=after)
    with pytest.raises(Killed):
        run(source, out, system=killer)
    assert (out / file).exists() is after
    users = users_of(source)
    check_order(journal(out).entries, users)

    def unlink(path: Path) -> None:
        for bank in banks_of(users.get(path.name, set())):
            assert (out / bank).exists(), f"{path.name} goes before {bank} has its name"
        SYSTEM.unlink(path)

    run(source, out, system=replace(SYSTEM, unlink=unlink))
    assert shards(source) == []
    assert identical(whole, out)


def test_staging_folder_of_links_is_refused(hub: HubServer, tmp_path: Path) -> None:
    """REL-04 in a staging folder: a link in the place of a shard is read, and neither it nor its target is deleted."""
    staging, out, blob = tmp_path / "staging", tmp_path / "out", tmp_path / "blob"
    moepack(hub, "plan", hub.repository)
    staging.mkdir()
    blob.write_bytes(hub.files[NAMES[2]])
    (staging / NAMES[2]).symlink_to(blob)
    _, messages = moepack(hub, "pack", hub.repository, out, "--staging", staging, "--release-source", code=2)
    assert "link" in messages
    assert blob.read_bytes() == hub.files[NAMES[2]]
    assert (staging / NAMES[2]).is_symlink()
