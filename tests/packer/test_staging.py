"""A repository as the source of a pack: bounded staging, and the bytes of a pack from a checkout."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.checkpoint import open_checkpoint
from formats.container import open_container
from formats.errors import UsageError
from formats.families import bind
from packer.commands.size import parse_size
from packer.fetch.receipt import read_receipt
from packer.planning.plan import Plan, make_plan
from packer.recipe.recipe import default_recipe
from packer.steps import Step, least_staging, make_steps, peak_of_release, unit_shards
from tests.support.hub_server import COMMIT, Fault, HubServer, serve
from tests.support.repositories import folder_repository
from tests.support.staged import Watcher, finish, identical, moepack, provenance, start

TINY = Path(__file__).parent.parent / "data" / "k3-tiny"
LINEAR = Path(__file__).parent.parent / "data" / "kimi-linear-tiny"
LARGEST = 544_472
LIMIT = 3 * LARGEST
NAMES = [f"model-{number:05d}-of-000009.safetensors" for number in range(1, 10)]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve(folder_repository(TINY)) as server:
        yield server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack from a complete checkout."""
    out = tmp_path_factory.mktemp("whole") / "whole.moepack"
    moepack(None, "pack", TINY, out, *provenance(), "--jobs", 2)
    return out


@pytest.mark.parametrize(("jobs", "pace"), [(1, 0.0), (2, 0.005)])
def test_limit_of_three_shards_is_never_exceeded(
    hub: HubServer, whole: Path, tmp_path: Path, jobs: int, pace: float
) -> None:
    hub.pace, hub.piece = pace, 16 << 10
    staging, out = tmp_path / "staging", tmp_path / "out.moepack"
    options = ["--staging-limit", LIMIT, "--release-source", "--json"]
    peak = json.loads(moepack(hub, "plan", hub.repository, *options)[0])["peak_disk_bytes"]
    hub.requests.clear()
    with Watcher(staging, tmp_path) as watcher:
        printed, _ = moepack(
            hub, "pack", hub.repository, out, "--staging", staging, "--jobs", jobs, *options
        )  # fmt: skip
    assert 2 * LARGEST < watcher.most <= LIMIT
    print(f"limit {LIMIT}, most {watcher.most} in {watcher.looks} looks, {len(watcher.met)} shards seen")
    assert watcher.most_disk <= peak
    print(f"peak stated {peak}, measured {watcher.most_disk}")
    assert identical(whole, out)
    result = json.loads(printed)
    assert result["released"] == NAMES
    assert result["freed_bytes"] == sum(len(hub.files[name]) for name in NAMES)
    assert not list(staging.glob("*.safetensors"))
    receipt = read_receipt(staging)
    assert receipt is not None
    assert list(receipt.released) == NAMES
    # every body once, and headers by ranges
    bodies = sum(len(hub.files[name]) for name in NAMES)
    sent = sum(request.sent for request in hub.requests if request.path in NAMES)
    assert bodies < sent < 1.1 * bodies


def test_without_the_flag_nothing_is_deleted(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.moepack"
    moepack(hub, "pack", hub.repository, out)
    staging = tmp_path / "out.moepack.source"
    assert sorted(path.name for path in staging.glob("*.safetensors")) == NAMES
    assert identical(whole, out)
    before = hub.sent
    _, messages = moepack(hub, "pack", hub.repository, out, "--release-source")
    assert "complete already" in messages
    assert "--release-source changes nothing" in messages
    assert sorted(path.name for path in staging.glob("*.safetensors")) == NAMES
    assert hub.sent == before


def test_without_the_flag_the_limit_must_hold_everything(hub: HubServer, tmp_path: Path) -> None:
    total = sum(len(hub.files[name]) for name in NAMES)
    out = tmp_path / "out.moepack"
    _, messages = moepack(hub, "pack", hub.repository, out, "--staging-limit", total - 1, code=2)
    assert f"at least {total} bytes" in messages
    assert "--release-source" in messages
    assert not out.exists()
    assert all(request.range for request in hub.requests if request.path in NAMES)  # headers alone


def test_limit_too_small_states_the_least(hub: HubServer, tmp_path: Path) -> None:
    """The least is one of the large shards here: no unit of this checkpoint needs two of those at a time."""
    arguments = ["pack", hub.repository, tmp_path / "out.moepack", "--release-source", "--staging-limit"]
    _, messages = moepack(hub, *arguments, LARGEST - 1, code=2)
    assert f"at least {LARGEST} bytes" in messages
    moepack(hub, *arguments, LARGEST)


def test_finished_container_of_a_released_source_is_recognised(hub: HubServer, tmp_path: Path) -> None:
    """WRT-12 and REL-06: nothing is fetched again, nothing is written."""
    arguments = ["pack", hub.repository, tmp_path / "out.moepack", "--release-source"]
    moepack(hub, *arguments)
    before = hub.sent
    _, messages = moepack(hub, *arguments)
    assert "complete already" in messages
    assert hub.sent == before
    hub.commit = "e" * 40
    moepack(hub, *arguments, code=2)


def test_other_commit_is_refused_on_resume(hub: HubServer, tmp_path: Path) -> None:
    """WRT-10: the branch has moved; the staging folder says so, and without it the journal."""
    staging, out = tmp_path / "staging", tmp_path / "out.moepack"
    hub.every = lambda path: Fault(status=404) if path == NAMES[4] and begun(out) else None
    arguments = ["pack", hub.repository, out, "--release-source", "--staging"]
    moepack(hub, *arguments, staging, code=4)
    hub.every = lambda path: None
    hub.commit = "e" * 40
    _, messages = moepack(hub, *arguments, staging, code=2)
    assert f"commit was {COMMIT}, is {'e' * 40}" in messages
    assert f"--revision {COMMIT}" in messages
    _, messages = moepack(hub, *arguments, tmp_path / "other", code=2)
    assert f'source.commit was "{COMMIT}"' in messages
    hub.commit = COMMIT
    moepack(hub, *arguments, staging)


def begun(out: Path) -> bool:
    return (out / ".packing").is_dir()


def test_partial_pack_fetches_what_it_needs(hub: HubServer, tmp_path: Path) -> None:
    out = tmp_path / "out.moepack"
    moepack(hub, "pack", hub.repository, out, "--layers", "3")
    assert [path.name for path in (tmp_path / "out.moepack.source").glob("*.safetensors")] == [NAMES[3]]
    with open_container(out) as container:
        assert [shard.name for shard in container.manifest.source.shards] == [NAMES[3]]


def test_rel_05_partial_pack_of_a_repository_releases_nothing(hub: HubServer, tmp_path: Path) -> None:
    _, messages = moepack(hub, "pack", hub.repository, tmp_path / "out", "--layers", "3", "--release-source", code=2)
    assert "part of the model" in messages
    assert not (tmp_path / "out").exists()


def test_plan_of_a_repository_states_the_peak_and_writes_nothing(hub: HubServer, tmp_path: Path) -> None:
    local, _ = moepack(None, "plan", TINY, *provenance(), "--json")
    arguments = ["plan", hub.repository, "--json", "--release-source", "--staging-limit"]
    printed, _ = moepack(hub, *arguments, "1.5MiB")
    mine, other = json.loads(printed), json.loads(local)
    assert mine["staging_bytes"] == 3 << 19
    small = sum(len(data) for name, data in hub.files.items() if name not in NAMES and name != "golden.safetensors")
    assert small < mine["staging_other_bytes"] < small + 2_000_000
    assert mine["peak_disk_bytes"] == other["peak_disk_bytes"] + (3 << 19) + mine["staging_other_bytes"]
    assert mine["container_bytes"] == other["container_bytes"]
    assert all(request.range for request in hub.requests if request.path in NAMES)
    printed, told = moepack(hub, *arguments[:-1])
    assert told.splitlines()[:2] == [
        "owner/model: nothing here has that name, so it is taken for a repository",
        "asking 127.0.0.1 for owner/model",
    ]
    assert json.loads(printed)["staging_bytes"] == 4 * LARGEST  # the least, and three ahead
    assert not list(tmp_path.iterdir())
    moepack(hub, "pack", hub.repository, tmp_path / "out", "--dry-run")
    assert not list(tmp_path.iterdir())


def test_a_repository_that_is_not_there_may_have_been_meant_as_a_folder(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    _, messages = moepack(hub, "plan", "owner/modle", code=2)
    assert "hint: owner is a folder here and has no modle; check the name" in messages
    moepack(hub, "plan", hub.repository)  # which is asked for all the same


@pytest.mark.parametrize("source", ["./owner/model", "owner/model/"])
def test_what_can_only_be_a_folder_is_not_taken_for_a_repository(
    source: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["plan", source], ["pack", source, "out", "--dry-run"]):
        _, messages = moepack(hub, *command, code=2)
        assert f"{tmp_path / 'owner' / 'model'}: no such directory" in messages
    assert not hub.requests


def test_the_source_comes_first(tmp_path: Path) -> None:
    _, told = moepack(None, "pack", tmp_path / "new", TINY, code=2)
    assert "the checkpoint comes first, then the container" in told


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--staging-limit", "200 apples"], "not a size"),
        (["--staging-limit", "0"], "out of range"),
        (["--release-local"], "local folder only"),
        (["--revision", "no-such"], "revision"),
    ],
)
def test_options_that_make_no_sense(hub: HubServer, tmp_path: Path, options: list[str], shown: str) -> None:
    _, messages = moepack(hub, "pack", hub.repository, tmp_path / "out", *options, code=2)
    assert shown in messages
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [["--revision", "main"], ["--staging", "x"], ["--staging-limit", "1GiB"], ["--release-source"]]
)
def test_options_that_do_not_go_with_a_folder(tmp_path: Path, options: list[str]) -> None:
    moepack(None, "pack", TINY, tmp_path / "out", *options, code=2)
    assert not list(tmp_path.iterdir())


def test_network_that_fails_midway_is_resumed(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.moepack"
    hub.every = lambda path: Fault(status=404) if path == NAMES[5] and begun(out) else None
    arguments = ["pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT]
    _, messages = moepack(hub, *arguments, code=4)
    assert NAMES[5] in messages
    hub.every = lambda path: None
    _, messages = moepack(hub, *arguments)
    assert "continued" in messages
    assert identical(whole, out)


def test_lost_bank_of_released_shards_is_fetched_again(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    """A finished bank is damaged while the pack is interrupted, and its shard is gone: the repository still has it."""
    out = tmp_path / "out.moepack"
    hub.every = lambda path: Fault(status=404) if path == NAMES[6] and begun(out) else None
    arguments = ["pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT]
    moepack(hub, *arguments, code=4)
    receipt = read_receipt(tmp_path / "out.moepack.source")
    assert receipt is not None
    assert NAMES[1] in receipt.released
    bank = out / "experts" / "layer-00001.bank"
    data = bytearray(bank.read_bytes())
    data[5000] ^= 1
    bank.write_bytes(data)
    hub.every = lambda path: None
    hub.requests.clear()
    with Watcher(tmp_path / "out.moepack.source") as watcher:
        moepack(hub, *arguments)
    assert watcher.most <= LIMIT
    assert sum(request.sent for request in hub.requests if request.path == NAMES[1]) == len(hub.files[NAMES[1]])
    assert identical(whole, out)
    assert not list((tmp_path / "out.moepack.source").glob("*.safetensors"))


def test_shard_that_was_named_before_the_receipt_knew(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    """A kill between the rename of a fetched shard and its entry in the receipt: it is used, counted, and goes."""
    out, staging = tmp_path / "out.moepack", tmp_path / "out.moepack.source"
    staging.mkdir()
    (staging / NAMES[3]).write_bytes(hub.files[NAMES[3]])
    moepack(hub, "pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT)
    assert sum(request.sent for request in hub.requests if request.path == NAMES[3]) < 100_000  # its header
    assert not list(staging.glob("*.safetensors"))
    assert identical(whole, out)


def test_damaged_shard_in_the_staging_folder(hub: HubServer, whole: Path, tmp_path: Path) -> None:
    """One that was fetched and is wrong now comes again; both together stay within the limit."""
    out, staging = tmp_path / "out.moepack", tmp_path / "out.moepack.source"
    later = staging / NAMES[5]

    def fail_once_the_next_is_here(path: str) -> Fault | None:
        if path != NAMES[4] or not begun(out):
            return None
        if not later.exists():
            return Fault(status=503)  # which is tried again
        return Fault(status=404)

    hub.every = fail_once_the_next_is_here
    arguments = ["pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT]
    moepack(hub, *arguments, code=4)
    hub.every = lambda path: None
    data = bytearray(later.read_bytes())
    data[-1] ^= 1
    later.write_bytes(data)
    with Watcher(staging) as watcher:
        moepack(hub, *arguments)
    assert watcher.most <= LIMIT
    assert identical(whole, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_wrt_07_signal_while_shards_come(hub: HubServer, whole: Path, tmp_path: Path, number: int) -> None:
    """The wait for a shard ends at once, what has arrived stays, and the same command continues."""
    out = tmp_path / "out.moepack"
    hub.every = lambda path: Fault(stall_at=100_000) if path == NAMES[3] and begun(out) else None
    process = start(hub, "pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT)
    deadline = time.monotonic() + 60
    while not any(request.path == NAMES[3] and request.sent == 100_000 for request in hub.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, messages = finish(process, 130)
    assert "continue with: moepack pack owner/model" in messages
    hub.every = lambda path: None
    moepack(hub, "pack", hub.repository, out, "--release-source", "--staging-limit", LIMIT)
    assert identical(whole, out)


def test_shards_that_straddle_layers(tmp_path: Path) -> None:
    """Both layers of a Kimi-Linear shard come from it, and the trunk needs both shards to the end."""
    lossless = ["--recipe", "kimi-linear-lossless"]
    with serve(folder_repository(LINEAR)) as hub:
        staged, local = tmp_path / "staged", tmp_path / "local"
        moepack(hub, "pack", hub.repository, staged, "--release-source", *lossless)
        moepack(None, "pack", LINEAR, local, *provenance(), *lossless)
        assert identical(local, staged)


# Steps and sizes, by hand


def planned() -> tuple[Plan, dict[str, tuple[str, ...]]]:
    checkpoint = open_checkpoint(TINY)
    model = bind(checkpoint)
    plan = make_plan(checkpoint, model, default_recipe(model.architecture.family))
    return plan, unit_shards(checkpoint, model, plan)


def test_every_unit_is_in_one_step_and_every_shard_comes_once() -> None:
    plan, needs = planned()
    steps = make_steps(plan, needs)
    assert sorted(unit.name for step in steps for unit in step.units) == sorted(unit.name for unit in plan.units)
    met: set[str] = set()
    gone: set[str] = set()
    for number, step in enumerate(steps):
        assert not gone & set(step.shards)
        met |= set(step.shards)
        later = {shard for other in steps[number + 1 :] for shard in other.shards}
        gone |= set(step.shards) - later
        assert len({unit.layer for unit in step.units if unit.layer is not None}) <= 1
    assert met == gone == set(NAMES)
    assert make_steps(plan, needs, done=[unit.name for unit in plan.units], hashed=NAMES) == ()
    assert [step.shards for step in make_steps(plan, needs, done=[unit.name for unit in plan.units])] == [
        (name,) for name in NAMES
    ]


def step(*shards: str) -> Step:
    return Step((), shards)


def test_least_staging_by_hand() -> None:
    lengths = {"a": 10, "b": 20, "c": 5}
    steps = [step("a"), step("a", "b"), step("c")]
    assert least_staging(steps, lengths, {}, release=True) == 30
    assert least_staging(steps, lengths, {}, release=False) == 35
    assert least_staging(steps, lengths, {"c": 5}, release=True) == 35  # lies there until the last step
    assert least_staging(steps, lengths, {"c": 2}, release=True) == 32  # a part of it
    assert least_staging(steps, lengths, {"d": 100}, release=True) == 100 + 30  # not known: it stays
    assert least_staging(steps[:2], {**lengths, "c": 5}, {"c": 5}, release=True) == 30  # used up: it goes at once
    assert least_staging([], lengths, {}, release=True) == 0


def test_peak_of_release_by_hand() -> None:
    plan, needs = planned()
    steps = make_steps(plan, needs)
    whole = plan.trunk_bytes + plan.expert_bytes
    assert peak_of_release(plan, steps, {}, 7, "trunk.bin") == 7 + whole
    freed = peak_of_release(plan, steps, dict.fromkeys(NAMES, 10**9), 7, "trunk.bin")
    first = {unit.file for unit in steps[0].units}
    assert freed == 7 + sum(plan.file_bytes(name) for name in first)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("200GiB", 200 << 30), ("1.5 KiB", 1536), ("2kb", 2000), ("0.5TB", 500_000_000_000), ("7B", 7)],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text, where="--x") == size


@pytest.mark.parametrize(
    "text", ["", "-1", "GiB", "1.5", "1e9", "1 PiB", "0", "9" * 30, "99999999999TiB", "1.2.3", "\u0661"]
)
def test_size_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text, where="--x")
