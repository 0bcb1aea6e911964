"""A short run of every fuzz target, the same inputs each time; ``make fuzz`` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from formats.errors import FormatError
from tests.fuzz import run
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import CORPUS, TARGETS, Target, taken


@pytest.mark.parametrize("name", list(TARGETS))
def test_mutated_inputs_are_taken_or_refused(name: str) -> None:
    target = TARGETS[name]
    count, good = run.runs(name, 5, lambda count: count >= target.runs)
    assert count == target.runs
    assert 0 < good < count, "mutations reach what lies behind the first check, and are noticed"
    print(f"fuzz: {name}: {count} inputs, {good} taken")


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_corpus_is_taken_but_for_what_once_did_harm(name: str) -> None:
    """Sound inputs are taken, those called ``harm-...`` refused."""
    files = sorted((CORPUS / name).iterdir())
    assert files
    for path in files:
        assert taken(TARGETS[name], path.read_bytes()) == (not path.name.startswith("harm-")), path.name


def test_every_target_has_a_corpus_of_small_files() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert max(sizes) < 64 << 10
    assert sum(sizes) < 512 << 10


def test_mutations_repeat() -> None:
    data = [mutated(b'{"a": 1}', [b"other"], random.Random(3), text=True) for _ in range(2)]
    assert data[0] == data[1]


def test_a_fault_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a parser that trips over a byte is found, and the input is kept."""

    def parse(data: bytes) -> None:
        if b"\x10" in data:
            raise ZeroDivisionError
        raise FormatError("refused")

    monkeypatch.setitem(TARGETS, "index", Target(parse))
    with pytest.raises(ZeroDivisionError) as caught:
        run.runs("index", 0, lambda count: count >= 10_000)
    assert b"\x10" in caught.value.fuzz_input  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    assert run.keep("index", b"harm").read_bytes() == b"harm"
