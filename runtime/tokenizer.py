"""From text to token ids and back, with the vocabulary of a release.

Text never becomes a special token, however it is spelled: only :meth:`Tokenizer.encode_special` gives their ids. The
library ``tiktoken`` merges; it gets the vocabulary as bytes and never reaches for the network.
"""

from __future__ import annotations

import codecs
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import tiktoken

from formats.errors import FormatError, UsageError
from runtime.assets import read_assets
from runtime.tokenizer_files import (
    CODE_NAME,
    CONFIG_NAME,
    MAX_VOCABULARY,
    PATTERN,
    RANKS_NAME,
    TokenizerConfig,
    read_config,
    read_pattern,
    read_ranks,
)

# The releases' own code cuts text here before it splits it, so the cuts are part of what ids a text has. They also
# bound the work of the pattern, whose look-ahead runs again and again over one long run of blanks.
PART_CHARS = 400_000
RUN_CHARS = 25_000
TOKEN_BYTES = 270  # of memory, an ordinary token: measured with the 163,584 of Kimi K3
_LONG_RUN = re.compile(rf"\s{{{RUN_CHARS + 1},}}|\S{{{RUN_CHARS + 1},}}")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary. Safe to share between threads.

    Attributes:
        ranks: ordinary tokens; their ids are 0 to ``ranks - 1``.
        names: id of each special token -> its spelling; all ids from ``ranks`` to the end of the vocabulary have one.
        begin: id that a text begins with, or None.
    """

    ranks: int
    names: Mapping[int, str]
    begin: int | None
    _encoding: tiktoken.Encoding = field(repr=False, compare=False)
    _ids: Mapping[str, int] = field(repr=False, compare=False)

    @property
    def vocabulary(self) -> int:
        """How many ids there are."""
        return self.ranks + len(self.names)

    @property
    def memory_bytes(self) -> int:
        """About what the vocabulary takes in memory."""
        return TOKEN_BYTES * self.ranks

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, all below ``ranks``; what spells a special token stays text.

        Raises:
            UsageError: the text has a lone surrogate, which no UTF-8 holds.
            FormatError: the release's split pattern does not get through the text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("text is not valid Unicode", where=f"character {error.start}") from None
        ids: list[int] = []
        for part in _parts(text):
            try:
                found = self._encoding.encode_ordinary(part)
            except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
                raise
            except BaseException as error:  # a panic of the library is no Exception
                raise FormatError(f"split pattern failed: {str(error)[:100]}", where=CODE_NAME) from None
            if sum(len(self._encoding.decode_single_token_bytes(token)) for token in found) != len(part.encode()):
                raise FormatError("split pattern leaves out some of the text", where=CODE_NAME)
            ids += found
        return ids

    def encode_special(self, name: str) -> int:
        """The id of a special token.

        Raises:
            UsageError: no token is spelled so.
        """
        if name not in self._ids:
            raise UsageError("no such special token", found=repr(name))
        return self._ids[name]

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; a special one for its spelling.

        Raises:
            UsageError: the id is out of range.
        """
        name = self.names.get(token)
        if name is not None:
            return name.encode("utf-8")
        if not 0 <= token < self.ranks:
            raise UsageError("no such token", expected=f"0 to {self.vocabulary - 1}", found=token)
        return self._encoding.decode_single_token_bytes(token)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special tokens by their spelling; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")


class TextStream:
    """Text of tokens as they come: bytes of a character that is not complete yet are held back.

    Args:
        tokenizer: the vocabulary.
        special: show special tokens by their spelling; else they give no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete now that ``token`` has come; may be empty."""
        if token in self._tokenizer.names:
            held = self.finish()  # a character does not go on behind a control mark
            return held + self._tokenizer.names[token] if self._special else held
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is still held back, as a replacement mark; the stream can be used again."""
        held = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return held


def has_tokenizer(path: Path) -> bool:
    """Whether a tokenizer lies beside a model's weights; errors are those of :func:`load_tokenizer`."""
    return RANKS_NAME in read_assets(path, (RANKS_NAME,))


def load_tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer that lies beside a model's weights.

    Args:
        path: a container or a checkpoint directory.
        vocabulary: how many ids the model knows.

    Raises:
        FormatError: there is none, or a file of it is malformed or does not suit the model.
    """
    files = read_assets(path, (RANKS_NAME, CONFIG_NAME, CODE_NAME))
    if RANKS_NAME not in files:
        raise FormatError(
            "the model comes without a tokenizer",
            where=path,
            expected=RANKS_NAME,
            hint="without one it takes token ids, with --ids, and no text",
        )
    return make_tokenizer(files, vocabulary)


def make_tokenizer(files: Mapping[str, bytes], vocabulary: int) -> Tokenizer:
    """A tokenizer from the bytes of its files, by name; only ``tiktoken.model`` must be among them."""
    if vocabulary > MAX_VOCABULARY:
        raise FormatError(
            "vocabulary is too large for a tokenizer",
            where="vocab_size",
            expected=f"at most {MAX_VOCABULARY}",
            found=vocabulary,
        )
    ranks = read_ranks(files[RANKS_NAME], most=vocabulary)
    count = len(ranks)
    config = TokenizerConfig({})
    if CONFIG_NAME in files:
        config = read_config(files[CONFIG_NAME], ranks=count, vocabulary=vocabulary)
    # As in the releases, ids that nobody named have a name made of their number.
    names = {number: config.names.get(number, f"<|reserved_token_{number}|>") for number in range(count, vocabulary)}
    ids = {name: number for number, name in names.items()}
    if len(ids) < len(names):
        raise FormatError("a special token has the spelling of a reserved one", where=CONFIG_NAME)
    pattern = read_pattern(files[CODE_NAME]) if CODE_NAME in files else PATTERN
    try:
        encoding = tiktoken.Encoding("release", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise FormatError("split pattern is no regular expression", where=CODE_NAME, found=str(error)[:200]) from None
    ranks.clear()  # the library has its own copy, and keeps a reference to ours: 18 MB for Kimi K3
    gc.collect()
    begin = None if config.begin is None else ids[config.begin]
    return Tokenizer(count, MappingProxyType(names), begin, encoding, MappingProxyType(ids))


def _parts(text: str) -> Iterator[str]:
    """``text`` in parts of at most 400,000 characters and with no more than 25,000 blanks or non-blanks in a row."""
    for start in range(0, len(text), PART_CHARS):
        part = text[start : start + PART_CHARS]
        cuts = [0]
        for run in _LONG_RUN.finditer(part):
            cuts += range(run.start() + RUN_CHARS, run.end(), RUN_CHARS)
        for first, stop in zip(cuts, [*cuts[1:], len(part)], strict=True):
            yield part[first:stop]
