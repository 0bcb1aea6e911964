"""One self-contained HTML page: headings, paragraphs, tables and figures, for the screen and for print.

A page has no scripts and refers to nothing outside of itself; its policy forbids both, should a browser ever see
otherwise. Every string is escaped here, whoever it comes from; only drawings are taken as they are, and these come from
``packer.report.svg``. The same page always gives the same bytes: there are no dates.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

from packer.output import escape
from packer.storage.new_file import write_new

SHORT = 24  # rows of a table that print does not divide
NARROW = 40  # characters of what names a row and stays in one line

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """\
:root { color-scheme: light; }
body { margin: 2.5rem auto; padding: 0 1.5rem; max-width: 54rem; color: #1a1a1a; background: #fff;
  font: 16px/1.5 "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid #c8c8c8; }
p { margin: .75rem 0; }
figure { margin: 1.25rem 0; }
figcaption { font-size: .875em; color: #444; margin: .4rem 0; }
caption { color: #444; text-align: left; padding-bottom: .4rem; width: max-content; max-width: 48rem; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: collapse; font-size: .875em; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .75rem .2rem 0; text-align: left; vertical-align: top; font-weight: normal;
  overflow-wrap: anywhere; }
thead th { border-bottom: 1px solid #1a1a1a; font-weight: bold; vertical-align: bottom; overflow-wrap: normal; }
.k { white-space: nowrap; }
tbody tr { border-bottom: 1px solid #e4e4e4; }
.r { text-align: right; white-space: nowrap; }
thead .r { white-space: normal; }
@page { margin: 16mm 15mm; }
@media print {
  body { margin: 0; padding: 0; max-width: none; font-size: 10pt; color: #000; background: #fff; }
  figcaption, caption { color: #000; }
  h1, h2, caption { break-after: avoid; }
  figure, tr, .short { break-inside: avoid; }
  thead { display: table-header-group; }
  thead, tbody tr:nth-child(-n + 2) { break-after: avoid; }
  .wide { overflow: visible; }
}
"""


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Figures in rows. A column whose heading begins with ``>`` is aligned to the right; the first one names the row.

    A table without headings has ``columns`` of empty strings.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Attributes:
        svg: an ``svg`` element, taken as it is.
        caption: what one sees.
        alternative: what it is, for those who do not see it; the numbers stand in a table beside it.
    """

    svg: str
    caption: str
    alternative: str


Part: TypeAlias = Paragraph | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Page:
    """A title, what stands first, and sections."""

    title: str
    lead: tuple[Part, ...]
    sections: tuple[Section, ...]


def write_page(path: Path, page: Page) -> None:
    """Write a page durably.

    Raises:
        UsageError: something has that name already or gets it meanwhile, or its folder is not there.
        EnvironmentProblem: it cannot be written.
    """
    write_new(path, [render(page)])


def render(page: Page) -> bytes:
    """A page as UTF-8."""
    return "".join(f"{line}\n" for line in _lines(page)).encode()


def _lines(page: Page) -> Iterator[str]:
    figures, tables = count(1), count(1)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_text(page.title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>"
    yield f"<h1>{_text(page.title)}</h1>"
    for part in page.lead:
        yield _part(part, figures, tables)
    for section in page.sections:
        yield f"<section>\n<h2>{_text(section.title)}</h2>"
        for part in section.parts:
            yield _part(part, figures, tables)
        yield "</section>"
    yield "</main>\n</body>\n</html>"


def _part(part: Part, figures: Iterator[int], tables: Iterator[int]) -> str:
    if isinstance(part, Paragraph):
        return f"<p>{_text(part.text)}</p>"
    if isinstance(part, Figure):
        drawing = part.svg.replace("<svg", f'<svg role="img" aria-label="{_text(part.alternative)}"', 1)
        caption = f"Figure {next(figures)}. {part.caption}"
        return f"<figure>\n{drawing}\n<figcaption>{_text(caption)}</figcaption>\n</figure>"
    caption = f"Table {next(tables)}. {part.caption}"
    kind = "wide short" if len(part.rows) <= SHORT else "wide"
    return f'<div class="{kind}">\n<table>\n<caption>{_text(caption)}</caption>\n{_table(part)}\n</table>\n</div>'


def _table(table: Table) -> str:
    right = [' class="r"' if column.startswith(">") else "" for column in table.columns]
    lines = []
    if any(table.columns):
        cells = (
            f'<th scope="col"{mark}>{_text(column.removeprefix(">"))}</th>'
            for column, mark in zip(table.columns, right, strict=True)
        )
        lines.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    if all(len(row[0]) <= NARROW for row in table.rows):
        right[0] = right[0].replace('"r"', '"r k"') or ' class="k"'
    lines.append("<tbody>")
    for row in table.rows:
        first, *rest = (f"{mark}>{_text(cell)}" for cell, mark in zip(row, right, strict=True))
        lines.append(f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in rest)}</tr>')
    lines.append("</tbody>")
    return "\n".join(lines)


def _text(text: str) -> str:
    """Text that is nothing but text, whatever it holds: what cannot be shown, and marks that turn the direction of
    writing, are spelled out, and markup is none."""
    return html.escape(escape(text), quote=True)
