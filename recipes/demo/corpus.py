"""The text: sources and documentation of the running interpreter's standard library.

Code is every module of the library that is installed everywhere; prose is the topics of ``pydoc`` (chapters of the
language reference), the docstrings of those modules, and the docstrings of built-in modules. What is held out are
whole files and whole topics, chosen by a hash of their names; nothing of them is trained on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Tests are not installed everywhere, encodings are tables, and the topics are prose.
_LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__")
)
_MIN_BYTES = 200  # a document shorter than that is a stub
_HELD_OUT_BYTES = 90_000  # of code, and of prose
_TOPIC_BYTES = 60_000  # of the held-out prose; docstrings of the held-out files are the rest
_LARGEST_HELD_OUT = 24_000  # so that no single file or topic is most of it
_PARAGRAPH = 60  # characters; shorter paragraphs are no evidence of copying


@dataclass(frozen=True)
class Document:
    """A text with the name that decides whether it is held out."""

    name: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return len(self.text.encode())

    @property
    def rank(self) -> bytes:
        """A hash of the name: documents are held out and shuffled in this order."""
        return hashlib.sha256(self.name.encode()).digest()


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and two texts that were never trained on.

    Attributes:
        documents: code and prose in the order of their ranks.
        code, prose: the held-out documents.
    """

    documents: tuple[Document, ...]
    code: tuple[Document, ...]
    prose: tuple[Document, ...]


def collect() -> Corpus:
    """Read the standard library of the running interpreter and split it."""
    modules = tuple(_modules(Path(sysconfig.get_path("stdlib"))))
    topics = tuple(_topics())
    builtin = tuple(_builtin_docstrings())
    code, code_kept = _hold_out(modules, _HELD_OUT_BYTES)
    held_topics, topics_kept = _hold_out(topics, _TOPIC_BYTES)
    held_docstrings, _ = _hold_out(_all_docstrings(code), _HELD_OUT_BYTES - _TOPIC_BYTES)
    prose = held_topics + held_docstrings
    trained_prose = _without_copies(topics_kept + _all_docstrings(code_kept) + builtin, prose)
    documents = tuple(sorted(code_kept + trained_prose, key=lambda document: document.rank))
    return Corpus(documents, code, prose)


def _modules(library: Path) -> Iterator[Document]:
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _LEFT_OUT.isdisjoint(name.parts[:-1]):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a module may declare another encoding
                continue
            if len(text) >= _MIN_BYTES:
                yield Document(f"code/{name.as_posix()}", text)


def _topics() -> Iterator[Document]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        if len(text) >= _MIN_BYTES:
            yield Document(f"topics/{name}", text.strip() + "\n")


def _all_docstrings(modules: Iterable[Document]) -> tuple[Document, ...]:
    documents = (Document(f"docstrings/{module.name}", _docstrings(module.text)) for module in modules)
    return tuple(document for document in documents if document.size >= _MIN_BYTES)


def _docstrings(source: str) -> str:
    """Docstrings of a module in the order of its source, each under the name that it documents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return ""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                title = "" if isinstance(node, ast.Module) else f"{node.name}\n\n"
                parts.append((getattr(node, "lineno", 0), title + text.strip()))
    return "\n\n".join(text for _, text in sorted(parts)) + "\n"


def _builtin_docstrings() -> Iterator[Document]:
    for name in sorted(sys.builtin_module_names):
        text = "\n\n".join(_members(importlib.import_module(name))) + "\n"
        if len(text) >= _MIN_BYTES:
            yield Document(f"builtin/{name}", text)


def _members(module: ModuleType) -> Iterator[str]:
    yield inspect.getdoc(module) or ""
    for name, member in sorted(vars(module).items()):
        if not name.startswith("_") and (inspect.isclass(member) or inspect.isbuiltin(member)):
            yield f"{name}\n\n{inspect.getdoc(member) or ''}"
            for inner, value in sorted(vars(member).items() if inspect.isclass(member) else ()):
                if not inner.startswith("_") and inspect.ismethoddescriptor(value):
                    yield f"{name}.{inner}\n\n{inspect.getdoc(value) or ''}"


def _hold_out(documents: tuple[Document, ...], wanted: int) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Take documents in the order of their ranks until there are ``wanted`` bytes; return them and the others."""
    held, size = list[Document](), 0
    for document in sorted(documents, key=lambda document: document.rank):
        if document.size <= min(wanted - size, _LARGEST_HELD_OUT):
            held.append(document)
            size += document.size
    names = {document.name for document in held}
    return tuple(held), tuple(document for document in documents if document.name not in names)


def _without_copies(documents: tuple[Document, ...], held: tuple[Document, ...]) -> tuple[Document, ...]:
    """Strike paragraphs that stand in the held-out prose too: some topics contain others whole."""
    seen = {paragraph for document in held for paragraph in _paragraphs(document.text) if len(paragraph) >= _PARAGRAPH}
    kept = (
        Document(document.name, "\n\n".join(p for p in document.text.split("\n\n") if _plain(p) not in seen))
        for document in documents
    )
    return tuple(document for document in kept if document.size >= _MIN_BYTES)


def _paragraphs(text: str) -> Iterator[str]:
    return (_plain(paragraph) for paragraph in text.split("\n\n"))


def _plain(paragraph: str) -> str:
    return " ".join(paragraph.split())
