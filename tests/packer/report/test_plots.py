"""Drawings: the same numbers give the same bytes, names are names, and matplotlib may be absent."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from formats.errors import EnvironmentProblem
from packer.report import plots
from packer.report.page import Figure, Page, render
from packer.report.plots import Axis, Line, Mark
from packer.report.svg import as_element
from tests.packer.report.pages import check_self_contained

matplotlib = pytest.importorskip("matplotlib", reason="drawings need the extra report")

HOSTILE = "<script>$\\frac{$ & 中文"


def line(name: str = "first") -> str:
    values = np.array([0.0, 1.0, 2.0])
    return plots.line_plot("k", [Line(name, values, values, plots.FIRST)], Axis("x"), Axis("y"), [Mark("m", 1.0)])


def every_plot(name: str) -> list[str]:
    values = np.array([[0.1, np.nan], [0.3, 0.4]])
    return [
        line(name),
        plots.heat_map("heat", values, [name, "b"], [name, "2"], (name, name, name)),
        plots.histogram("hist", [(name, np.arange(9.0)), ("b", np.arange(5.0))], name, name),
        plots.span_plot("span", [name, "b"], np.array([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]), ("l", "m", "h"), name),
    ]


def test_names_from_files_are_text_in_every_plot() -> None:
    drawings = every_plot(HOSTILE)
    page = Page("t", tuple(Figure(drawing, "c", "a") for drawing in drawings), ())
    parsed = check_self_contained(render(page))
    assert parsed.text.count(HOSTILE) >= 8
    assert parsed.elements["script"] == 0


def test_long_names_are_cut() -> None:
    assert "x" * 27 + "…" in line("x" * 28 + "y")
    assert "x" * 28 not in line("x" * 28 + "y")
    assert "x" * 28 in line("x" * 28)


def test_what_the_user_has_set_for_matplotlib_changes_nothing() -> None:
    first = every_plot("a")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.fonttype": "path", "axes.grid": True}):
        assert every_plot("a") == first
        assert matplotlib.rcParams["font.size"] == 30.0  # and it stays as it was set
    assert every_plot("a") == first


def test_a_line_is_drawn_where_its_numbers_are() -> None:
    """Equal steps of x and y are equal steps on paper, to the right and upwards."""
    root = ElementTree.fromstring(line())
    paths = [element for element in root.iter("path") if plots.FIRST.color in element.get("style", "")]
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", paths[0].get("d", ""))[1:]]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.02)
    assert x0 < x1 < x2
    assert y0 > y1 > y2


def test_cells_go_from_light_to_dark_and_those_without_a_number_have_no_color() -> None:
    """The ends of the map cividis are #00224e and #fee838."""
    drawing = plots.heat_map("k", np.array([[1.0, np.nan, 3.0]]), ["a"], list("xyz"), ("", "", ""))
    cells = re.findall(r"fill: ([^;\"]*); stroke: #ffffff", drawing)
    assert cells == ["#fee838", "none", "#00224e"]


@pytest.mark.parametrize("values", [np.zeros((1, 2)), np.full((1, 2), np.nan)])
def test_maps_of_equal_or_of_no_numbers_are_drawn(values: np.ndarray) -> None:
    assert plots.heat_map("k", values, ["a"], ["x", "y"], ("", "", "")).startswith("<svg")


def test_many_columns_name_some_of_them() -> None:
    names = [str(number) for number in range(1, 93)]
    drawing = plots.heat_map("k", np.arange(92.0)[None, :], ["a"], names, ("layer", "", "z"))
    shown = re.findall(r"<text[^>]*>([0-9]+)</text>", drawing)
    layers = shown[: shown.index("91") + 1]
    assert layers == [str(number) for number in range(1, 93, 6)]
    assert len(layers) <= plots.TICKS


def test_names_of_one_drawing_do_not_meet_those_of_another() -> None:
    values = np.array([0.0, 1.0])
    lines = [Line("x", values, values, plots.FIRST)]
    drawings = [plots.line_plot(key, lines, Axis("x"), Axis("y")) for key in ("a", "b")]
    page = render(Page("t", tuple(Figure(drawing, "", "") for drawing in drawings), ()))
    attributes = check_self_contained(page).attributes
    assert {(value or "").partition("-")[0] for _, name, value in attributes if name == "id"} == {"a", "b"}


@pytest.mark.parametrize("target", ["https://example.org/x.png", "data:image/png;base64,AAAA"])
def test_a_drawing_that_refers_outside_is_no_drawing(target: str) -> None:
    document = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<image xlink:href="{target}"/></svg>'
    )
    with pytest.raises(ValueError, match="refers to"):
        as_element(document.encode(), "k")


def test_samples_have_both_ends() -> None:
    assert plots.sampled(5).tolist() == [0, 1, 2, 3, 4]
    some = plots.sampled(896)
    assert (some[0], some[-1], len(some)) == (0, 895, 120)


def test_without_matplotlib_the_extra_is_named(without_matplotlib: Callable[[], None]) -> None:
    without_matplotlib()
    with pytest.raises(EnvironmentProblem, match="not installed") as caught:
        line()
    assert caught.value.exit_code == 4
    assert caught.value.hint == "pip install 'moepack[report]'"


def test_a_broken_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise RuntimeError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentProblem, match="RuntimeError: built for another numpy"):
        plots.check_plots()
