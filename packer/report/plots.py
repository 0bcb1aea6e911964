"""Plots as ``svg`` elements, drawn by matplotlib, which comes with the extra ``report`` and is loaded here alone.

Whatever the user has set for matplotlib is put aside while a plot is drawn, and nothing random goes in: with the same
version of matplotlib the same numbers give the same bytes. Text stays text in a generic family, so that it can be
searched and read aloud and needs no font to come along. Colours are those of Okabe and Ito, told apart by people of all
kinds of sight; lines differ in their dashes too, for prints in black.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import EnvironmentProblem
from packer.output import escape
from packer.report.svg import as_element

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Double = NDArray[np.float64]

WIDTH = 7.2  # inches, the text width of the page in print
TICKS = 16  # numbers on an axis of layers, at most
NAME_LENGTH = 28  # characters of a name in a plot

_BLACK, _BLUE, _ORANGE, _GREEN, _GREY = "#000000", "#0072b2", "#d55e00", "#009e73", "#767676"
_DIAMOND: dict[str, Any] = {"marker": "D", "markersize": 6, "markerfacecolor": "#ffffff", "markeredgewidth": 1.5}
_COLORS = 40  # of a heat map: from 50 on matplotlib would draw their scale as pixels
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moepack",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: space for text is measured with it everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.unicode_minus": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "path.simplify": False,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    color: str
    width: float = 1.6
    dashes: str | tuple[int, tuple[float, ...]] = "-"
    opacity: float = 1.0


FIRST = Style(_BLUE)
SECOND = Style(_ORANGE, dashes=(0, (5.0, 2.0)))
THIRD = Style(_GREEN, dashes=(0, (5.0, 1.5, 1.0, 1.5)))
LOWEST_FIRST = Style(_BLUE, width=0.8, dashes=(0, (1.0, 1.5)))
LOWEST_SECOND = Style(_ORANGE, width=0.8, dashes=(0, (1.0, 1.5)))
FAMILY = Style(_GREY, width=0.5, opacity=0.55)
REFERENCE = Style(_BLACK, width=0.8, dashes=(0, (2.0, 2.0)))


@dataclass(frozen=True)
class Line:
    """A line of a plot; one without a name is not in the legend."""

    name: str
    x: Double
    y: Double
    style: Style


@dataclass(frozen=True)
class Mark:
    """A point that is told apart and named in the legend; without ``y`` it is a line from bottom to top."""

    name: str
    x: float
    y: float | None = None


@dataclass(frozen=True)
class Axis:
    """An axis: what it measures, with its unit, its ends where they are fixed, and whether only whole numbers count."""

    label: str
    low: float | None = None
    high: float | None = None
    whole: bool = False


def check_plots() -> None:
    """Insist that plots can be drawn.

    Raises:
        EnvironmentProblem: matplotlib is not installed, or cannot be loaded.
    """
    try:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "pages with plots need matplotlib, which is not installed", hint="pip install 'moepack[report]'"
        ) from None
    except Exception as error:  # a broken installation, or settings of the user that it cannot read
        raise EnvironmentProblem(
            f"matplotlib cannot be loaded: {type(error).__name__}: {error}", hint="pip install 'moepack[report]'"
        ) from None


def line_plot(
    key: str, lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Mark] = (), height: float = 3.4
) -> str:
    """Lines over numbers.

    Args:
        key: names the figure within its page.
        lines: drawn in this order, the last one on top.
        x, y: the axes.
        marks: points on top of the lines.
        height: in inches.
    """
    with _drawing(key, height) as (axes, finished):
        for line in lines:
            style = line.style
            axes.plot(
                line.x,
                line.y,
                color=style.color,
                linewidth=style.width,
                linestyle=style.dashes,
                alpha=style.opacity,
                label=_name(line.name) if line.name else "_",
                marker="o" if len(line.x) == 1 else None,
                markersize=3,
            )
        for mark in marks:
            if mark.y is None:
                axes.axvline(mark.x, color=_BLACK, linewidth=0.9, linestyle="-.", label=_name(mark.name))
            else:
                axes.plot([mark.x], [mark.y], color=_BLACK, linestyle="none", label=_name(mark.name), **_DIAMOND)
        axes.set(xlabel=x.label, ylabel=y.label, xlim=(x.low, x.high), ylim=(y.low, y.high))
        if x.whole:
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return finished()


def heat_map(
    key: str, values: Double, rows: Sequence[str], columns: Sequence[str], labels: tuple[str, str, str]
) -> str:
    """A grid of coloured cells, the first row on top; cells that are not numbers stay hatched.

    Args:
        key: names the figure within its page.
        values: float64 [rows, columns].
        rows, columns: their names; of many columns some are named.
        labels: of the columns, the rows and the colours.
    """
    with _drawing(key, 0.9 + 0.26 * len(rows)) as (axes, finished):
        known = values[np.isfinite(values)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        axes.set_facecolor("#ffffff")
        axes.patch.set(hatch="////", edgecolor="#bbbbbb")
        edges = [np.arange(count + 1) - 0.5 for count in (len(columns), len(rows))]
        few = len(columns) <= 2 * TICKS
        mesh = axes.pcolormesh(
            *edges,
            np.ma.masked_invalid(values),
            cmap=_colors(),
            vmin=low,
            vmax=high if high > low else low + (abs(low) or 1.0),
            edgecolors="#ffffff" if few else "face",  # many cells stand side by side without a seam
            linewidth=0.4,
        )
        step = -(-len(columns) // TICKS)
        places = list(range(0, len(columns), step))
        axes.set_xticks(places, [_name(columns[place]) for place in places])
        axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.invert_yaxis()
        axes.tick_params(length=2)
        figure = axes.get_figure()
        assert figure is not None
        bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=12, label=labels[2])
        bar.ax.tick_params(labelsize=8)
    return finished()


def histogram(key: str, series: Sequence[tuple[str, Double]], x_label: str, y_label: str) -> str:
    """Outlines of how often values occur, up to three series over the same bins of equal width.

    Args:
        key: names the figure within its page.
        series: name and float64 [values] of each.
        x_label, y_label: of the axes.
    """
    values = np.concatenate([part for _, part in series])
    low, high = float(values.min()), float(values.max())
    bins = min(60, max(8, int(len(values) ** 0.5)))
    edges = np.linspace(low, high if high > low else low + (abs(low) or 1.0), bins + 1)
    with _drawing(key, 2.9) as (axes, finished):
        for (name, part), style in zip(series, (FIRST, SECOND, THIRD), strict=False):
            counts, _ = np.histogram(part, edges)
            axes.stairs(counts, edges, color=style.color, linewidth=1.4, linestyle=style.dashes, label=_name(name))
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.locator_params(axis="y", integer=True, min_n_ticks=1)
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return finished()


def span_plot(key: str, names: Sequence[str], spans: Double, labels: tuple[str, str, str], x_label: str) -> str:
    """For each name a line from its least value to its largest, with a dot between them.

    Args:
        key: names the figure within its page.
        names: the first one on top.
        spans: float64 [names, 3]: least, middle and largest value.
        labels: what these three are, for the legend.
        x_label: with the unit.
    """
    places = np.arange(len(names))
    with _drawing(key, 1.0 + 0.24 * len(names)) as (axes, finished):
        axes.hlines(places, spans[:, 0], spans[:, 2], color=_GREY, linewidth=1.2)
        looks = ((labels[0], "|", _GREY), (labels[1], "o", _BLUE), (labels[2], "D", _ORANGE))
        for column, (name, marker, color) in enumerate(looks):
            axes.plot(spans[:, column], places, marker=marker, color=color, linestyle="none", markersize=5, label=name)
        axes.set_yticks(places, [_name(name) for name in names])
        axes.set(xlabel=x_label, xlim=(0.0, None), ylim=(len(names) - 0.5, -0.5))
        axes.grid(axis="x", color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return finished()


def from_zero(values: Double) -> Double:
    """``values`` behind a zero, for curves that begin there."""
    return np.concatenate([np.zeros(1), values])


def sampled(count: int, most: int = 120) -> NDArray[np.int64]:
    """At most ``most`` numbers from 0 to ``count`` - 1, evenly spread, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _colors() -> Any:
    """Light to dark, of even steps for every kind of sight and in grey."""
    import matplotlib

    return matplotlib.colormaps["cividis_r"].resampled(_COLORS)


def _name(text: str) -> str:
    """A name from a file, short enough for a plot; the table beside it has the whole."""
    shown = escape(text)
    return shown if len(shown) <= NAME_LENGTH else shown[: NAME_LENGTH - 1] + "…"


@contextmanager
def _drawing(key: str, height: float) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Axes to draw on, and a function that hands out the drawing once the ``with`` block has ended."""
    check_plots()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # the reader has it
        figure = Figure(figsize=(WIDTH, height))
        canvas = FigureCanvasSVG(figure)
        yield figure.add_subplot(), lambda: as_element(drawn.getvalue(), key)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.print_svg(drawn, metadata=nothing)
