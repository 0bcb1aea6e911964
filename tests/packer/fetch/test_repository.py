"""Whole repositories: what is taken, what is refused before the first byte, checks, receipts, and the command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import EnvironmentProblem, FormatError, IntegrityError, Interrupted, MoepackError, UsageError
from packer.fetch.hub import list_repository, open_hub
from packer.fetch.listing import RECEIPT_NAME, WORK_DIR
from packer.fetch.local import RESERVE_BYTES, check_space
from packer.fetch.provenance import Provenance, provenance_of
from packer.fetch.receipt import read_receipt, write_receipt
from packer.fetch.repository import FetchResult, Outlook, Wishes, check_repository, fetch_repository
from packer.fetch.retry import Limits
from packer.fetch.transfer import Conditions
from packer.shards import hash_shard
from packer.storage.lock import exclusive
from tests.support.hub_server import COMMIT, OTHER_COMMIT, Fault, HubServer, serve
from tests.support.repositories import folder_repository, shard, small_repository

ROOT = Path(__file__).parent.parent.parent.parent
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
QUICK = Limits(first_delay=0.001, longest_delay=0.002, stall_seconds=30, attempts=4, connect_seconds=30)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve(small_repository()) as server:
        yield server


def fetch(hub: HubServer, folder: Path, revision: str | None = None, **options: Any) -> FetchResult:
    access = open_hub(hub.endpoint)
    listing = list_repository(access, hub.repository, revision=revision, limits=QUICK)
    conditions = replace(options.pop("conditions", Conditions()), limits=QUICK)
    announce = options.pop("announce", None)
    return fetch_repository(access, listing, folder, wishes=Wishes(**options), conditions=conditions, announce=announce)


def check(hub: HubServer, folder: Path) -> list[tuple[str, str]]:
    listing = list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK)
    return [(item.where, item.what) for item in check_repository(listing, folder).problems]


def contents(folder: Path) -> dict[str, bytes]:
    hidden = (RECEIPT_NAME, WORK_DIR)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in hidden
    }


def command(hub: HubServer, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in PROXIES}
    clean.pop("HF_TOKEN", None)
    return subprocess.run(
        [sys.executable, "-m", "packer", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**clean, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.endpoint, **environment},
        check=False,
        timeout=120,
    )


# What is taken


@pytest.mark.parametrize("jobs", [1, 4])
def test_everything_comes_along(hub: HubServer, tmp_path: Path, jobs: int) -> None:
    outlooks: list[Outlook] = []
    result = fetch(hub, tmp_path / "model", jobs=jobs, announce=outlooks.append)
    assert contents(tmp_path / "model") == hub.files
    assert result.listing.commit == COMMIT
    assert result.received_bytes == sum(len(data) for data in hub.files.values())
    assert not (tmp_path / "model" / WORK_DIR).exists()
    (outlook,) = outlooks
    assert outlook.missing_bytes == sum(len(data) for name, data in hub.files.items() if name != INDEX)


def test_second_run_transfers_nothing(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "model")
    before = hub.sent
    assert fetch(hub, tmp_path / "model").received_bytes == 0
    assert fetch(hub, tmp_path / "model", rehash=True).received_bytes == 0
    assert hub.sent == before


def test_what_was_downloaded_by_other_means_is_hashed_and_kept(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / SECOND).write_bytes(hub.files[SECOND])
    fetch(hub, tmp_path)
    assert hub.bodies(SECOND) == []
    assert contents(tmp_path) == hub.files


def test_foreign_file_is_not_overwritten(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"mine")
    with pytest.raises(UsageError, match="in the way"):
        fetch(hub, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"mine"


def test_damaged_file_of_ours_is_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    path = tmp_path / SECOND
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch(hub, tmp_path).received_bytes == 0  # length and time vouch for it
    assert [where for where, _ in check(hub, tmp_path)] == [SECOND]
    assert fetch(hub, tmp_path, rehash=True).received_bytes == len(hub.files[SECOND])
    assert check(hub, tmp_path) == []


def test_fet_06_pointer_from_a_clone_is_replaced(hub: HubServer, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 200000\n"
    (tmp_path / SECOND).write_text(pointer)
    assert next(what for where, what in check(hub, tmp_path) if where == SECOND).startswith("is a Git LFS pointer")
    fetch(hub, tmp_path)
    assert contents(tmp_path) == hub.files


def test_weights_that_the_index_does_not_name_are_left_out(hub: HubServer, tmp_path: Path) -> None:
    hub.files |= {"consolidated.safetensors": shard(9, 5000), "pytorch_model.bin": b"pickle", "x/a.gguf": b"GGUF"}
    result = fetch(hub, tmp_path / "some")
    assert [file.path for file in result.selection.skipped] == [
        "consolidated.safetensors",
        "pytorch_model.bin",
        "x/a.gguf",
    ]
    fetch(hub, tmp_path / "all", everything=True)
    assert contents(tmp_path / "all") == hub.files


def test_single_file_without_an_index(tmp_path: Path) -> None:
    with serve({"model.safetensors": shard(0, 5000), "config.json": b"{}"}) as hub:
        fetch(hub, tmp_path)
        assert contents(tmp_path) == hub.files
        assert check(hub, tmp_path) == []


@pytest.mark.parametrize("files", [{"pytorch_model.bin": b"x"}, {"README.md": b"x"}])
def test_no_safetensors(tmp_path: Path, files: dict[str, bytes]) -> None:
    with serve(files) as hub, pytest.raises(FormatError, match="no checkpoint in safetensors"):
        fetch(hub, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_index_that_names_what_is_not_there(hub: HubServer, tmp_path: Path) -> None:
    del hub.files[SECOND]
    with pytest.raises(FormatError, match=SECOND):
        fetch(hub, tmp_path)


# Failure cases


def test_fet_07_branch_that_moved(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(status=404) if path == SECOND else None
    with pytest.raises(EnvironmentProblem):
        fetch(hub, tmp_path, jobs=1)
    hub.every = lambda path: None
    hub.commit = OTHER_COMMIT
    with pytest.raises(UsageError, match=COMMIT) as caught:
        fetch(hub, tmp_path)
    assert f"--revision {COMMIT}" in (caught.value.hint or "")
    with pytest.raises(UsageError):
        check(hub, tmp_path)
    hub.commit = COMMIT
    fetch(hub, tmp_path, revision=COMMIT)
    assert contents(tmp_path) == hub.files


def test_fet_07_commit_whose_files_changed(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.files[SECOND] = shard(77, 200_000)
    with pytest.raises(FormatError, match=SECOND):
        fetch(hub, tmp_path)


def test_fet_07_other_repository(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.repository = "owner/another"
    with pytest.raises(UsageError, match="owner/model, is owner/another"):
        fetch(hub, tmp_path)


def test_fet_09_every_file_gets_the_same_retries(hub: HubServer, tmp_path: Path) -> None:
    hub.faults = {name: [Fault(status=500), Fault(status=500)] for name in hub.files}
    fetch(hub, tmp_path)
    assert contents(tmp_path) == hub.files


@pytest.mark.parametrize("name", ["tokenizer/tiktoken.model", "un expected #1.txt", SECOND, INDEX])
def test_fet_09_file_that_never_comes_is_named(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.every = lambda path: Fault(status=500) if path == name else None
    with pytest.raises(EnvironmentProblem) as caught:
        fetch(hub, tmp_path)
    assert name in caught.value.line()


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/x",
        "C:\\x",
        "a\\..\\b",
        "a/../b",
        "a//b",
        "nul.json",
        "x\n",
        "x\u202e",
        "Config.json",
        "config.json/x",
        RECEIPT_NAME,
        f"{WORK_DIR}/lock",
        f"{WORK_DIR.upper()}/x",
    ],
)
def test_fet_10_unsafe_names(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.files[name] = b"x"
    with pytest.raises(FormatError):
        fetch(hub, tmp_path / "model")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "change",
    [
        {"size": None},
        {"size": -1},
        {"size": 1 << 60},
        {"size": "5"},
        {"blobId": None},
        {"blobId": "xyz"},
        {"lfs": {"size": 5, "sha256": "0", "pointerSize": 1}},
        {"lfs": {"size": True, "sha256": "0" * 64, "pointerSize": 1}},
        {"lfs": {"size": 5, "sha256": None, "pointerSize": 1}},
    ],
)
def test_listing_with_numbers_out_of_form(hub: HubServer, tmp_path: Path, change: dict[str, Any]) -> None:
    hub.listed = lambda siblings: [
        {**entry, **change} if entry["rfilename"] == "config.json" else entry for entry in siblings
    ]
    with pytest.raises(FormatError, match=r"config\.json"):
        fetch(hub, tmp_path / "model")


def test_fet_11_too_little_space(hub: HubServer, tmp_path: Path) -> None:
    total = sum(len(data) for data in hub.files.values())
    room = 2 * 200_000
    with pytest.raises(EnvironmentProblem) as caught:
        fetch(hub, tmp_path / "model", free=lambda path: room)
    assert str(room) in caught.value.line()
    assert str(total + RESERVE_BYTES) in caught.value.line()
    assert hub.sent == 0
    assert list(tmp_path.iterdir()) == []


def test_fet_11_what_is_there_needs_no_space(hub: HubServer, tmp_path: Path) -> None:
    hub.faults = {SECOND: [Fault(drop_at=100_000)]}
    hub.every = lambda path: Fault(status=503) if path == SECOND else None
    with pytest.raises(EnvironmentProblem):
        fetch(hub, tmp_path, jobs=1)
    hub.every = lambda path: None
    present = {name for name in hub.files if (tmp_path / name).exists()}
    missing = sum(len(data) for name, data in hub.files.items() if name not in present) - 100_000
    with pytest.raises(EnvironmentProblem):
        fetch(hub, tmp_path, free=lambda path: missing - 1 + RESERVE_BYTES)
    fetch(hub, tmp_path, free=lambda path: missing + RESERVE_BYTES)
    assert contents(tmp_path) == hub.files


def test_fet_11_unknown_is_not_full(hub: HubServer, tmp_path: Path) -> None:
    outlooks: list[Outlook] = []
    fetch(hub, tmp_path, free=lambda path: None, announce=outlooks.append)
    assert [outlook.space_known for outlook in outlooks] == [False]
    with pytest.raises(EnvironmentProblem, match="0 bytes available"):
        check_space(tmp_path, 1, free=lambda path: 0)
    assert check_space(tmp_path, 0, free=lambda path: 0)  # nothing to write


def test_fet_12_check_of_a_folder_with_an_index_only(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(hub.files[INDEX])
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    assert sorted(check(hub, tmp_path)) == sorted((name, "is absent") for name in hub.files if name != INDEX)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before


def test_fet_12_check_without_an_index(hub: HubServer, tmp_path: Path) -> None:
    assert sorted(check(hub, tmp_path)) == sorted((name, "is absent") for name in hub.files)
    (tmp_path / INDEX).write_bytes(b"{")
    assert {where for where, _ in check(hub, tmp_path)} == set(hub.files)


def test_fet_12_check_tells_lengths_and_bytes(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / SECOND).write_bytes(bytes(200_000))
    (tmp_path / ".gitattributes").unlink()
    (tmp_path / ".gitattributes").mkdir()
    found = dict(check(hub, tmp_path))
    assert found.keys() == {"config.json", SECOND, ".gitattributes"}
    assert found["config.json"] == "has 2 bytes instead of 22"
    assert "other bytes" in found[SECOND]


def test_rel_06_released_shard_is_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    receipt = read_receipt(tmp_path)
    assert receipt is not None
    (tmp_path / SECOND).unlink()
    write_receipt(tmp_path, receipt.with_released(SECOND))
    before = hub.sent
    assert fetch(hub, tmp_path).released == (SECOND,)
    assert hub.sent == before
    assert check(hub, tmp_path) == [(SECOND, "was released after a pack had used it")]
    assert fetch(hub, tmp_path, released=True).fetched == (SECOND,)
    assert contents(tmp_path) == hub.files


def test_rel_06_receipt_calls_an_absent_file_present(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / SECOND).unlink()
    assert fetch(hub, tmp_path).fetched == (SECOND,)


def test_one_fetcher_a_folder(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / WORK_DIR).mkdir()
    with exclusive(tmp_path / WORK_DIR / "lock"), pytest.raises(EnvironmentProblem, match="another process"):
        fetch(hub, tmp_path)


def test_stopped(hub: HubServer, tmp_path: Path) -> None:
    conditions = Conditions()
    hub.every = lambda path: Fault(stall_at=1000) if path == SECOND else None
    calls = []

    def announce(outlook: Outlook) -> None:
        calls.append(outlook)
        conditions.stop.set()

    with pytest.raises(Interrupted):
        fetch(hub, tmp_path, conditions=conditions, announce=announce)
    conditions.stop.clear()
    hub.every = lambda path: None
    fetch(hub, tmp_path)
    assert contents(tmp_path) == hub.files


# The listing


def test_listing_is_asked_for_again(hub: HubServer) -> None:
    hub.listing_faults = [503, 429]
    told: list[str] = []
    assert list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK, tell=told.append).commit == COMMIT
    assert [re.search(r"503|429", line)[0] for line in told] == ["503", "429"]  # type: ignore[index]
    assert all(re.search(r"asking again in \d+ s$", line) for line in told)


@pytest.mark.parametrize(
    "answer", [b"<html>log in</html>", b"[]", b"{}", b'{"id": "x", "sha": "main", "siblings": []}']
)
def test_listing_that_is_none(hub: HubServer, answer: bytes) -> None:
    hub.listing_faults = [answer] * 9
    with pytest.raises(EnvironmentProblem):
        list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK)


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a b", "https://huggingface.co/a/b", "-x/y"])
def test_name_that_is_none(hub: HubServer, name: str) -> None:
    with pytest.raises(UsageError):
        list_repository(open_hub(hub.endpoint), name, limits=QUICK)


def test_unknown_repository_and_revision(hub: HubServer) -> None:
    with pytest.raises(UsageError, match="no such repository"):
        list_repository(open_hub(hub.endpoint), "owner/none", limits=QUICK)
    with pytest.raises(UsageError, match="no such revision"):
        list_repository(open_hub(hub.endpoint), hub.repository, revision="v9", limits=QUICK)
    assert list_repository(open_hub(hub.endpoint), hub.repository, revision="refs/pr/1", limits=QUICK).commit == COMMIT


def test_credentials(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK).commit == COMMIT
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(MoepackError):
        list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK)


def test_proxy(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual variables are honoured: nothing here could resolve the name of this hub."""
    monkeypatch.setenv("http_proxy", hub.endpoint.replace("http://", "http://user:pass%20word@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    access = replace(open_hub(hub.endpoint), endpoint="http://hub.invalid")
    listing = list_repository(open_hub(hub.endpoint), hub.repository, limits=QUICK)
    fetch_repository(access, listing, tmp_path, conditions=Conditions(limits=QUICK))
    assert contents(tmp_path) == hub.files
    assert hub.bodies("config.json")[0].headers["host"].startswith("hub.invalid")
    assert hub.bodies("config.json")[0].headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="


# The receipt


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"version": 1', '"version": true'),
        lambda text: text.replace('"wanted": true', '"wanted": 1', 1),
        lambda text: text.replace('"format"', '"more": 1, "format"'),
        lambda text: text.replace('"config.json"', '"../config.json"'),
        lambda text: text.replace('"path": "config.json"', '"path": "empty.txt"'),
        lambda text: text.replace(COMMIT, "main"),
        lambda text: text.replace('"mtime_ns": 1', '"mtime_ns": 1.5, "x": 1', 1),
        lambda text: text.replace('"state": "present"', '"state": "gone"', 1),
    ],
)
def test_damaged_receipt(hub: HubServer, tmp_path: Path, spoil: Any) -> None:
    fetch(hub, tmp_path)
    path = tmp_path / RECEIPT_NAME
    text = path.read_text(encoding="utf-8")
    path.write_text(spoil(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(FormatError):
        read_receipt(tmp_path)


def test_receipt_knows_every_digest(hub: HubServer, tmp_path: Path) -> None:
    assert read_receipt(tmp_path) is None
    fetch(hub, tmp_path)
    receipt = read_receipt(tmp_path)
    assert receipt is not None
    assert receipt.expected_sha256 == {name: hashlib.sha256(data).hexdigest() for name, data in hub.files.items()}


# The command


def test_command(hub: HubServer, tmp_path: Path) -> None:
    done = command(hub, "fetch", "owner/model", "--to", str(tmp_path / "a b"), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert contents(tmp_path / "a b") == hub.files
    assert (document["commit"], document["files"], document["complete"]) == (COMMIT, len(hub.files), True)
    assert document["bytes"] == document["received_bytes"] == sum(len(data) for data in hub.files.values())
    again = command(hub, "fetch", "owner/model", "--to", str(tmp_path / "a b"))
    assert again.returncode == 0
    assert f"there already: {len(hub.files)} files" in again.stderr
    good = command(hub, "fetch", "owner/model", "--to", str(tmp_path / "a b"), "--check", "--json")
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True)
    (tmp_path / "a b" / SECOND).unlink()
    bad = command(hub, "fetch", "owner/model", "--to", str(tmp_path / "a b"), "--check")
    assert bad.returncode == 1
    assert f"problem     {SECOND}: is absent" in bad.stdout


def test_command_offline(hub: HubServer, tmp_path: Path) -> None:
    place = str(tmp_path / "model")
    nothing = command(hub, "fetch", "owner/model", "--to", place, HF_HUB_OFFLINE="1")
    assert nothing.returncode == 4
    assert "HF_HUB_OFFLINE" in nothing.stderr
    assert not (tmp_path / "model").exists()
    assert command(hub, "fetch", "owner/model", "--to", place).returncode == 0
    for options in ([], ["--check"], ["--revision", "main"], ["--revision", COMMIT]):
        done = command(hub, "fetch", "owner/model", "--to", place, *options, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
    (tmp_path / "model" / SECOND).unlink()
    lacking = command(hub, "fetch", "owner/model", "--to", place, HF_HUB_OFFLINE="1")
    assert lacking.returncode == 4
    assert SECOND in lacking.stderr
    assert command(hub, "fetch", "owner/model", "--to", place, "--revision", "v2", HF_HUB_OFFLINE="1").returncode == 4


def test_command_escapes_the_page(hub: HubServer, tmp_path: Path) -> None:
    page = b"<html>\x1b]0;owned\x07" + b"." * 16_000
    hub.every = lambda path: Fault(body=page) if path == SECOND else None
    done = command(hub, "fetch", "owner/model", "--to", str(tmp_path / "model"))
    assert done.returncode == 4
    assert "\x1b" not in done.stderr
    assert "\\x1b" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["fetch"], 2), (["fetch", "a/b/c"], 2), (["fetch", "owner/none"], 2), (["fetch", "owner/model", "--to", ""], 2)],
)
def test_command_usage(hub: HubServer, arguments: list[str], code: int) -> None:
    assert command(hub, *arguments).returncode == code


def test_hub_library_is_imported_by_fetch_alone() -> None:
    source = "import sys, packer.commands; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0


# What a plan and a pack make of a receipt


@pytest.fixture(scope="module")
def fetched_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fetched") / "tiny"
    with serve({**folder_repository(ROOT / "tests" / "data" / "k3-tiny"), "README.md": b"tiny"}) as hub:
        fetch(hub, folder, jobs=2)
    return folder


def provenance(folder: Path, **said: str) -> Provenance:
    with open_checkpoint(folder) as checkpoint:
        return provenance_of(checkpoint, **said)


def test_provenance_is_the_receipt(fetched_tiny: Path) -> None:
    found = provenance(fetched_tiny)
    assert (found.repository, found.commit) == ("owner/model", COMMIT)
    assert found.sha256 == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in fetched_tiny.glob("*.safetensors")
    }
    assert provenance(fetched_tiny, repository="owner/model", commit=COMMIT) == found


@pytest.mark.parametrize("said", [{"repository": "a/b"}, {"commit": OTHER_COMMIT}])
def test_provenance_is_not_contradicted(fetched_tiny: Path, said: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="contradicts"):
        provenance(fetched_tiny, **said)


def test_provenance_without_a_receipt() -> None:
    found = provenance(ROOT / "tests" / "data" / "k3-tiny", repository="a/b")
    assert (found.repository, found.commit, dict(found.sha256)) == ("a/b", None, {})


def test_provenance_is_not_claimed_for_changed_files(fetched_tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(fetched_tiny, folder)  # other times: small files are compared
    assert provenance(folder) == provenance(fetched_tiny)
    config = folder / "config.json"
    config.write_bytes(config.read_bytes().replace(b"{", b"{ ", 1)[:-1])
    with pytest.raises(FormatError):
        provenance(folder)
    config.write_bytes((fetched_tiny / "config.json").read_bytes())
    (folder / "README.md").unlink()
    with pytest.raises(FormatError, match=r"README\.md"):
        provenance(folder)


def test_shard_that_is_not_the_repository_s(fetched_tiny: Path) -> None:
    name, digest = next(iter(provenance(fetched_tiny).sha256.items()))
    assert hash_shard(fetched_tiny, name, stop=threading.Event(), expected=digest).sha256 == digest
    with pytest.raises(IntegrityError, match="repository"):
        hash_shard(fetched_tiny, name, stop=threading.Event(), expected="0" * 64)
