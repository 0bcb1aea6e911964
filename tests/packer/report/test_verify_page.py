"""The page about a verification: errors as the index has them, figures by hand, and what is said of their worth."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.container import Container, open_container
from formats.errors import FormatError
from packer.commands import run
from packer.report.error_sections import expert_sections
from packer.report.page import Page, render
from packer.report.verify_figures import LayerErrors, distribution, distributions, worst_matrices
from packer.report.verify_page import SHOWN_PROBLEMS, verify_page, write_verify_page
from packer.verify.findings import Problem
from packer.verify.logits_parity import LayerDifference, LogitsParity
from packer.verify.report import ErrorSummary, LeftOut, Parity, VerifyReport
from runtime.perplexity import Loss
from tests.packer.report.pages import check_self_contained
from tests.support.containers import RECIPE, Spec, all_codecs, build_container

pytest.importorskip("matplotlib", reason="pages have drawings, which need the extra report")

DATA = Path(__file__).parents[2] / "data"
PARITY = Parity(ErrorSummary(0.1, 0.2), ErrorSummary(0.01, 0.02), 3, 40, 0)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with open_container(build_container(tmp_path / "c.moepack")) as opened:
        yield opened


def report_of(container: Container, **changes: Any) -> VerifyReport:
    manifest = container.manifest
    whole = VerifyReport("hashes", container.container_id, manifest.experts.count, len(manifest.tensors), ())
    return replace(whole, **changes)


def indexed_errors(path: Path) -> list[tuple[int, tuple[float, float, float]]]:
    """Layer and errors of gate, up and down of every record: bytes 64 to 76 of rows of 128 (SPEC section 5.2)."""
    data = (path / "index.bin").read_bytes()
    rows = [data[at : at + 128] for at in range(128, len(data), 128)]
    return [(struct.unpack_from("<I", row)[0], struct.unpack_from("<3f", row, 64)) for row in rows]


def test_errors_by_layer_are_those_of_the_index(container: Container) -> None:
    parsed = check_self_contained(render(verify_page(container, report_of(container))))
    table = parsed.table("layer", "records", "gate mean")
    found = indexed_errors(container.path)
    for number, row in enumerate(table[1:], 1):
        errors = np.array([values for layer, values in found if layer == number])
        assert row[:2] == [str(number), str(len(errors))]
        for matrix in range(3):
            mean, middle, _, worst = map(float, row[2 + 4 * matrix : 6 + 4 * matrix])
            assert mean == pytest.approx(errors[:, matrix].mean(), rel=1e-3)
            assert middle == pytest.approx(np.sort(errors[:, matrix])[(len(errors) - 1) // 2], rel=1e-3)
            assert worst == pytest.approx(errors[:, matrix].max(), rel=1e-3)
    assert len(table) == 4


def test_distribution_by_hand() -> None:
    """Of 200 values the 1st percentile is the second one, and so on; of three the 50th is the second."""
    found = distribution(float(value) for value in range(200, 0, -1))
    assert (found.count, found.least, found.largest, found.mean) == (200, 1.0, 200.0, 100.5)
    assert found.percentiles == (2.0, 10.0, 50.0, 100.0, 150.0, 190.0, 198.0)
    assert distribution([3.0, 1.0, 2.0]).percentiles == (1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0)


def layer_of(number: int, errors: list[list[float]], codecs: str = "rvq") -> LayerErrors:
    places = np.arange(len(errors))
    return LayerErrors(number, places, places + 10, (codecs,) * len(errors), np.array(errors))


def test_distributions_go_by_codec_and_matrix() -> None:
    found = distributions((layer_of(1, [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]), layer_of(2, [[0.0, 0.0, 0.0]], "mxfp4")))
    assert [(key, item.count, item.largest) for key, item in found.items()] == [
        (("mxfp4", "gate"), 1, 0.0),
        (("mxfp4", "up"), 1, 0.0),
        (("mxfp4", "down"), 1, 0.0),
        (("rvq", "gate"), 2, 0.3),
        (("rvq", "up"), 2, 0.2),
        (("rvq", "down"), 2, 0.3),
    ]


def test_the_worst_come_first_with_their_limits(container: Container) -> None:
    layers = (layer_of(1, [[0.1, 0.3, 0.0], [0.2, 0.3, 0.0]]), layer_of(2, [[0.4, 0.0, 0.3]]))
    worst = worst_matrices(layers, container.manifest)
    assert [(item.layer, item.expert, item.source, item.matrix, item.error) for item in worst] == [
        (2, 0, 10, "gate", 0.4),
        (1, 0, 10, "up", 0.3),
        (1, 1, 11, "up", 0.3),
        (2, 0, 10, "down", 0.3),
        (1, 1, 11, "gate", 0.2),
        (1, 0, 10, "gate", 0.1),
    ]
    assert {item.limit for item in worst} == {0.5}
    many = worst_matrices((layer_of(1, [[0.001 * number] * 3 for number in range(30)]),), container.manifest)
    assert len(many) == 20
    assert many[0].error == 0.029


def test_the_trunk_goes_by_role(container: Container) -> None:
    parsed = check_self_contained(render(verify_page(container, report_of(container))))
    rows = {row[0]: row for row in parsed.table("role", "bytes", "copied")[1:]}
    tensors = [tensor for tensor in container.manifest.tensors if tensor.role == "embedding"]
    assert rows["embedding"][2:4] == ["0", str(len(tensors))]
    assert float(rows["embedding"][6]) == pytest.approx(tensors[0].rel_error, rel=1e-3)
    assert rows["embedding"][8] == "model.embed_tokens.weight"
    assert rows["norm"][2:] == ["2", "0", "-", "-", "-", "-", "-"]


def test_below_parity_nothing_was_measured(container: Container) -> None:
    text = check_self_contained(render(verify_page(container, report_of(container)))).text
    assert "at level hashes none was measured" in text
    assert "measured again" not in text


def test_at_parity_all_were_measured(container: Container) -> None:
    parsed = check_self_contained(render(verify_page(container, report_of(container, level="parity", parity=PARITY))))
    assert "each was measured again against the source" in parsed.text
    assert ["experts, measured relative error", "mean 0.1, largest 0.2"] in parsed.tables[0]
    assert ["source", "40 tensors, 3 of them bit for bit, 0 unaccounted for"] in parsed.tables[0]


def test_a_sample_says_what_was_measured(container: Container) -> None:
    left = LeftOut(4, 2, ((1, (0, 2)), (2, (0, 2))))
    report = report_of(container, level="parity", parity=PARITY, records_checked=7, left_out=left)
    parsed = check_self_contained(render(verify_page(container, report)))
    assert "those of the trunk and of 7 expert records, not of the other 4, were measured again" in parsed.text
    assert ["left out, by a sample", "4 expert records, digests of 2 source shards"] in parsed.tables[0]


def test_problems_are_listed_and_escaped(container: Container) -> None:
    hostile = Problem("<script>x</script>", "\u202e<img src=//x>")
    many = tuple(Problem(f"tensor {number}", "wrong") for number in range(SHOWN_PROBLEMS))
    parsed = check_self_contained(render(verify_page(container, report_of(container, problems=(hostile, *many)))))
    table = parsed.table("where", "what")
    assert table[1] == ["<script>x</script>", r"\u202e<img src=//x>"]
    assert len(table) == 1 + SHOWN_PROBLEMS
    assert any("1 more are listed by --json" in caption for caption in parsed.captions)
    assert f"failed, {SHOWN_PROBLEMS + 1} problems" in parsed.text


def test_names_from_the_manifest_are_text(tmp_path: Path) -> None:
    hostile = "</title><script>alert(1)</script>"
    spec = Spec(recipe={**RECIPE, "name": hostile, "summary": hostile})
    tensors = tuple(replace(tensor, name=f"{tensor.name}{hostile}") for tensor in spec.tensors[:3])
    with open_container(
        build_container(tmp_path / "c", replace(spec, tensors=(*tensors, *spec.tensors[3:])))
    ) as opened:
        parsed = check_self_contained(render(verify_page(opened, report_of(opened))))
    assert ["recipe", f"{hostile}: {hostile}"] in parsed.tables[-1]
    assert any(row[-1].endswith(hostile) for row in parsed.table("role", "bytes"))


def test_logits_have_a_section(container: Container) -> None:
    layers = (LayerDifference(0, 0.5, 0.25), LayerDifference(1, 1.5, None))
    loss = Loss(nats=0.0, tokens=4)
    found = LogitsParity(5, 0.125, 0.5, 3, 0.8, 0.96, 2.5, layers, loss, loss)
    report = report_of(container, level="logits", parity=PARITY, logits=found)
    parsed = check_self_contained(render(verify_page(container, report)))
    table = parsed.table("positions", "5")
    assert ["KL divergence from the source (nats)", "mean 0.125, largest 0.5 at position 3"] in table
    assert ["the same likeliest token", "80.0 % of the positions"] in table
    assert ["perplexity", "source 1, container 1, of 4 tokens"] in table
    assert parsed.table("layer", "largest difference")[1:] == [["0", "0.5000", "0.2500"], ["1", "1.500", "-"]]


def test_every_codec_and_an_odd_container_have_a_page(tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "c", all_codecs())) as opened:
        parsed = check_self_contained(render(verify_page(opened, report_of(opened))))
    assert {row[0] for row in parsed.table("codec", "matrix")[1:]} == {"rvq", "mxfp4", "group_int", "raw"}


def test_a_container_without_experts_has_a_page(container: Container) -> None:
    sections = expert_sections((), container.manifest)
    assert "No expert records" in check_self_contained(render(Page("t", (), sections))).text


def test_errors_of_zero_are_drawn(container: Container) -> None:
    """Of a lossless container every error is zero."""
    sections = expert_sections((layer_of(1, [[0.0, 0.0, 0.0]] * 2, "mxfp4"),), container.manifest)
    parsed = check_self_contained(render(Page("t", (), sections)))
    assert "No expert matrix has an error." in parsed.text
    assert parsed.table("layer", "records")[1] == ["1", "2", *["0"] * 12]


def test_a_container_of_the_size_of_kimi_k3_has_a_page_of_moderate_size(container: Container) -> None:
    rng = np.random.default_rng(1)
    layers = tuple(layer_of(number, rng.normal(0.18, 0.01, (896, 3)).tolist()) for number in range(1, 93))
    page = render(Page("t", (), expert_sections(layers, container.manifest)))
    assert len(page) < 2_000_000
    assert len(check_self_contained(page).table("layer", "records")) == 93


def test_the_same_report_gives_the_same_page(container: Container) -> None:
    first = render(verify_page(container, report_of(container)))
    assert render(verify_page(container, report_of(container))) == first
    assert not re.search(rb"20[0-9][0-9]-[01][0-9]", first)  # no dates


def test_another_container_is_not_described(container: Container, tmp_path: Path) -> None:
    report = report_of(container, container_id="0" * 64)
    with pytest.raises(FormatError, match="container changed"):
        write_verify_page(tmp_path / "page.html", container.path, report)
    assert not (tmp_path / "page.html").exists()


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, page = str(DATA / "kimi-linear-tiny"), str(tmp_path / "c.moepack"), tmp_path / "page.html"
    assert run(["pack", source, out, "--recipe", "kimi-linear-lossless", "--quiet", "--jobs", "1"]) == 0
    assert run(["verify", out, "--source", source, "--html", str(page), "--quiet"]) == 0
    parsed = check_self_contained(page.read_bytes())
    assert ["level", "parity"] in parsed.tables[0]
    assert "each was measured again against the source" in parsed.text
    capsys.readouterr()
    assert run(["verify", out, "--html", str(page), "--quiet"]) == 2
    assert "there already" in capsys.readouterr().err


def test_damage_is_a_failed_check_with_a_page(container: Container, tmp_path: Path) -> None:
    bank = next((container.path / "experts").iterdir())
    data = bytearray(bank.read_bytes())
    data[5000] ^= 1
    bank.write_bytes(data)
    page = tmp_path / "page.html"
    assert run(["verify", str(container.path), "--html", str(page), "--quiet"]) == 1
    parsed = check_self_contained(page.read_bytes())
    assert ["result", "failed: 1 problem"] in parsed.tables[0]
    assert "differs from its digest" in parsed.table("where", "what")[1][1]


def test_without_matplotlib_nothing_is_verified(
    container: Container,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    without_matplotlib: Callable[[], None],
) -> None:
    without_matplotlib()
    assert run(["verify", str(container.path), "--html", str(tmp_path / "page.html")]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-2:] == [
        "error: pages with plots need matplotlib, which is not installed",
        "hint: pip install 'moepack[report]'",
    ]
    assert run(["verify", str(container.path), "--quiet"]) == 0
