"""Containers of every released format version stay readable, and decode to the bits that they decoded to then."""

import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from formats.container import open_container
from formats.layout import Matrix
from packer.verify.verify import verify
from tests.golden.make import weights_digest

FOLDER = Path(__file__).parent
IDS = json.loads((FOLDER / "ids.json").read_text())


@pytest.mark.parametrize("name", sorted(IDS))
def test_golden_container_decodes_as_it_did(name: str) -> None:
    hasher = blake3()
    with open_container(FOLDER / name) as container:
        assert container.container_id == IDS[name]["container_id"]
        for info in container.manifest.layers:
            for row in container.rows(info.layer):
                record = container.record(info.layer, row.expert)
                for matrix in Matrix:
                    hasher.update(record.matrix(matrix).tobytes())
        for tensor in container.manifest.tensors:
            hasher.update(container.tensor_values(tensor).tobytes())
    assert hasher.hexdigest() == IDS[name]["weights"]


@pytest.mark.parametrize("name", sorted(IDS))
def test_independent_reader_still_agrees(name: str) -> None:
    assert weights_digest(FOLDER / name) == IDS[name]["weights"]


def test_golden_container_verifies(tmp_path: Path) -> None:
    """The one whose recipe explains its records; the other shows every codec in one layer.

    It is older than the rule that a recipe records the plan by which experts are dropped, which is a finding by now.
    """
    shutil.copytree(FOLDER / "v1-mixed", tmp_path / "copy")
    report = verify(tmp_path / "copy", level="hashes")
    found = [problem for problem in report.problems if "limit" not in problem.what]
    assert [(problem.where, problem.what) for problem in found] == [
        ("layer 3", "1 expert dropped, and no plan of the recipe says so")
    ]
    assert report.records_checked == 11


def test_every_golden_container_is_listed() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name.startswith("v")} == set(IDS)
