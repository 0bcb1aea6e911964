"""The page about a prune plan: its figures by hand, on statistics of two layers, four experts and two texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packer.commands import run
from packer.prune.job import prune
from packer.report.page import render
from packer.report.prune_figures import agreements, best_of, held_by_best, in_common, prune_figures, record_sizes
from packer.report.prune_page import SHOWN_TEXTS, prune_page
from packer.statistics.file import LayerStatistics, Provenance, Statistics, open_statistics, write_statistics
from packer.statistics.types import SampledModel, SampleLabel, SampleText
from tests.packer.report.pages import Parsed, check_self_contained

pytest.importorskip("matplotlib", reason="pages have drawings, which need the extra report")

# Shares of layer 1: a 1/2 1/4 1/8 1/8, b 1/8 1/8 1/4 1/2; of layer 2: a 1/2 1/4 1/8 1/8, b 1/2 1/8 1/4 1/8.
SALIENCY = (np.array([[8.0, 4, 2, 2], [1, 1, 2, 4]]), np.array([[4.0, 2, 1, 1], [4, 1, 2, 1]]))
EVEN = (np.array([[4.0, 2, 1, 1], [1, 1, 0, 0]]), SALIENCY[1] / 2)


def write_sums(
    path: Path,
    saliency: tuple[np.ndarray, ...],
    even: tuple[np.ndarray, ...],
    *,
    names: tuple[str, ...] = ("a", "b"),
    source: str = "there",
    texts: int = 1,
) -> Statistics:
    """Statistics with this saliency, every expert seen by as many tokens as any other."""
    labels, experts = saliency[0].shape
    tokens = 4 * experts
    digest = "ab" * 32
    listed = tuple(
        SampleLabel(
            name=name,
            tokens=tokens,
            texts=tuple(SampleText(name=f"{name}{number}.txt", bytes=10, blake3=digest) for number in range(texts)),
        )
        for name in names
    )
    model = SampledModel(
        family="kimi_k3",
        hidden_layers=len(saliency) + 1,
        experts=experts,
        experts_per_token=1,
        config_blake3="cd" * 32,
        source=source,
    )
    provenance = Provenance(model=model, labels=listed, window=8, tool="moepack test")
    sums = [
        LayerStatistics(
            np.full((labels, experts), 4),
            np.ones((labels, experts)),
            layer,
            np.array([half, layer - half]),
            np.ones(3),
            np.ones(2),
            np.ones((experts, 3), np.float32),
            np.ones((experts, 2), np.float32),
        )
        for layer, half in zip(saliency, even, strict=True)
    ]
    write_statistics(path, provenance, range(1, len(sums) + 1), sums)
    return open_statistics(path)


@pytest.fixture
def statistics(tmp_path: Path) -> Statistics:
    return write_sums(tmp_path / "stats", SALIENCY, EVEN)


def page_of(statistics: Statistics, keep: str = "2", mode: str = "uniform", sources: tuple[str, ...] = ()) -> bytes:
    return render(prune_page(statistics, prune(statistics, keep=keep, mode=mode, lossless="1", sources=sources)))


def test_concentration_and_retention_by_hand(statistics: Statistics) -> None:
    """Scores are means of both texts' shares: 5/16 3/16 3/16 5/16, and 1/2 3/16 3/16 1/8."""
    figures = prune_figures(statistics, prune(statistics, keep="2", mode="uniform", lossless="1", sources=()))
    assert figures.held.tolist() == [[0.3125, 0.625, 0.8125, 1.0], [0.5, 0.6875, 0.875, 1.0]]
    assert figures.kept.tolist() == [2, 2]
    assert figures.retained.tolist() == [0.625, 0.6875]


def test_overlap_by_hand(statistics: Statistics) -> None:
    """Layer 1: a keeps 0 and 1, b keeps 3 and 2; layer 2: 0 and 1, 0 and 2. Chance is 2 of 4."""
    figures = prune_figures(statistics, prune(statistics, keep="2", mode="uniform", lossless="1", sources=()))
    assert figures.overlap.tolist() == [[1.0, 0.25], [0.25, 1.0]]
    assert figures.layer_overlap is not None
    assert figures.layer_overlap.tolist() == [0.0, 0.5]
    assert figures.chance == 0.5


def test_agreement_by_hand(statistics: Statistics) -> None:
    """Layer 1 ranks 0 1 2 3 by even and 3 0 2 1 by odd windows; in layer 2 both halves are alike."""
    figures = prune_figures(statistics, prune(statistics, keep="2", mode="uniform", lossless="1", sources=()))
    assert figures.agreement is not None
    assert figures.agreement[0].tolist() == [0.0, 0.5, pytest.approx(2 / 3), 1.0]
    assert figures.agreement[1].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_chosen_sources_alone_count(statistics: Statistics) -> None:
    figures = prune_figures(statistics, prune(statistics, keep="2", mode="uniform", lossless="1", sources=("b",)))
    assert figures.held[0].tolist() == [0.5, 0.75, 0.875, 1.0]
    assert figures.agreement is not None
    assert figures.agreement[0].tolist() == [0.0, 0.0, pytest.approx(2 / 3), 1.0]  # even 0 1 2 3, odd 3 2 0 1
    assert figures.overlap.tolist() == [[1.0, 0.25], [0.25, 1.0]]  # of all sources all the same


def test_agreement_in_every_way_of_planning_is_that_of_the_plan(statistics: Statistics) -> None:
    """Two ways of counting: ranks here, sets where a plan is made."""
    for keep in (1, 2, 3, 4):
        pruning = prune(statistics, keep=str(keep), mode="uniform", lossless="1", sources=())
        found = prune_figures(statistics, pruning).agreement
        assert found is not None
        assert found[:, keep - 1].mean() == pytest.approx(pruning.agreement)


def test_small_functions_by_hand() -> None:
    assert held_by_best(np.array([0.25, 0.5, 0.25])).tolist() == [0.5, 0.75, 1.0]
    assert agreements(np.array([3.0, 2, 1]), np.array([3.0, 1, 2])).tolist() == [1.0, 0.5, 1.0]
    assert in_common([np.array([2.0, 1, 1]), np.array([1.0, 1, 2])], 2).tolist() == [[2, 1], [1, 2]]  # {0, 1}, {2, 0}
    assert [best_of(share, 896) for share in (1, 50, 100)] == [9, 448, 896]
    assert best_of(1, 4) == 1


def test_sizes_of_records_by_hand() -> None:
    """An expert of Kimi K3, gate and up 3072 x 3584: 33,030,144 weights, 9,728 rows, pages of 4096 bytes.

    Codes: 1024 + 3 * 256 * 16 + 2 * 9728 + 3 / 8 of the weights = 12,419,072, whole pages. MXFP4: 1024 and 17 / 32 of
    the weights, 17,548,288 bytes, rounded up to 4285 pages.
    """
    sizes = record_sizes(3584, 3072)
    assert (sizes.codes, sizes.source, sizes.usual) == (12_419_072, 4285 * 4096, 12_419_072)
    small = record_sizes(64, 64)  # 1536 vectors: 4608 bytes of indices for 12,288 of codebooks
    assert (small.codes, small.source, small.usual) == (None, 8192, 8192)  # 1024 + 12,288 * 17 / 32, and up


def test_the_page_has_the_figures_in_tables(statistics: Statistics) -> None:
    parsed = check_self_contained(page_of(statistics))
    assert parsed.table("layer", "best 1\u00a0% (1)")[1:] == [
        ["1", "31.2", "31.2", "31.2", "31.2", "62.5", "2", "62.5"],
        ["2", "50.0", "50.0", "50.0", "50.0", "68.8", "2", "68.8"],
    ]
    assert parsed.table("", "best 1\u00a0% (1)")[1][-2:] == ["2", "62.5"]
    kept = parsed.table("experts a layer", "of its experts (%)")
    assert [row[:4] for row in kept[1:]] == [
        ["1", "25.0", "40.6", "31.2"],
        ["2", "50.0", "65.6", "62.5"],
        ["3", "75.0", "84.4", "81.2"],
        ["4", "100.0", "100.0", "100.0"],
    ]
    assert [row[4] for row in kept[1:]] == ["8.0 KiB", "16.0 KiB", "24.0 KiB", "32.0 KiB"]  # a page a record
    assert parsed.table("source of text")[1:] == [["1  a", "100.0", "25.0"], ["2  b", "25.0", "100.0"]]
    by_layer = parsed.table("layer", "experts that stay")
    assert by_layer[1:] == [["1", "2", "0", "0.0", "50.0"], ["2", "2", "1", "50.0", "50.0"]]
    assert parsed.table("experts a layer", "mean of layers")[2] == ["2", "75.0", "50.0", "50.0"]
    assert parsed.elements["svg"] == 5


def test_a_lossless_tier_counts_with_its_own_size(tmp_path: Path) -> None:
    """Of a graded plan one expert a layer is lossless; these experts are too small for codes, so all take a page."""
    parsed = check_self_contained(page_of(write_sums(tmp_path / "stats", SALIENCY, EVEN), mode="graded"))
    assert ["of them lossless", "2"] in parsed.tables[0]
    assert "16.0 KiB. Trunk and tables" in parsed.text


def test_one_text_has_no_overlap(tmp_path: Path) -> None:
    alone = tuple(layer[:1] for layer in SALIENCY)
    found = write_sums(tmp_path / "stats", alone, tuple(layer[:1] for layer in EVEN), names=("a",))
    parsed = check_self_contained(page_of(found))
    assert "one source of text: there is nothing to compare" in parsed.text
    assert parsed.elements["svg"] == 4


def test_three_texts_have_a_map(tmp_path: Path) -> None:
    """c is like a in layer 1 and like b in layer 2: 2 + 1 of 4 in common with a, 0 + 2 with b."""
    saliency = tuple(np.concatenate([layer, layer[number : number + 1]]) for number, layer in enumerate(SALIENCY))
    found = write_sums(tmp_path / "stats", saliency, tuple(layer / 2 for layer in saliency), names=("a", "b", "c"))
    parsed = check_self_contained(page_of(found))
    assert parsed.table("source of text")[1:] == [
        ["1  a", "100.0", "25.0", "75.0"],
        ["2  b", "25.0", "100.0", "50.0"],
        ["3  c", "75.0", "50.0", "100.0"],
    ]
    assert any("Least alike are a and b (25.0 %), most alike a and c (75.0 %)." in text for text in parsed.captions)


def test_a_single_window_says_nothing_of_certainty(tmp_path: Path) -> None:
    parsed = check_self_contained(page_of(write_sums(tmp_path / "stats", SALIENCY, SALIENCY)))
    assert "nothing can be said of how sure the ranking is" in parsed.text


def test_names_from_the_file_are_text(tmp_path: Path) -> None:
    hostile = ("<script>alert(1)</script>", "\u202e$x^{2}$ & 中文")
    found = write_sums(tmp_path / "stats", SALIENCY, EVEN, names=hostile, source="/<script src=//x></script>\x1b[2J")
    parsed = check_self_contained(page_of(found))
    assert parsed.elements["script"] == 0
    assert ["source", r"/<script src=//x></script>\x1b[2J"] in parsed.tables[-3]
    assert [row[0] for row in parsed.table("label", "tokens")[1:3]] == [hostile[0], r"\u202e$x^{2}$ & 中文"]


def test_many_files_of_text_are_counted(tmp_path: Path) -> None:
    parsed = check_self_contained(page_of(write_sums(tmp_path / "stats", SALIENCY, EVEN, texts=SHOWN_TEXTS)))
    assert len(parsed.table("label", "file")) == 1 + SHOWN_TEXTS
    assert any(f"{SHOWN_TEXTS} more are not listed" in caption for caption in parsed.captions)


@pytest.mark.parametrize("mode", ["uniform", "global", "graded"])
def test_the_same_statistics_give_the_same_page(statistics: Statistics, mode: str) -> None:
    assert page_of(statistics, mode=mode) == page_of(statistics, mode=mode)


def test_a_model_of_the_size_of_kimi_k3_has_a_page_of_moderate_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    saliency = tuple(rng.gamma(0.5, 1.0, (2, 896)) for _ in range(92))
    found = write_sums(tmp_path / "stats", saliency, tuple(layer * 0.4 for layer in saliency))
    page = page_of(found, "27%")
    assert len(page) < 2_000_000
    assert len(Parsed(page).table("layer", "best 1\u00a0% (9)")) == 93


def test_the_command_writes_plan_and_page(statistics: Statistics, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.toml", tmp_path / "page.html"
    assert run(["prune", str(statistics.path), "--keep", "2", "--out", str(plan), "--html", str(page)]) == 0
    assert page.read_bytes() == page_of(statistics)
    assert plan.is_file()


def test_the_command_replaces_nothing(
    statistics: Statistics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, page = tmp_path / "plan.toml", tmp_path / "page.html"
    page.write_text("mine")
    assert run(["prune", str(statistics.path), "--keep", "2", "--out", str(plan), "--html", str(page)]) == 2
    assert "there already" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert not plan.exists()


def test_without_matplotlib_the_command_does_nothing(
    statistics: Statistics,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    without_matplotlib: Callable[[], None],
) -> None:
    without_matplotlib()
    plan, page = tmp_path / "plan.toml", tmp_path / "page.html"
    assert run(["prune", str(statistics.path), "--keep", "2", "--out", str(plan), "--html", str(page)]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "error: pages with plots need matplotlib, which is not installed",
        "hint: pip install 'moepack[report]'",
    ]
    assert not plan.exists()
    assert not page.exists()
    assert run(["prune", str(statistics.path), "--keep", "2", "--out", str(plan)]) == 0  # the plan needs no plots
