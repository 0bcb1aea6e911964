"""Byte-level byte-pair encoding: training, ``tiktoken.model``, and encoding for training and evaluation.

Text is first split by the pattern of the Kimi tokenizer; merges never cross a split. The first 256 ranks are the
single bytes, so that every text can be encoded; a pair's merge has the rank of the token that it makes.
"""

from __future__ import annotations

import base64
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import regex

_UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]"
_LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPLIT = regex.compile(SPLIT_PATTERN, regex.V1)

BYTES = 256
RANKS = 4096
SPECIALS = 256
BOS, EOS = RANKS, RANKS + 1  # before a document, and after it
# Names as Kimi's; the ids between those that have one are reserved.
SPECIAL_NAMES = {
    BOS: "[BOS]",
    EOS: "[EOS]",
    RANKS + 2: "<|im_end|>",
    RANKS + 3: "<|im_user|>",
    RANKS + 4: "<|im_assistant|>",
    RANKS + 10: "<|im_system|>",
    RANKS + 17: "<|im_middle|>",
    RANKS + 254: "[UNK]",
    RANKS + 255: "[PAD]",
}

Pair = tuple[int, int]


def split(text: str) -> list[str]:
    """The pieces of ``text`` that are encoded apart."""
    pieces: list[str] = _SPLIT.findall(text)
    return pieces


@dataclass(frozen=True)
class Tokenizer:
    """Tokens by rank; a token's rank is its id.

    Attributes:
        tokens: the bytes of every rank.
    """

    tokens: tuple[bytes, ...]

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text; no special token comes out of a text."""
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        known = dict[str, list[int]]()
        encoded = []
        for text in texts:
            ids = list[int]()
            for piece in split(text):
                if piece not in known:
                    known[piece] = _encode_piece(piece, ranks)
                ids += known[piece]
            encoded.append(ids)
        return encoded

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of ``ids``, special tokens left out."""
        return b"".join(self.tokens[token] for token in ids if token < len(self.tokens))

    def write(self, path: Path) -> None:
        """Write ``tiktoken.model``: base64 of a token, a space, its rank."""
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(self.tokens))
        path.write_text("".join(lines), encoding="ascii")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tiktoken.model`` that :meth:`Tokenizer.write` wrote."""
    pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    tokens = {int(rank): base64.b64decode(token) for token, rank in pairs}
    return Tokenizer(tuple(tokens[rank] for rank in range(len(tokens))))


def _encode_piece(piece: str, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes((byte,)) for byte in piece.encode()]
    while len(parts) > 1:
        merges = (ranks.get(left + right, RANKS) for left, right in pairwise(parts))
        rank, at = min((rank, at) for at, rank in enumerate(merges))
        if rank == RANKS:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def train(texts: Iterable[str], ranks: int = RANKS) -> Tokenizer:
    """Merge the most frequent pair of tokens until there are ``ranks`` tokens.

    Counts of pairs are kept up to date: a merge revisits only the pieces in which its pair stands. Of pairs equally
    frequent the one of the lower ids is merged first.
    """
    frequencies = Counter[str]()
    for text in texts:
        frequencies.update(split(text))
    words = [(list(piece.encode()), count) for piece, count in frequencies.items()]
    counts, places = Counter[Pair](), defaultdict[Pair, set[int]](set)
    for at, (ids, count) in enumerate(words):
        for pair in pairwise(ids):
            counts[pair] += count
            places[pair].add(at)
    tokens = [bytes((byte,)) for byte in range(BYTES)]
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    made = set(tokens)
    while len(tokens) < ranks and heap:
        negative, pair = heapq.heappop(heap)
        if -negative != counts[pair]:  # an old count; the pair stands in the heap again with its new one
            continue
        token = tokens[pair[0]] + tokens[pair[1]]
        if token in made:  # other merges make the same bytes: a second rank for them would never be used
            continue
        made.add(token)
        changed = _merge(words, places.pop(pair), pair, len(tokens), counts, places)
        tokens.append(token)
        for other in changed:
            if counts[other] > 0:
                heapq.heappush(heap, (-counts[other], other))
    return Tokenizer(tuple(tokens))


def _merge(
    words: list[tuple[list[int], int]],
    at: set[int],
    pair: Pair,
    new: int,
    counts: Counter[Pair],
    places: defaultdict[Pair, set[int]],
) -> set[Pair]:
    """Replace ``pair`` by ``new`` in the words ``at``; return the pairs whose counts changed."""
    changed = set[Pair]()
    for word in at:
        ids, count = words[word]
        merged, i = list[int](), 0
        while i < len(ids):
            if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
                merged.append(new)
                i += 2
            else:
                merged.append(ids[i])
                i += 1
        for other in pairwise(ids):
            counts[other] -= count
            changed.add(other)
        for other in pairwise(merged):
            counts[other] += count
            places[other].add(word)
            changed.add(other)
        words[word] = (merged, count)
    return changed
