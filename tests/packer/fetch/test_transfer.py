"""One file from a hub that misbehaves: resume, retries, and every way in which an answer can be wrong."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.errors import EnvironmentProblem, FormatError, IntegrityError, Interrupted, MoepackError, UsageError
from packer.fetch.hub import list_repository, open_hub
from packer.fetch.listing import WORK_DIR, Listing, RemoteFile
from packer.fetch.partial import open_partial, partial_path
from packer.fetch.retry import Limits
from packer.fetch.transfer import Conditions, Fetched, fetch_file
from tests.support.hub_server import COMMIT, OTHER_COMMIT, PAGE, Fault, HubServer, serve
from tests.support.repositories import shard

NAME = "model.safetensors"
SIZE = 3_000_000
DATA = shard(1, SIZE)
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + hashlib.sha256(DATA).hexdigest().encode() + b"\n"
    b"size 3000000\n"
)
# A busy machine may take a while to answer: only tests of stalls are impatient.
QUICK = Limits(first_delay=0.001, longest_delay=0.002, stall_seconds=30, attempts=4, connect_seconds=30)
IMPATIENT = replace(QUICK, stall_seconds=0.5)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve({NAME: DATA, "config.json": b"{}", "page.html": PAGE}) as server:
        yield server


def fetch(hub: HubServer, folder: Path, name: str = NAME, **conditions: Any) -> Fetched:
    access = open_hub(hub.endpoint)
    listing = list_repository(access, hub.repository, limits=QUICK)
    return fetch_file(
        access, listing, name, folder, conditions=Conditions(**{"limits": QUICK, "rng": random.Random(0), **conditions})
    )


def begin(folder: Path, data: bytes, etag: str | None = None) -> Path:
    """A partial file with these bytes, as an earlier run leaves it."""
    file = RemoteFile(NAME, SIZE, hashlib.sha256(DATA).hexdigest(), None)
    partial = open_partial(folder, file)
    partial.restart(etag)
    partial.append(data, needed=len(data))
    partial.close()
    return partial_path(folder, file)


def check(folder: Path, name: str = NAME, data: bytes = DATA) -> None:
    assert (folder / name).read_bytes() == data
    assert [item.name for item in (folder / WORK_DIR).iterdir()] == []


def refused(hub: HubServer, folder: Path, kind: type[MoepackError], **conditions: Any) -> MoepackError:
    with pytest.raises(MoepackError) as caught:
        fetch(hub, folder, **conditions)
    assert type(caught.value) is kind, caught.value
    assert not (folder / NAME).exists()
    return caught.value


def test_plain(hub: HubServer, tmp_path: Path) -> None:
    reported: list[int] = []
    fetched = fetch(hub, tmp_path, report=reported.append)
    check(tmp_path)
    assert fetched.sha256 == hashlib.sha256(DATA).hexdigest()
    assert (fetched.bytes, fetched.received_bytes, sum(reported)) == (SIZE, SIZE, SIZE)
    assert [request.headers["accept-encoding"] for request in hub.bodies(NAME)] == ["identity"]


def test_small_file_is_checked_by_its_git_blob(hub: HubServer, tmp_path: Path) -> None:
    fetch(hub, tmp_path, "config.json")
    check(tmp_path, "config.json", b"{}")
    hub.faults["config.json"] = [Fault(flip=0), Fault(flip=1)]
    with pytest.raises(IntegrityError, match="git blob"):
        fetch(hub, tmp_path, "config.json")
    assert (tmp_path / "config.json").read_bytes() == b"{}"  # the right one was not replaced


def test_page_that_belongs_to_the_repository(hub: HubServer, tmp_path: Path) -> None:
    hub.faults["page.html"] = [Fault(headers={"Content-Type": "text/html"})]
    fetch(hub, tmp_path, "page.html")
    check(tmp_path, "page.html", PAGE)


def test_unknown_name(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        fetch(hub, tmp_path, "nothing.safetensors")


def test_fet_01_resumes_inside_a_shard(hub: HubServer, tmp_path: Path) -> None:
    etag = f'"{hashlib.md5(DATA).hexdigest()}"'
    begin(tmp_path, DATA[:1_800_000], etag)
    fetched = fetch(hub, tmp_path)
    check(tmp_path)
    (request,) = hub.bodies(NAME)
    assert (request.range, request.headers["if-range"]) == ("bytes=1800000-", etag)
    assert fetched.received_bytes == SIZE - 1_800_000


def test_fet_01_resumes_after_drops(hub: HubServer, tmp_path: Path) -> None:
    hub.faults[NAME] = [Fault(drop_at=at) for at in (100, 1, 1_000_000, 0)]
    assert fetch(hub, tmp_path, limits=replace(QUICK, attempts=9)).received_bytes == SIZE
    check(tmp_path)
    ranges = [request.range for request in hub.bodies(NAME)]
    assert ranges == [None, "bytes=100-", "bytes=101-", "bytes=1000101-", "bytes=1000101-"]


@pytest.mark.parametrize("ignored", [Fault(ignore_range=True), Fault(ignore_range=True, no_length=True)])
def test_fet_02_whole_body_instead_of_the_range(hub: HubServer, tmp_path: Path, ignored: Fault) -> None:
    begin(tmp_path, b"x" * 1000)  # would be wrong in front of the whole body
    hub.faults[NAME] = [ignored]
    assert fetch(hub, tmp_path).received_bytes == SIZE
    check(tmp_path)


def test_fet_02_object_with_another_etag(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA[:1000], '"older"')
    assert fetch(hub, tmp_path).received_bytes == SIZE
    check(tmp_path)


def test_fet_02_server_that_ignores_if_range(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA[:1000], '"older"')
    hub.faults[NAME] = [Fault(ignore_condition=True)]
    assert fetch(hub, tmp_path).received_bytes == SIZE
    check(tmp_path)
    assert [request.range for request in hub.bodies(NAME)] == ["bytes=1000-", None]


def test_range_that_begins_elsewhere(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA[:1000])
    hub.faults[NAME] = [Fault(shift=5)]
    assert fetch(hub, tmp_path).received_bytes == SIZE - 1000
    check(tmp_path)


def test_fet_03_complete_partial_is_published_without_a_request(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA)
    assert fetch(hub, tmp_path).received_bytes == 0
    check(tmp_path)
    assert hub.bodies(NAME) == []


def test_fet_03_complete_partial_with_wrong_bytes_starts_over(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, b"x" * SIZE)
    assert fetch(hub, tmp_path).received_bytes == SIZE
    check(tmp_path)


def test_fet_03_partial_longer_than_the_file(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA + b"x")
    fetch(hub, tmp_path)
    check(tmp_path)


def test_fet_03_range_not_satisfiable(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA[:1000])
    hub.faults[NAME] = [Fault(status=416)]
    fetch(hub, tmp_path)
    check(tmp_path)
    assert [request.range for request in hub.bodies(NAME)] == ["bytes=1000-", None]


def test_fet_04_flipped_byte_is_fetched_once_more(hub: HubServer, tmp_path: Path) -> None:
    hub.faults[NAME] = [Fault(flip=2_000_000)]
    assert fetch(hub, tmp_path).received_bytes == 2 * SIZE
    check(tmp_path)


@pytest.mark.parametrize("keep", [True, False])
def test_fet_04_flipped_twice(hub: HubServer, tmp_path: Path, keep: bool) -> None:
    hub.every = lambda path: Fault(flip=2_000_000)
    reported: list[int] = []
    error = refused(hub, tmp_path, IntegrityError, keep_wrong=keep, report=reported.append)
    wrong = DATA[:2_000_000] + bytes([DATA[2_000_000] ^ 1]) + DATA[2_000_001:]
    assert hashlib.sha256(DATA).hexdigest() in error.line()
    assert hashlib.sha256(wrong).hexdigest() in error.line()
    assert error.exit_code == 3
    assert len(hub.bodies(NAME)) == 2
    assert sum(reported) == 0
    left = [item for item in (tmp_path / WORK_DIR).iterdir() if item.suffix != ".etag"]
    assert [item.read_bytes() for item in left] == ([wrong] if keep else [])


@pytest.mark.parametrize("length", [{}, {"Content-Length": None, "Content-Type": "text/html; charset=utf-8"}])
def test_fet_05_page_instead_of_a_shard(hub: HubServer, tmp_path: Path, length: dict[str, str | None]) -> None:
    hub.every = lambda path: Fault(body=PAGE, headers=length)
    error = refused(hub, tmp_path, EnvironmentProblem)
    assert "<!DOCTYPE html>" in error.line()
    assert len(hub.bodies(NAME)) == 1


def test_fet_05_page_without_length_and_type(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(body=PAGE, no_length=True)
    assert "page" in refused(hub, tmp_path, EnvironmentProblem).line()


def test_fet_06_pointer_instead_of_a_shard(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(body=POINTER)
    line = refused(hub, tmp_path, FormatError).line()
    assert hashlib.sha256(DATA).hexdigest() in line
    assert "3000000 bytes" in line


def test_fet_06_pointer_that_was_committed_as_a_file(tmp_path: Path) -> None:
    with serve({NAME: POINTER}) as hub:
        assert "3000000 bytes" in refused(hub, tmp_path, FormatError).line()


def test_fet_07_server_answers_with_another_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(headers={"X-Repo-Commit": OTHER_COMMIT})
    line = refused(hub, tmp_path, EnvironmentProblem).line()
    assert COMMIT in line
    assert OTHER_COMMIT in line


@pytest.mark.parametrize("header", [{"X-Linked-Etag": f'"{"0" * 64}"'}, {"X-Linked-Size": "5"}])
def test_fet_07_server_announces_another_object(hub: HubServer, tmp_path: Path, header: dict[str, str | None]) -> None:
    hub.faults[NAME] = [Fault(at_hub=True, headers=header)]
    refused(hub, tmp_path, IntegrityError)


def test_fet_08_passing_refusals(hub: HubServer, tmp_path: Path) -> None:
    hub.faults[NAME] = [Fault(status=429, headers={"Retry-After": "0"}), Fault(status=503), Fault(drop_at=5)]
    fetch(hub, tmp_path)
    check(tmp_path)


def test_fet_08_one_byte_now_and_then_is_a_stall(hub: HubServer, tmp_path: Path) -> None:
    begin(tmp_path, DATA[:1000])
    hub.every = lambda path: Fault(trickle=0.05)
    error = refused(hub, tmp_path, EnvironmentProblem, limits=replace(IMPATIENT, attempts=2))
    assert "stalled" in error.line()
    (left,) = (tmp_path / WORK_DIR).glob("*.part")
    kept = left.read_bytes()
    assert len(kept) >= 1000
    assert DATA.startswith(kept)


def test_fet_08_silence_is_a_stall(hub: HubServer, tmp_path: Path) -> None:
    hub.faults[NAME] = [Fault(stall_at=1000)]
    fetch(hub, tmp_path, limits=replace(IMPATIENT, attempts=20))
    check(tmp_path)
    assert [request.range for request in hub.bodies(NAME)][:2] == [None, "bytes=1000-"]


def test_fet_08_budget_is_bounded_and_stated(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(status=503)
    assert "4 attempts in a row" in refused(hub, tmp_path, EnvironmentProblem).line()
    assert len(hub.bodies(NAME)) == 4


def test_fet_08_asked_to_wait_longer_than_the_budget(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(status=429, headers={"Retry-After": "86400"})
    assert "86400" in refused(hub, tmp_path, EnvironmentProblem).line()
    assert len(hub.bodies(NAME)) == 1


def test_endless_progress_without_an_end_is_bounded(hub: HubServer, tmp_path: Path) -> None:
    """No ranges and a drop after a megabyte each time: bytes arrive for ever, the file never."""
    hub.every = lambda path: Fault(ignore_range=True, drop_at=1_500_000)
    refused(hub, tmp_path, EnvironmentProblem)
    assert len(hub.bodies(NAME)) <= 5


def test_expired_address_is_asked_for_again(hub: HubServer, tmp_path: Path) -> None:
    hub.faults[NAME] = [Fault(status=403)]
    fetch(hub, tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("status", [401, 403, 404, 410, 418])
def test_refusal_at_the_hub_is_final(hub: HubServer, tmp_path: Path, status: int) -> None:
    hub.faults[NAME] = [Fault(status=status, at_hub=True)]
    assert NAME in refused(hub, tmp_path, EnvironmentProblem).line()


def test_compressed_answer(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(gzip=True)
    assert "gzip" in refused(hub, tmp_path, EnvironmentProblem).line()


@pytest.mark.parametrize("body", [DATA[:-1], DATA + b"x", b""])
def test_wrong_length(hub: HubServer, tmp_path: Path, body: bytes) -> None:
    hub.every = lambda path: Fault(body=body)
    refused(hub, tmp_path, EnvironmentProblem)


def test_token_stays_at_its_origin(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    fetch(hub, tmp_path)
    fetch(hub, tmp_path, "config.json")
    assert "authorization" not in hub.bodies(NAME)[0].headers
    assert hub.bodies("config.json")[0].headers["authorization"] == "Bearer hf_secret"
    assert "hf_secret" not in repr(open_hub(hub.endpoint))


def test_stop_while_the_server_is_silent(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(stall_at=1000)
    stop = threading.Event()
    with pytest.raises(Interrupted):
        fetch(hub, tmp_path, stop=stop, limits=replace(QUICK, stall_seconds=60), report=lambda count: stop.set())
    (left,) = (tmp_path / WORK_DIR).glob("*.part")
    assert left.read_bytes() == DATA[:1000]


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/x", "file:///etc/passwd", "http://[", "//", "http://h:99999/"])
def test_redirect_to_nowhere(hub: HubServer, tmp_path: Path, location: str) -> None:
    hub.every = lambda path: Fault(status=302, headers={"Location": location})
    refused(hub, tmp_path, EnvironmentProblem)


def test_redirects_without_end(hub: HubServer, tmp_path: Path) -> None:
    hub.every = lambda path: Fault(status=302, headers={"Location": "?again"})
    assert "redirects" in refused(hub, tmp_path, EnvironmentProblem).line()


def test_nobody_listens(hub: HubServer, tmp_path: Path) -> None:
    access = open_hub(hub.endpoint)
    listing: Listing = list_repository(access, hub.repository, limits=QUICK)
    nobody = open_hub("http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match="refused"):
        fetch_file(nobody, listing, NAME, tmp_path, conditions=Conditions(limits=QUICK))


def test_link_in_the_place_of_the_partial_is_not_followed(hub: HubServer, tmp_path: Path) -> None:
    path = begin(tmp_path, b"")
    path.unlink()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    refused(hub, tmp_path, EnvironmentProblem)
    assert victim.read_bytes() == b"precious"
