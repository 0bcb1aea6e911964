"""Pages as such: everything is escaped, tables are what was said, and no page replaces a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import UsageError
from packer.report.page import Figure, Page, Paragraph, Section, Table, render, write_page
from tests.packer.report.pages import check_self_contained

HOSTILE = "<script>alert('\"&')</script><img src=x onerror=y>"
DRAWING = '<svg viewBox="0 0 1 1"><path d="M 0 0"/></svg>'


def page_of(text: str) -> Page:
    table = Table(text, (text, f">{text}"), ((text, text),))
    return Page(text, (Paragraph(text), table), (Section(text, (Figure(DRAWING, text, text),)),))


def test_whatever_a_text_holds_it_is_text() -> None:
    parsed = check_self_contained(render(page_of(HOSTILE)))
    assert parsed.tables == [[[HOSTILE, HOSTILE], [HOSTILE, HOSTILE]]]
    assert parsed.captions == [f"Table 1. {HOSTILE}", f"Figure 1. {HOSTILE}"]
    assert ("svg", "aria-label", HOSTILE) in parsed.attributes
    assert parsed.text.count(HOSTILE) == 10  # title, two headings, paragraph, two captions, four cells


def test_marks_that_turn_the_direction_of_writing_are_spelled_out() -> None:
    parsed = check_self_contained(render(page_of("a\u202eb\x1b")))
    assert parsed.tables[0][1] == [r"a\u202eb\x1b"] * 2


def test_columns_are_aligned_and_rows_named() -> None:
    table = Table("c", ("name", ">number"), (("one", "1"), ("two", "2")))
    text = render(Page("t", (table,), ())).decode()
    assert '<th scope="col">name</th><th scope="col" class="r">number</th>' in text
    assert '<tr><th scope="row" class="k">one</th><td class="r">1</td></tr>' in text
    assert "<thead>" not in render(Page("t", (Table("c", ("", ""), (("a", "b"),)),), ())).decode()


def test_figures_and_tables_are_numbered_through() -> None:
    parts = (Figure(DRAWING, "x", ""), Table("y", ("a",), ()), Figure(DRAWING, "z", ""))
    parsed = check_self_contained(render(Page("t", parts[:1], (Section("s", parts[1:]),))))
    assert parsed.captions == ["Figure 1. x", "Table 1. y", "Figure 2. z"]


def test_a_page_for_print_divides_no_figure() -> None:
    text = render(page_of("x")).decode()
    assert "@media print" in text
    assert "figure, tr, .short { break-inside: avoid; }" in text
    assert text.count('<div class="wide short">') == 1
    long = Table("", ("a",), (("x",),) * 25)
    assert "short" not in render(Page("t", (long,), ())).decode().partition("<body>")[2]


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        write_page(path, page_of("x"))
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="no such folder"):
        write_page(tmp_path / "none" / "page.html", page_of("x"))
    assert [item.name for item in tmp_path.iterdir()] == ["page.html"]


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", page_of("x"))
    assert (tmp_path / "page.html").read_bytes() == render(page_of("x"))
    assert [item.name for item in tmp_path.iterdir()] == ["page.html"]
