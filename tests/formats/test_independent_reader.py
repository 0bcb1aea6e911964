"""A reader written from SPEC.md alone decodes packed containers to the same bits as ours."""

from pathlib import Path

import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.container import open_container
from formats.families import bind
from formats.layout import Matrix
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.planning.selection import parse_selection
from packer.recipe.recipe import load_recipe, override
from tests.support import independent_reader as independent

DATA = Path(__file__).parent.parent / "data"
CASES = {
    "rvq": ("k3-small", "kimi-k3", ["experts.entries=32"], "1"),
    "rvq, one codebook set a matrix": (
        "k3-small",
        "kimi-k3",
        ["experts.entries=16", "experts.stages=2", "experts.codebooks=matrix", "experts.max_rel_error=0.6"],
        "2",
    ),
    "mxfp4": ("k3-tiny", "kimi-k3", [], "1"),
    "group_int": ("kimi-linear-tiny", "kimi-linear", ["experts.codec=group_int", "experts.bits=4"], "3"),
    "raw": ("kimi-linear-tiny", "kimi-linear-lossless", [], "4"),
}


@pytest.fixture(scope="module", params=sorted(CASES))
def container_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, recipe, settings, layers = CASES[request.param]
    if "experts.codec=group_int" in settings:
        text = '{codec = "group_int", bits = 4, group = 64, max_rel_error = 0.3}'
        settings = [f"experts={text}"]
    checkpoint = open_checkpoint(DATA / name)
    model = bind(checkpoint)
    plan = make_plan(
        checkpoint,
        model,
        override(load_recipe(recipe), settings),
        selection=parse_selection(layers, None, model.architecture),
    )
    out = tmp_path_factory.mktemp("independent") / "out.moepack"
    pack(checkpoint, model, plan, out, jobs=2)
    with open_container(out) as container:
        (info,) = container.manifest.layers
        assert {row.codec.label for row in container.rows(info.layer)} == {request.param.split(",")[0]}
    return out


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and ours.tobytes() == np.ascontiguousarray(theirs, np.float32).tobytes()


def test_experts_decode_to_the_same_bits(container_path: Path) -> None:
    manifest = independent.read_manifest(container_path)
    with open_container(container_path) as container:
        for info in container.manifest.layers:
            for row in (container.rows(info.layer)[0], container.rows(info.layer)[-1]):
                theirs = independent.decode_record(
                    independent.read_record(container_path, manifest, info.layer, row.expert)
                )
                record = container.record(info.layer, row.expert)
                for matrix in Matrix:
                    assert same_bits(record.matrix(matrix), theirs[matrix]), (info.layer, row.expert, matrix)


def test_trunk_tensors_decode_to_the_same_bits(container_path: Path) -> None:
    manifest = independent.read_manifest(container_path)
    with open_container(container_path) as container:
        tensors = container.manifest.tensors
        assert tensors
        for info in tensors:
            assert same_bits(
                container.tensor_values(info), independent.decode_tensor(container_path, manifest, info.name)
            ), info.name


def test_container_ids_agree(container_path: Path) -> None:
    with open_container(container_path) as container:
        assert independent.read_manifest(container_path)["container_id"] == container.container_id
