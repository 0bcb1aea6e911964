"""Reading a page as a browser would, and what must hold for every page."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

VOID = {"meta"}


class Parsed(HTMLParser):
    """A page taken apart: elements, attributes, text, and the cells of each table."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.feed(page.decode("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._element(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("caption", "figcaption"):
            self.captions.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._element(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] in ("caption", "figcaption"):
            self.captions[-1] += data

    def _element(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def table(self, *heading: str) -> list[list[str]]:
        """The one table whose first row is ``heading``, or that has a row beginning with it."""
        found = [table for table in self.tables if table and table[0][: len(heading)] == list(heading)]
        assert len(found) == 1, heading
        return found[0]


def check_self_contained(page: bytes) -> Parsed:
    """Insist that a page is well formed, runs nothing, and refers to nothing outside of itself."""
    text = page.decode("utf-8")
    parsed = Parsed(page)
    known = {"html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "p", "figure"}
    known |= {"figcaption", "div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    known |= {"svg", "g", "path", "defs", "use", "text", "clippath", "rect", "pattern"}
    assert set(parsed.elements) <= known
    names = {name for _, name, _ in parsed.attributes}
    assert not names & {"src", "srcset", "action", "data", "xlink:href"}
    assert not any(name.startswith("on") for name in names)
    assert not re.search(r"https?:|@import|url\((?!#)|<script|<!ENTITY", text)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    referred = {value for _, name, value in parsed.attributes if name == "href"}
    referred |= {f"#{found}" for found in re.findall(r"url\(#([^)]*)\)", text)}
    assert referred <= {f"#{name}" for name in ids}
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in parsed.attributes
    return parsed
