"""What matplotlib draws, as an ``svg`` element that can stand in a page beside others.

Its documents name a document type, namespaces and every group; several of them in one page would use the same names
twice. Here names stay only where something refers to them, each with a prefix of its figure, and coordinates keep two
decimals, that is a hundredth of a point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

_HREF = "{http://www.w3.org/1999/xlink}href"
_COORDINATES = ("d", "x", "y", "width", "height")
_DECIMALS = re.compile(r"-?[0-9]+\.[0-9]{3,}")
_LOCAL = re.compile(r"url\(#([^)]*)\)")


def as_element(document: bytes, prefix: str) -> str:
    """The ``svg`` element of a document.

    Args:
        document: as matplotlib writes it.
        prefix: of all names in it; another one for each figure of a page.

    Raises:
        ValueError: the drawing refers to something outside of itself, or holds pixels.
    """
    root = ElementTree.fromstring(document)
    for style in root.findall("{*}defs/{*}style/.."):  # rules for whole documents: the page has them
        root.remove(style)
    used = set(_references(root))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = dict(_attributes(element, used, prefix))
        if element.tag != "text":  # what lies between elements is layout of the document
            element.text = None
        element.tail = None
    return ElementTree.tostring(root, encoding="unicode")


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == _HREF:
                if not value.startswith("#"):
                    raise ValueError(f"a drawing refers to {value[:40]}")
                yield value[1:]
            yield from _LOCAL.findall(value)


def _attributes(element: ElementTree.Element, used: set[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in element.attrib.items():
        if name == "id":
            if value in used:
                yield name, f"{prefix}-{value}"
        elif name == _HREF:
            yield "href", f"#{prefix}-{value[1:]}"
        elif name in _COORDINATES:
            yield name, _DECIMALS.sub(lambda match: _rounded(match[0]), " ".join(value.split()))
        else:
            yield name, _LOCAL.sub(rf"url(#{prefix}-\1)", value)


def _rounded(number: str) -> str:
    return f"{float(number):.2f}".rstrip("0").rstrip(".")
