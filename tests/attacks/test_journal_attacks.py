"""Journals and work folders that lie or are damaged, each with the verdict of ``moepack pack`` when it is to continue.

Whoever can write the journal can make its checks right, so most cases do. Nothing outside of the output is touched,
nothing of it is believed that the plan does not say, and ``--restart`` always leads to the right container.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from blake3 import blake3

from formats.errors import EnvironmentProblem
from formats.manifest import WORK_DIR
from packer.commands import run
from packer.preflight import JOURNAL_NAME
from packer.storage.system import SYSTEM
from tests.attacks.alter import folder, gone, link, pipe, set_members
from tests.support.packs import Ground, prepare

JOURNAL = f"{WORK_DIR}/{JOURNAL_NAME}"
Entries: TypeAlias = list[Any]
Attack: TypeAlias = Callable[[Path], object]
CONTINUED, USAGE, CLOSED, ENVIRONMENT = 0, 2, 3, 4


@dataclass(frozen=True)
class Case:
    """What is changed in the output of an unfinished pack, and exit code and message of the command that continues."""

    exit_code: int
    message: str
    attack: Attack


def line(number: int, entry: Any) -> bytes:
    """A line as the page of the journal says: number, entry, and the check of all that stands before."""
    text = entry if isinstance(entry, str) else json.dumps(entry, separators=(",", ":"))
    body = f'{{"seq":{number},"entry":{text}'.encode()
    return body + b',"check":"' + blake3(body).hexdigest()[:16].encode() + b'"}\n'


def read(out: Path) -> Entries:
    return [json.loads(text)["entry"] for text in (out / JOURNAL).read_bytes().splitlines()]


def entries(change: Callable[[Entries], object]) -> Attack:
    """Change the entries; numbers and checks are made right."""

    def attack(out: Path) -> None:
        found = read(out)
        before = json.dumps(found)
        change(found)
        assert json.dumps(found) != before
        (out / JOURNAL).write_bytes(b"".join(line(number, entry) for number, entry in enumerate(found)))

    return attack


def appended(*more: Any) -> Attack:
    """Further entries, as JSON values or as text."""

    def attack(out: Path) -> None:
        count = len(read(out))
        with (out / JOURNAL).open("ab") as file:
            file.write(b"".join(line(count + number, entry) for number, entry in enumerate(more)))

    return attack


def raw(change: Callable[[bytes], bytes]) -> Attack:
    """Change the bytes of the journal."""

    def attack(out: Path) -> None:
        before = (out / JOURNAL).read_bytes()
        after = change(before)
        assert after != before
        (out / JOURNAL).write_bytes(after)

    return attack


def first(kind: str, **members: Any) -> Attack:
    """Set members of the first entry of a kind, of units the first with records.

    ``...`` removes a member, a function gets the old value.
    """

    def change(found: Entries) -> None:
        entry = next(item for item in found if item["kind"] == kind and (kind != "unit" or item["records"]))
        set_members(entry, members)

    return entries(change)


def identity(*place: str, value: Any) -> Attack:
    def change(found: Entries) -> None:
        target = found[0]["identity"]
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value

    return entries(change)


def swapped(text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    return b"".join(lines)


def flipped(number: int, at: int) -> Callable[[bytes], bytes]:
    def change(text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        changed = bytearray(lines[number])
        changed[at] ^= 1
        lines[number] = bytes(changed)
        return b"".join(lines)

    return change


def endless(out: Path) -> None:
    os.truncate(out / JOURNAL, 1 << 36)


def lock_is_a_link(out: Path) -> None:
    (out.parent / "mine").write_text("mine")
    (out / WORK_DIR / "lock").unlink(missing_ok=True)
    (out / WORK_DIR / "lock").symlink_to(out.parent / "mine")


def temporary_is_a_link(out: Path) -> None:
    (out.parent / "mine").write_text("mine")
    (out / "trunk.bin.part").unlink()
    (out / "trunk.bin.part").symlink_to(out.parent / "mine")


def trunk_in_the_way(out: Path) -> None:
    """Of somebody else: the journal does not say that it was about to be renamed."""
    entries(lambda found: found.pop())(out)
    (out / "trunk.bin").write_bytes(b"mine")


def tensor_lied(out: Path) -> None:
    def change(found: Entries) -> None:
        entry = next(item for item in found if item.get("tensors"))
        entry["tensors"][0][1] = DIGEST

    entries(change)(out)


def bank_changed(out: Path) -> None:
    data = bytearray((out / "experts/layer-00001.bank").read_bytes())
    data[5000] ^= 1
    (out / "experts/layer-00001.bank").write_bytes(data)


def temporary_shorter(out: Path) -> None:
    os.truncate(out / "trunk.bin.part", 4096)


def temporary_changed(out: Path) -> None:
    with (out / "trunk.bin.part").open("r+b") as file:
        file.seek(4100)
        file.write(b"other")


DIGEST = "ab" * 32
DAMAGED = "journal.jsonl at byte .*: journal is damaged in line "
FOREIGN = "not of this plan"
RECORD = [0, DIGEST, [0.1, 0.1, 0.1], 0.1]

CASES: dict[str, Case] = {
    # the file
    "wrt-09 empty": Case(CLOSED, "journal.jsonl at byte 0: not a journal", raw(lambda text: b"")),
    "wrt-09 only zeros": Case(CLOSED, "not a journal", raw(lambda text: bytes(len(text)))),
    "wrt-09 cut in its first line": Case(
        CLOSED, "not a journal: its first line is not whole", raw(lambda text: text[:100])
    ),
    "wrt-09 cut in its last line": Case(CONTINUED, "continued", raw(lambda text: text[:-9])),
    "wrt-09 hole in its last line": Case(CONTINUED, "continued", raw(lambda text: text[:-60] + bytes(40) + text[-20:])),
    "wrt-09 bit flipped in line 2": Case(CLOSED, f"{DAMAGED}2: line does not check", raw(flipped(1, 30))),
    "wrt-09 bit flipped in a check": Case(CLOSED, f"{DAMAGED}3: line does not check", raw(flipped(2, -5))),
    "wrt-09 lines exchanged": Case(CLOSED, f"{DAMAGED}2: line is out of sequence .expected 1, found 2", raw(swapped)),
    "wrt-09 line lost": Case(
        CLOSED,
        f"{DAMAGED}3: line is out of sequence",
        raw(lambda t: b"".join(t.splitlines(True)[:2] + t.splitlines(True)[3:])),
    ),
    "wrt-09 line twice": Case(
        CLOSED,
        f"{DAMAGED}3: line is out of sequence",
        raw(lambda t: b"".join(t.splitlines(True)[:2] + t.splitlines(True)[1:])),
    ),
    "carriage returns": Case(CLOSED, "journal", raw(lambda text: text.replace(b"\n", b"\r\n"))),
    "another program's log": Case(CLOSED, "journal.jsonl", raw(lambda text: b'{"level":"info"}\n{"level":"info"}\n')),
    "a link": Case(ENVIRONMENT, "journal.jsonl", link(JOURNAL, "../../aside")),
    "a pipe": Case(CLOSED, "journal is not a regular file", pipe(JOURNAL)),
    "a folder": Case(CLOSED, "journal is not a regular file", folder(JOURNAL)),
    "64 GiB of holes": Case(CLOSED, "journal is too long .*found 68719476736", endless),
    "gone": Case(USAGE, "file is in the way, and the journal does not know it", gone(JOURNAL)),
    # the identity
    "wrt-10 another recipe": Case(USAGE, "recipe.name was .*mine", identity("recipe", "name", value="mine")),
    "wrt-10 another version": Case(USAGE, "settings differ", identity("tool", value="9.9.9")),
    "version 2": Case(CLOSED, "unknown version .expected 1, found 2", entries(lambda e: e[0].update(version=2))),
    "version true": Case(CLOSED, "unknown version .*found True", entries(lambda e: e[0].update(version=True))),
    "no identity": Case(CLOSED, "does not begin with an identity", entries(lambda e: e.pop(0))),
    "identity is a list": Case(CLOSED, "does not begin with an identity", entries(lambda e: e[0].update(identity=[]))),
    "identity twice": Case(CLOSED, "entry is malformed", entries(lambda e: e.append(e[0]))),
    # entries of a wrong shape
    "unknown kind": Case(CLOSED, "entry is malformed", appended({"kind": "shell", "run": "rm"})),
    "no kind": Case(CLOSED, "entry is malformed", appended({"name": "trunk.bin"})),
    "unknown member": Case(
        CLOSED, "entry is malformed.*unknown field", appended({"kind": "begun", "name": "trunk.bin", "x": 1})
    ),
    "duplicate member": Case(
        CLOSED, "duplicate key 'name'", appended('{"kind":"begun","name":"a","name":"trunk.bin"}')
    ),
    "bottomless": Case(CLOSED, "nested too deeply", appended("[" * 100_000 + "]" * 100_000)),
    "endless digits": Case(
        CLOSED, "number is too long", appended('{"kind":"done","name":"trunk.bin","bytes":' + "9" * 5000 + "}")
    ),
    "surrogate": Case(CLOSED, "unpaired surrogate", appended('{"kind":"begun","name":"\\ud800"}')),
    "name of 5000 bytes": Case(CLOSED, "entry is malformed", appended({"kind": "begun", "name": "x" * 5000})),
    "length below zero": Case(CLOSED, "entry is malformed", first("done", bytes=-1)),
    "length as text": Case(CLOSED, "entry is malformed", first("done", bytes="4096")),
    "digest of 31 bytes": Case(CLOSED, "entry is malformed", first("done", blake3="ab" * 31)),
    "error below zero": Case(
        CLOSED, "entry is malformed", first("unit", records=lambda old: [[*old[0][:3], -1.0], *old[1:]])
    ),
    # entries that the plan does not know
    "file that climbs out": Case(
        CLOSED, FOREIGN, appended({"kind": "done", "name": "../mine", "bytes": 4, "blake3": DIGEST})
    ),
    "file that is absolute": Case(CLOSED, FOREIGN, appended({"kind": "begun", "name": "/etc/passwd"})),
    "manifest begun": Case(CLOSED, f"{FOREIGN}|journal", appended({"kind": "begun", "name": "manifest.json.part"})),
    "shard that climbs out": Case(
        CLOSED,
        FOREIGN,
        appended({"kind": "shard", "name": "../mine", "bytes": 4, "sha256": DIGEST, "stamp": [0, 0, 0, 0]}),
    ),
    "shard of another length": Case(CLOSED, "shard of another length", first("shard", bytes=lambda old: old + 1)),
    "unit that is not": Case(CLOSED, FOREIGN, appended({"kind": "unit", "unit": "layer.99:0-1", "records": [RECORD]})),
    "unit without its records": Case(CLOSED, FOREIGN, first("unit", records=[])),
    "unit with a record too many": Case(CLOSED, FOREIGN, first("unit", records=lambda old: [*old, RECORD])),
    "unit with another record": Case(
        CLOSED, FOREIGN, first("unit", records=lambda old: [[old[0][0] + 1, *old[0][1:]], *old[1:]])
    ),
    "bank of another length": Case(CLOSED, "file of another length", first("done", bytes=4096)),
    # what stands on the disk
    "wrt-11 bank lost": Case(CONTINUED, "continued", gone("experts/layer-00001.bank")),
    "bank changed on the disk": Case(CONTINUED, "continued", bank_changed),
    "bank with the digest of a lie": Case(CONTINUED, "", first("done", blake3=DIGEST)),
    "temporary cut": Case(CONTINUED, "continued", temporary_shorter),
    "temporary changed": Case(ENVIRONMENT, "other bytes are here than were written", temporary_changed),
    "tensor with the digest of a lie": Case(ENVIRONMENT, "other bytes are here than were written", tensor_lied),
    "temporary is a link": Case(CONTINUED, "continued", temporary_is_a_link),
    "lock is a link": Case(ENVIRONMENT, "lock", lock_is_a_link),
    "file in the way": Case(USAGE, "trunk.bin: file is in the way", trunk_in_the_way),
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return prepare(tmp_path_factory.mktemp("ground") / "ground")


@pytest.fixture(scope="module")
def unfinished(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose banks are done and whose trunk is about to be renamed."""

    def rename(old: Path, new: Path) -> None:
        if new.name == "trunk.bin":
            raise OSError(5, "Input/output error")
        SYSTEM.rename(old, new)

    out = tmp_path_factory.mktemp("unfinished") / "out"
    with pytest.raises(EnvironmentProblem):
        ground.pack(out, system=replace(SYSTEM, rename=rename))
    return out


@pytest.mark.parametrize("case", list(CASES))
def test_journal(
    case: str, ground: Ground, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = CASES[case]
    out = tmp_path / "out"
    shutil.copytree(unfinished, out)
    (tmp_path / "mine").write_text("mine")
    wanted.attack(out)
    outside = others(tmp_path)
    capsys.readouterr()
    code = run(["pack", str(ground.source), str(out), "--jobs", "1"])
    text = "".join(capsys.readouterr())
    assert "internal error" not in text, text
    assert re.search(wanted.message, text), text
    assert code == wanted.exit_code, text
    if code == CONTINUED:
        ground.check_finished(out)
    else:
        assert not (out / "manifest.json").exists()
    assert others(tmp_path) == outside


def others(directory: Path) -> dict[str, bytes]:
    """What lies beside the output."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# A folder in the journal's place was made by nobody but the user, who has to remove it.
RESTARTABLE = [name for name, case in CASES.items() if case.exit_code != CONTINUED and name != "a folder"]


@pytest.mark.parametrize("case", RESTARTABLE[::4])
def test_restart_leads_out_of_it(case: str, ground: Ground, unfinished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unfinished, out)
    CASES[case].attack(out)
    assert run(["pack", str(ground.source), str(out), "--jobs", "1", "--restart", "--quiet"]) == 0
    ground.check_finished(out)
