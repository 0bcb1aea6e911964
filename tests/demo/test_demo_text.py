"""The tokenizer against a trainer that recounts everything, and the split of the text."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("regex", reason="regex is not installed; only the demo recipe needs it")

from recipes.demo import bpe, corpus

TEXT = "the cat sat on the mat: the Cat's mat, that is. for cat in cats:\n    cat.sit(at=mat)\n" * 3
HELD_OUT = Path(__file__).parents[2] / "recipes" / "demo" / "heldout"


def slow_training(pieces: list[str], ranks: int) -> list[bytes]:
    """Byte-pair encoding by its definition: count all pairs anew for each merge."""
    words = [[bytes((byte,)) for byte in piece.encode()] for piece in pieces]
    tokens = [bytes((byte,)) for byte in range(256)]
    while len(tokens) < ranks:
        counts = Counter(pair for word in words for pair in pairwise(word))
        left, right = min(counts, key=lambda pair: (-counts[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        tokens.append(left + right)
        for word in words:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    return tokens


def test_incremental_training_finds_what_recounting_finds() -> None:
    assert bpe.train([TEXT], ranks=280).tokens == tuple(slow_training(bpe.split(TEXT), 280))


def test_a_text_splits_as_the_released_pattern_says() -> None:
    assert bpe.split("Don't say 12345  to HTTPServer,\n\n汉字x") == [
        "Don't", " say", " ", "123", "45", " ", " to", " HTTPServer", ",\n\n", "汉字", "x"
    ]  # fmt: skip


def test_every_text_comes_back() -> None:
    tokenizer = bpe.train([TEXT], ranks=300)
    text = TEXT + "\x00 ümläut 汉字 😀 [BOS]\r\n"
    (ids,) = tokenizer.encode([text])
    assert max(ids) < 300
    assert tokenizer.decode(ids) == text.encode()


def test_the_file_holds_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = bpe.train([TEXT], ranks=280)
    tokenizer.write(tmp_path / "tiktoken.model")
    assert bpe.read_tokenizer(tmp_path / "tiktoken.model") == tokenizer


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    """The corpus of the running interpreter."""
    return corpus.collect()


def test_no_held_out_file_or_topic_is_trained_on(text: corpus.Corpus) -> None:
    trained = {document.name for document in text.documents}
    held = {document.name for document in text.code + text.prose}
    assert held
    assert not trained & held
    assert not trained & {f"docstrings/{document.name}" for document in text.code}


def test_no_paragraph_of_held_out_prose_is_trained_on(text: corpus.Corpus) -> None:
    prose = [document for document in text.documents if not document.name.startswith("code/")]
    trained = {" ".join(p.split()) for document in prose for p in document.text.split("\n\n")}
    held = {" ".join(p.split()) for document in text.prose for p in document.text.split("\n\n")}
    assert not {paragraph for paragraph in held & trained if len(paragraph) >= 60}
