"""Statistics that weigh columns: which second moments count, and what packing makes of them."""

from __future__ import annotations

import json
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.codecs import rvq
from formats.container import open_container
from formats.errors import Interrupted, UsageError
from formats.families import MATRICES, bind
from formats.layout import Codec
from formats.source import SourceMatrix, read_matrix
from packer.commands import run
from packer.encoding.encode import encode_expert, peak_bytes
from packer.planning.plan import Plan, make_plan
from packer.recipe.recipe import load_recipe, override, plain, with_weighted_limit
from packer.statistics.column_weights import FLOOR, LEAST_TOKENS, column_weights, second_moment
from packer.statistics.file import LayerStatistics, Statistics, open_statistics, write_statistics
from packer.statistics.types import Provenance
from packer.verify.verify import verify
from tests.support import independent_reader as independent
from tests.support import shards
from tests.support.prunes import made_up_statistics, packed, plan_for, planned, provenance_of

DATA = Path(__file__).parent.parent / "data"
K3 = DATA / "k3-tiny"
SMALL = DATA / "k3-small"
RVQ = ("experts.entries=16", "experts.max_rel_error=1.0", "fitting.effort=fast")
KEEP = {1: (0, 1, 4, 7)}  # four experts are enough to see what happens


# Which second moments


def small_statistics(path: Path, change: dict[str, np.ndarray] | None = None) -> Statistics:
    """Layers 1 to 6 of k3-tiny: 1,000 tokens, 4 experts each. Expert 0 sees all of them, 1 to 3 what is left for them.

    Expert 4 has 256 tokens, expert 5 255, experts 6 to 9 the rest; all others none.
    """
    provenance: Provenance = provenance_of(K3, {"text": 1000})
    tokens = np.zeros((1, 16), np.int64)
    tokens[0, :10] = [1000, 1000, 400, 400, 256, 255, 200, 200, 200, 89]
    assert tokens.sum() == 4000
    seen = tokens[0]
    layer = LayerStatistics(
        tokens,
        tokens * 0.25,
        tokens * 0.5,
        np.stack([tokens * 0.125, tokens * 0.375]),
        1000 * np.arange(1.0, 65.0),  # mean squares 1 to 64
        4000 * np.arange(96.0, 0.0, -1.0),
        (seen[:, None] * np.full(64, 3.0)).astype(np.float32),
        (seen[:, None] * np.full(96, 5.0)).astype(np.float32),
    )
    layer = replace(layer, **(change or {}))
    write_statistics(path, provenance, range(1, 7), [layer] * 6)
    return open_statistics(path)


def test_an_experts_own_moments_count_from_256_tokens_on(tmp_path: Path) -> None:
    statistics = small_statistics(tmp_path / "s")
    assert LEAST_TOKENS == 256
    for matrix in ("gate", "up"):
        own = second_moment(statistics, 3, 4, matrix)
        assert own is not None
        assert own.dtype == np.float32
        assert np.array_equal(own, np.full(64, 3, np.float32))
        for seldom in (5, 9, 15):
            shared = second_moment(statistics, 3, seldom, matrix)
            assert np.array_equal(shared, np.arange(1, 65, dtype=np.float32))
    assert np.array_equal(second_moment(statistics, 3, 4, "down"), np.full(96, 5, np.float32))
    assert np.array_equal(second_moment(statistics, 3, 5, "down"), np.arange(96, 0, -1, dtype=np.float32))


def test_silent_columns_still_count(tmp_path: Path) -> None:
    """A thousandth and less of the mean is raised to that; silent inputs say nothing, and the layer's count instead."""
    squares = np.zeros((16, 64), np.float32)
    squares[0] = 0
    squares[1, 7] = 1000 * 64
    silent = np.zeros((16, 96), np.float32)
    statistics = small_statistics(
        tmp_path / "s", {"expert_input": squares, "expert_activation": silent, "activation": np.zeros(96)}
    )
    moment = second_moment(statistics, 1, 1, "gate")
    assert moment is not None
    assert moment[7] == 64.0
    assert np.array_equal(np.delete(moment, 7), np.full(63, 2.0**-10, np.float32))  # the mean is 1
    assert FLOOR == 2.0**-10
    assert np.array_equal(second_moment(statistics, 1, 0, "gate"), np.arange(1, 65, dtype=np.float32))
    assert second_moment(statistics, 1, 0, "down") is None
    gate, up, down = column_weights(statistics, 1, 1) or pytest.fail("there are weights")
    assert np.array_equal(gate, up)
    assert np.array_equal(down, np.ones(96, np.float32))
    nothing = small_statistics(
        tmp_path / "n",
        {name: np.zeros(shape) for name, shape in {"input": 64, "activation": 96}.items()}
        | {"expert_input": np.zeros((16, 64)), "expert_activation": silent},
    )
    assert column_weights(nothing, 1, 1) is None


def test_too_few_tokens_say_nothing(tmp_path: Path) -> None:
    provenance = provenance_of(K3, {"text": 255})
    tokens = np.zeros((1, 16), np.int64)
    tokens[0, :4] = 255
    one = tokens.astype(np.float64)
    sums = (np.ones(64), np.ones(96), np.zeros((16, 64)), np.zeros((16, 96)))
    layer = LayerStatistics(tokens, one, one, np.stack([one, 0 * one]), *sums)
    write_statistics(tmp_path / "s", provenance, range(1, 7), [layer] * 6)
    statistics = open_statistics(tmp_path / "s")
    assert second_moment(statistics, 1, 0, "gate") is None
    assert second_moment(statistics, 1, 0, "down") is not None  # 1,020 choices
    with pytest.raises(
        UsageError, match=r"too little text to weigh columns by .*expected at least 256 tokens, found 255"
    ):
        planned(K3, "experts.entries=2", statistics=statistics)


def test_matrices_that_share_codebooks_count_alike(tmp_path: Path) -> None:
    statistics = small_statistics(tmp_path / "s")
    weights = column_weights(statistics, 2, 15)
    assert weights is not None
    assert [len(part) for part in weights] == [64, 64, 96]
    assert [float(part.mean(dtype=np.float64)) for part in weights] == pytest.approx([1, 1, 1], abs=1e-6)
    assert weights[0][63] / weights[0][0] == pytest.approx(64, rel=1e-6)


# Packs


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return made_up_statistics(SMALL, tmp_path_factory.mktemp("statistics") / "small.safetensors", spread=1.5)


def make(statistics: Statistics | None, *settings: str, recipe: str | None = None) -> Plan:
    return planned(
        SMALL, *RVQ, *settings, recipe=recipe, layers="1", prune=plan_for(SMALL, KEEP), statistics=statistics
    )


@pytest.fixture(scope="module")
def pair(statistics: Statistics, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same experts packed without and with statistics."""
    folder = tmp_path_factory.mktemp("weighted")
    packed(SMALL, folder / "plain", make(None))
    result = packed(SMALL, folder / "weighted", make(statistics))
    assert len(result.weighted_errors) == 4
    return folder / "plain", folder / "weighted"


def weighted_error(container: Path, statistics: Statistics, expert: int, source: int) -> float:
    """By the source, an independent reader, and the made-up sums themselves."""
    manifest = independent.read_manifest(container)
    decoded = independent.decode_record(independent.read_record(container, manifest, 1, expert))
    layer = statistics.layer(1)
    lost = total = 0.0
    with open_checkpoint(SMALL) as checkpoint:
        for name, values in zip(MATRICES, decoded, strict=True):
            squares = (layer.expert_activation if name == "down" else layer.expert_input)[source].astype(np.float64)
            weights = np.maximum(squares, squares.mean() / 1024) / squares.mean()
            truth = read_matrix(checkpoint, bind(checkpoint), 1, source, name).to_float32().astype(np.float64)
            lost += float((weights * np.square(truth - values)).sum())
            total += float((weights * np.square(truth)).sum())
    return float(np.sqrt(lost / total))


def test_the_weighted_error_falls_at_the_same_bytes(pair: tuple[Path, Path], statistics: Statistics) -> None:
    plain_path, weighted_path = pair
    assert [statistics.tokens(1)[:, source].sum() >= 256 for source in KEEP[1][:3]] == [True] * 3
    for expert, source in enumerate(KEEP[1][:3]):
        before = weighted_error(plain_path, statistics, expert, source)
        after = weighted_error(weighted_path, statistics, expert, source)
        assert after < 0.85 * before
    with open_container(plain_path) as one, open_container(weighted_path) as other:
        assert one.manifest.experts.bytes == other.manifest.experts.bytes
        assert [row.digest for row in one.rows(1)] != [row.digest for row in other.rows(1)]


def test_recorded_errors_stay_plain_ones(pair: tuple[Path, Path], statistics: Statistics, tmp_path: Path) -> None:
    """Parity measures them again; the weighted ones are those that the pack reports."""
    report = verify(pair[1], level="parity", source=SMALL)
    assert report.problems == ()
    result = packed(SMALL, tmp_path / "out", make(statistics), jobs=1)
    expected = [weighted_error(pair[1], statistics, expert, source) for expert, source in enumerate(KEEP[1][:3])]
    assert [min(abs(found - error) for found in result.weighted_errors) for error in expected] == pytest.approx(
        [0, 0, 0], abs=1e-6
    )
    with open_container(pair[1]) as container:
        assert container.manifest.recipe["statistics"] == {"blake3": statistics.blake3}
        assert container.manifest.fitting.method == "joint least squares, effort fast, columns weighted"
        assert min(row.rel_error for row in container.rows(1)) > max(expected)


def test_jobs_and_interruptions_change_nothing(pair: tuple[Path, Path], statistics: Statistics, tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(Interrupted):
        packed(SMALL, tmp_path / "out", make(statistics), jobs=1, progress=lambda _: stop.set(), stop=stop)
    result = packed(SMALL, tmp_path / "out", make(statistics), jobs=3)
    assert len(result.weighted_errors) == 4  # those of earlier runs among them
    for file in pair[1].rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "out" / file.relative_to(pair[1])).read_bytes()


def test_other_statistics_on_resume_are_refused_by_name(statistics: Statistics, tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(Interrupted):
        packed(SMALL, tmp_path / "out", make(statistics), jobs=1, progress=lambda _: stop.set(), stop=stop)
    other = made_up_statistics(SMALL, tmp_path / "other", seed=1)
    message = rf'recipe\.statistics\.blake3 was "{statistics.blake3}", is "{other.blake3}"'
    with pytest.raises(UsageError, match=message):
        packed(SMALL, tmp_path / "out", make(other))
    with pytest.raises(UsageError, match=r"recipe\.statistics\.blake3 was .* is absent"):
        packed(SMALL, tmp_path / "out", make(None))


def test_a_recorded_recipe_calls_for_its_statistics(statistics: Statistics, tmp_path: Path) -> None:
    recipe = make(statistics).recipe
    with open_checkpoint(SMALL) as checkpoint:
        with pytest.raises(UsageError, match="resolved with statistics, and none are given"):
            make_plan(checkpoint, bind(checkpoint), recipe)
        with pytest.raises(UsageError, match="resolved with other statistics"):
            make_plan(
                checkpoint, bind(checkpoint), recipe, statistics=made_up_statistics(SMALL, tmp_path / "o", seed=1)
            )


# Refusals


@pytest.mark.parametrize(
    ("member", "value"),
    [("family", "kimi_linear"), ("hidden_layers", 9), ("experts_per_token", 3), ("config_blake3", "ab" * 32)],
)
def test_statistics_of_another_model(member: str, value: object, statistics: Statistics) -> None:
    """Their own reader cannot know it; figures are compared one by one."""
    model = msgspec.structs.replace(statistics.provenance.model, **{member: value})
    other = replace(statistics, provenance=msgspec.structs.replace(statistics.provenance, model=model))
    with pytest.raises(UsageError, match=f"{member}: statistics of another model"):
        make(other)


@pytest.mark.parametrize("change", [{"layers": (1, 2)}, {"inputs": 64}, {"width": 96}])
def test_statistics_of_other_shapes(change: dict[str, object], statistics: Statistics) -> None:
    with pytest.raises(UsageError, match=f"statistics of another model: {next(iter(change))} differ"):
        make(replace(statistics, **change))


def test_statistics_without_effect(statistics: Statistics) -> None:
    with pytest.raises(UsageError, match="statistics have no effect"):
        planned(SMALL, recipe="kimi-k3-lossless", statistics=statistics)
    with pytest.raises(UsageError, match="statistics have no effect"):
        planned(SMALL, layers="0", statistics=statistics)


def test_limits_are_about_plain_errors() -> None:
    recipe = load_recipe("kimi-k3")
    moved = with_weighted_limit(recipe, [])
    assert plain(moved) == plain(override(recipe, ["experts.max_rel_error=1.0", f"name={recipe.name}"])) | {
        "summary": recipe.summary
    }
    assert with_weighted_limit(recipe, ["experts.max_rel_error=0.3"]) == recipe
    lossless = load_recipe("kimi-k3-lossless")
    assert with_weighted_limit(lossless, []) == lossless


# The command line


def test_command_line_records_both(statistics: Statistics, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "experts.entries=16", "--layers", "2", "--stats", str(statistics.path), "--effort", "fast"]
    assert run(["plan", str(SMALL), *options, "--json", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["statistics"] == said["recipe"]["statistics"]["blake3"] == statistics.blake3
    assert said["recipe"]["experts"]["max_rel_error"] == 1.0
    assert "note: --stats raises the limit of expert errors to 1" in captured.err
    seldom = int((statistics.tokens(2).sum(axis=0) < 256).sum())
    assert seldom > 0
    assert (
        f"note: columns of 12 experts are weighted by the statistics; {seldom} of them, which fewer than 256 tokens"
        " chose, by those of their layer; the greedy search of effort fast gains by it only where columns differ much"
        in captured.err
    )
    assert run(["plan", str(SMALL), *options, "--json", "--jobs", "1", "--set", "experts.max_rel_error=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["experts"]["max_rel_error"] == 0.5
    without = [item for item in options if item not in ("--stats", str(statistics.path))]
    assert run(["plan", str(SMALL), *without, "--json", "--jobs", "1"]) == 0
    plain_plan = json.loads(capsys.readouterr().out)
    assert plain_plan["expert_bytes"] == said["expert_bytes"]
    assert plain_plan["estimated_seconds"] <= said["estimated_seconds"]
    out = str(tmp_path / "out")
    assert run(["pack", str(SMALL), out, *options, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "\nweighted      min" in shown
    assert "(of 12 experts, columns weighted)" in shown
    assert run(["pack", str(SMALL), str(tmp_path / "o"), "--stats", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err


# Memory


def test_memory_stays_below_the_stated_peak() -> None:
    shapes = ((768, 512), (768, 512), (512, 768))
    rng = np.random.default_rng(0)
    sources = []
    for rows, cols in shapes:
        tensors = shards.mxfp4(rng.standard_normal((rows, cols)).astype(np.float32))
        named = tuple((f"t{number}", tensor.data) for number, tensor in enumerate(tensors))
        sources.append(SourceMatrix(rows, cols, named, "mxfp4", bytes(32), "x"))
    weights = [np.exp(rng.standard_normal(cols)).astype(np.float32) for _, cols in shapes]
    parameters = rvq.Parameters(3, 16)
    held = sum(len(data) for source in sources for _, data in source.tensors)
    tracemalloc.start()
    try:
        encode_expert(
            sources, layer=1, expert=0, source_expert=0, codec=Codec.RVQ, parameters=parameters, seed=0, weights=weights
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + held < peak_bytes(Codec.RVQ, parameters, shapes, held)
