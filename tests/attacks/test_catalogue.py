"""The catalogue as a whole: how many malformations it has, and that each is a case of its own with a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.attacks import (
    test_configuration_attacks as configuration,
)
from tests.attacks import (
    test_index_attacks as index,
)
from tests.attacks import (
    test_journal_attacks as journal,
)
from tests.attacks import (
    test_manifest_attacks as manifest,
)
from tests.attacks import (
    test_recipe_attacks as recipe,
)
from tests.attacks import (
    test_record_attacks as record,
)
from tests.attacks import (
    test_source_attacks as shards,
)
from tests.attacks import (
    test_source_promise_attacks as promises,
)
from tests.attacks import (
    test_source_set_attacks as sets,
)
from tests.attacks import (
    test_trunk_attacks as trunk,
)

# What is attacked: name of a case to (exit code, what the message must say).
CATALOGUE: dict[str, dict[str, tuple[int, str]]] = {
    "shards": {name: (3, message) for name, (_, message) in shards.HEADER_ATTACKS.items()},
    "sets of shards and indexes of weights": {name: (3, message) for name, (_, message) in sets.SET_ATTACKS.items()},
    "configurations": {name: (3, message) for name, (_, message) in promises.PROMISE_ATTACKS.items()}
    | {name: (3, tensor) for name, (_, _, tensor) in configuration.SWITCHED_OFF.items()}
    | {name: (3, member) for name, (_, _, member) in configuration.STRAY.items()}
    | {f"refused {member}": (3, member) for members in configuration.REFUSED.values() for member in members},
    "manifest.json": {name: (case.exit_code, case.message) for name, case in manifest.CASES.items()},
    "index.bin": {name: (case.exit_code, case.message) for name, case in index.CASES.items()},
    "records": {name: (case.exit_code, case.message) for name, case in record.CASES.items()}
    | {name: (3, message) for name, (_, _, message) in record.UNDECODABLE.items()},
    "trunk.bin, assets, directory": {name: (case.exit_code, case.message) for name, case in trunk.CASES.items()},
    "journal and work folder": {name: (case.exit_code, case.message) for name, case in journal.CASES.items()},
    "recipes": {name: (case.exit_code, case.message) for name, case in recipe.CASES.items()},
}

AT_LEAST = 150
EXIT_CODES = {0, 1, 2, 3, 4}


def cases() -> Iterator[tuple[str, str, int, str]]:
    """(what is attacked, name, exit code, message)."""
    for kind, each in CATALOGUE.items():
        for name, (code, message) in each.items():
            yield kind, name, code, message


def test_the_catalogue_is_large_enough() -> None:
    """Of sources and of containers alike, not of one of them alone."""
    counts = {kind: len(each) for kind, each in CATALOGUE.items()}
    assert sum(counts.values()) >= 2 * AT_LEAST
    assert sum(counts[kind] for kind in list(CATALOGUE)[3:]) >= AT_LEAST
    assert min(counts.values()) >= 25
    print(f"attacks: {sum(counts.values())} named malformations: {counts}")


def test_every_case_has_a_verdict() -> None:
    for kind, name, code, message in cases():
        assert code in EXIT_CODES, (kind, name)
        assert len(message) >= 3 or code in (0, 4), (kind, name)
        re.compile(message)


def test_the_page_counts_right() -> None:
    """The table of README.md is this catalogue."""
    page = (Path(__file__).parent / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| `[^`]+`(?:, `[^`]+`)* \| ([0-9]+) \|", page, re.MULTILINE))
    assert rows == {kind: str(len(each)) for kind, each in CATALOGUE.items()}
    assert f"**{sum(len(each) for each in CATALOGUE.values())}**" in page


def test_every_module_of_attacks_is_in_the_catalogue() -> None:
    modules = {path.stem for path in Path(__file__).parent.glob("test_*_attacks.py")}
    listed = (configuration, index, journal, manifest, recipe, record, shards, promises, sets, trunk)
    assert modules == {module.__name__.rpartition(".")[2] for module in listed}
