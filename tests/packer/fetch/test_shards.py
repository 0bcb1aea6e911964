"""A repository as the source of a pack: planned from headers alone, then shards that come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import FormatError, IntegrityError, MoepackError, UsageError
from formats.families import bind
from formats.headers import header_path, pack_header, read_kept_header
from packer.fetch.hub import list_repository, open_hub
from packer.fetch.listing import WORK_DIR
from packer.fetch.receipt import read_receipt
from packer.fetch.retry import Limits
from packer.fetch.shards import open_shard_source
from packer.fetch.transfer import Conditions
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.recipe.recipe import default_recipe
from tests.support.hub_server import COMMIT, Fault, HubServer, serve
from tests.support.repositories import folder_repository, shard, small_repository

DATA = Path(__file__).parent.parent.parent / "data"
TINY = DATA / "k3-tiny"
QUICK = Conditions(
    limits=Limits(first_delay=0.001, longest_delay=0.002, stall_seconds=30, attempts=4), rng=random.Random(0)
)
FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve(small_repository()) as server:
        yield server


def source(hub: HubServer, folder: Path, **conditions: Any) -> Any:
    access = open_hub(hub.endpoint)
    listing = list_repository(access, hub.repository, limits=QUICK.limits)
    return open_shard_source(access, listing, folder, conditions=replace(QUICK, **conditions))


def shard_requests(hub: HubServer) -> int:
    return sum(request.sent for request in hub.requests if request.path.endswith(".safetensors"))


def test_opening_brings_headers_and_no_bodies(hub: HubServer, tmp_path: Path) -> None:
    with source(hub, tmp_path) as opened, open_checkpoint(tmp_path, headers=opened.headers) as checkpoint:
        assert checkpoint.has_headers
        assert [item.bytes for item in checkpoint.shards] == [200_000] * 3
        assert set(checkpoint.assets) == {"config.json", "empty.txt", "tokenizer/tiktoken.model", "un expected #1.txt"}
        headers = sum(
            8 + int.from_bytes(data[:8], "little") for name, data in hub.files.items() if "safet" in name[-11:]
        )
        assert shard_requests(hub) == headers
        assert opened.held_bytes() == 0
        with pytest.raises(FormatError, match="absent"):
            checkpoint.read("layers.0.weight")
    with source(hub, tmp_path):
        assert shard_requests(hub) == headers  # kept


def test_shards_come_and_go(hub: HubServer, tmp_path: Path) -> None:
    with source(hub, tmp_path) as opened, open_checkpoint(tmp_path, headers=opened.headers) as checkpoint:
        tensor = checkpoint.tensors["layers.0.weight"]
        expected = hub.files[tensor.shard][tensor.offset :]
        assert not opened.present(FIRST)
        fetched = opened.fetch(FIRST)
        assert fetched.sha256 == opened.expected_sha256[FIRST]
        assert opened.present(FIRST)
        assert opened.held_bytes() == opened.shard_bytes(FIRST) == 200_000
        assert checkpoint.read("layers.0.weight") == expected
        assert opened.fetch(FIRST).received_bytes == 0
        (tmp_path / FIRST).unlink()
        opened.note_released(FIRST)
        assert not opened.present(FIRST)
        with pytest.raises(FormatError):
            checkpoint.read("layers.0.weight")
        opened.fetch(FIRST)
        assert checkpoint.read("layers.0.weight", 5, 10) == expected[5:10]
        (tmp_path / FIRST).unlink()
        opened.note_released(FIRST)
    receipt = read_receipt(tmp_path)
    assert receipt is not None
    assert receipt.released == (FIRST,)
    assert (receipt.listing.repository, receipt.listing.commit) == (hub.repository, COMMIT)
    assert receipt.expected_sha256[FIRST] == fetched.sha256


def test_partial_shard_counts_as_held(hub: HubServer, tmp_path: Path) -> None:
    with source(hub, tmp_path) as opened:
        hub.faults = {FIRST: [Fault(drop_at=50_000)]}
        hub.every = lambda path: Fault(status=503) if path == FIRST else None
        with pytest.raises(MoepackError):
            opened.fetch(FIRST)
        assert opened.held_bytes() == 50_000
        hub.every = lambda path: None
        assert opened.fetch(FIRST).received_bytes == 150_000
        assert opened.held_bytes() == 200_000


def test_unknown_shard(hub: HubServer, tmp_path: Path) -> None:
    with source(hub, tmp_path) as opened:
        for name in ("config.json", "../x", "none.safetensors"):
            with pytest.raises(UsageError):
                opened.fetch(name)


def test_wrong_shard_takes_no_second_place(hub: HubServer, tmp_path: Path) -> None:
    with source(hub, tmp_path) as opened:
        hub.every = lambda path: Fault(flip=100_000)
        with pytest.raises(IntegrityError):
            opened.fetch(FIRST)
        assert opened.held_bytes() == 0
        assert not list((tmp_path / WORK_DIR).glob("*.wrong"))


def test_header_of_another_shard_is_found_when_the_shard_comes(hub: HubServer, tmp_path: Path) -> None:
    """Ranges carry no digest: what they brought is compared with the shard itself."""
    with source(hub, tmp_path) as opened:
        start = read_start(hub.files[FIRST])
        other = start.replace(b'"U8"', b'"I8"')
        header_path(opened.headers, FIRST).write_bytes(pack_header(other, 200_000))
        with open_checkpoint(tmp_path, headers=opened.headers) as checkpoint:
            opened.fetch(FIRST)
            with pytest.raises(FormatError, match="another header than planned"):
                checkpoint.read("layers.0.weight")


def read_start(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("fault", [Fault(ignore_range=True), Fault(drop_at=3), Fault(status=500), Fault(shift=1)])
def test_headers_from_a_server_in_trouble(hub: HubServer, tmp_path: Path, fault: Fault) -> None:
    hub.faults = {name: [fault, fault, fault] for name in hub.files if name.endswith(".safetensors")}
    with source(hub, tmp_path) as opened:
        for name, data in hub.files.items():
            if name.endswith(".safetensors"):
                assert header_path(opened.headers, name).read_bytes() == pack_header(read_start(data), len(data))


@pytest.mark.parametrize("length", [0, 1, 200_000, 100_000_001, 1 << 63, (1 << 64) - 1])
def test_src_02_header_length(hub: HubServer, tmp_path: Path, length: int) -> None:
    hub.files[FIRST] = length.to_bytes(8, "little") + hub.files[FIRST][8:]
    with pytest.raises(FormatError), source(hub, tmp_path):
        pass
    assert shard_requests(hub) < 10_000


def test_malformed_header_is_not_kept(hub: HubServer, tmp_path: Path) -> None:
    hub.files[FIRST] = hub.files[FIRST].replace(b'"U8"', b'"Q9"')
    with pytest.raises(FormatError), source(hub, tmp_path):
        pass
    assert not header_path(tmp_path / WORK_DIR / "headers", FIRST).exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-8] + bytes(8),
        lambda data: data[:-8] + b"\xff" * 8,
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:-8] + (200_001).to_bytes(8, "little"),
    ],
)
def test_damaged_kept_header(tmp_path: Path, spoil: Any) -> None:
    data = shard(0, 200_000)
    path = header_path(tmp_path, FIRST)
    path.write_bytes(pack_header(read_start(data), len(data)))
    kept = read_kept_header(tmp_path, FIRST)
    assert kept is not None
    assert kept[0].bytes == 200_000
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(FormatError):
        read_kept_header(tmp_path, FIRST)


def test_kept_header_that_is_a_link(tmp_path: Path) -> None:
    header_path(tmp_path, FIRST).symlink_to("/etc/passwd")
    with pytest.raises(MoepackError):
        read_kept_header(tmp_path, FIRST)
    assert read_kept_header(tmp_path, "another") is None


def test_plan_and_pack_equal_those_of_a_checkout(tmp_path: Path) -> None:
    """One shard after the other is fetched for the pack; the plan came before the first of them."""
    staging = tmp_path / "staging"
    with (
        serve(folder_repository(TINY)) as hub,
        source(hub, staging) as opened,
        open_checkpoint(staging, headers=opened.headers) as checkpoint,
    ):
        plan = plan_of(checkpoint)
        assert checkpoint.has_headers
        assert not list(staging.glob("*.safetensors"))
        for item in checkpoint.shards:
            opened.fetch(item.name)
        result = pack(checkpoint, bind(checkpoint), plan, tmp_path / "staged.moepack", jobs=2)
    with open_checkpoint(TINY) as checkpoint:
        whole = plan_of(checkpoint)
        assert plan.identity == whole.identity
        # A weight that the index does not name is a note about a checkout, and never fetched.
        assert {**plan.to_dict(), "notes": []} == {**whole.to_dict(), "notes": []}
        assert pack(checkpoint, bind(checkpoint), whole, tmp_path / "whole.moepack", jobs=2).container_id == (
            result.container_id
        )


def plan_of(checkpoint: Any) -> Any:
    model = bind(checkpoint)
    return make_plan(checkpoint, model, default_recipe(model.architecture.family), repository="a/b", commit=COMMIT)
