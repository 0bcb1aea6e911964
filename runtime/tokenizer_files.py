"""Reading a release's tokenizer files: ranks, special tokens, split pattern. All three are untrusted.

``tiktoken.model`` has a line a token: its bytes in base64, a space, its rank. ``tokenizer_config.json`` names the
special tokens, whose ids lie above the ranks. ``tokenization_kimi.py`` holds the split pattern as a literal; it is read
as text and never run. The library behind the tokenizer panics, past ordinary handlers, on ranks that lack a byte, so
everything is checked here first.
"""

from __future__ import annotations

import ast
import binascii
import io
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats import strict_json
from formats.errors import FormatError

RANKS_NAME = "tiktoken.model"
CONFIG_NAME = "tokenizer_config.json"
CODE_NAME = "tokenization_kimi.py"

MAX_VOCABULARY = 1 << 20  # Kimi K3 has 163,840
MAX_TOKEN_BYTES = 1 << 16
MAX_PATTERN_CHARS = 1 << 14
MAX_CODE_BYTES = 1 << 20
MAX_CODE_DEPTH = 100
MAX_NAME_CHARS = 1 << 10

# What the releases of Kimi K2 to K3 have in common; used where a model comes without its code.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
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


@dataclass(frozen=True)
class TokenizerConfig:
    """What ``tokenizer_config.json`` says.

    Attributes:
        names: id of a special token -> how it is spelled.
        begin: the token that a text begins with, if the release asks for one (``add_bos_token``).
    """

    names: Mapping[int, str]
    begin: str | None = None


def read_ranks(data: bytes, *, most: int = MAX_VOCABULARY) -> dict[bytes, int]:
    """The ordinary tokens: bytes -> rank, which is the id.

    Args:
        data: ``tiktoken.model``.
        most: how many there may be; nothing is allocated for more.

    Raises:
        FormatError: a malformed line, a token or rank that stands twice, a rank that is out of the sequence from zero,
            or a byte without a token; with the line's number.
    """
    count = data.removesuffix(b"\n").count(b"\n") + 1 if data else 0
    if not 256 <= count <= most:
        raise FormatError("wrong number of tokens", where=RANKS_NAME, expected=f"256 to {most} lines", found=count)
    ranks: dict[bytes, int] = {}
    taken = bytearray(count)
    for number, line in enumerate(io.BytesIO(data), 1):  # one line at a time: all of them would take 10 MB for K3
        where = f"{RANKS_NAME}: line {number}"
        token, rank = _parse_line(line.rstrip(b"\r\n"), where)
        if rank >= count:
            raise FormatError("rank is out of range", where=where, expected=f"below {count}", found=rank)
        if taken[rank]:
            raise FormatError("rank stands twice", where=where, found=rank)
        if token in ranks:
            raise FormatError("token stands twice", where=where, expected=f"only with rank {ranks[token]}", found=rank)
        taken[rank] = 1
        ranks[token] = rank
    absent = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if absent:
        raise FormatError(
            f"no token for byte 0x{absent[0]:02x}",
            where=f"{RANKS_NAME}: line {count}, the last",
            expected="a token for each of the 256 bytes",
            found=f"{256 - len(absent)} of them",
        )
    return ranks


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    encoded, _, digits = line.partition(b" ")
    if not encoded or len(encoded) > 2 * MAX_TOKEN_BYTES:
        raise FormatError(
            "no token and rank", where=where, expected="base64, a space, a number", found=repr(line)[1:60]
        )
    try:
        token = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error as error:
        raise FormatError(f"malformed base64: {error}".lower(), where=where, found=repr(encoded)[1:60]) from None
    if not digits.isdigit() or len(digits) > 9:
        raise FormatError("rank is no number", where=where, expected="up to 9 digits", found=repr(digits)[1:60])
    return token, int(digits)


def read_config(data: bytes, *, ranks: int, vocabulary: int) -> TokenizerConfig:
    """The special tokens and what to begin with.

    Args:
        data: ``tokenizer_config.json``.
        ranks: ordinary tokens; special ids lie above them.
        vocabulary: ids that the model knows; special ids lie below.

    Raises:
        FormatError: of the wrong type, out of range, or two tokens with one id or one spelling.
    """
    config = strict_json.parse_object(data, where=CONFIG_NAME)
    names: dict[int, str] = {}
    for number, entry in _added_tokens(config.get("added_tokens_decoder")):
        where = f"{CONFIG_NAME}: added token {number}"
        if not ranks <= number < vocabulary:
            raise FormatError(
                "special token has an id out of range", where=where, expected=f"{ranks} to {vocabulary - 1}"
            )
        spelling = _spelling(entry, where)
        if number in names:
            raise FormatError("two special tokens with one id", where=where, found=f"{names[number]!r}, {spelling!r}")
        names[number] = spelling
    if len(set(names.values())) < len(names):
        twice = sorted(names, key=lambda number: (names[number], number))
        pair = next(two for two in itertools.pairwise(twice) if names[two[0]] == names[two[1]])
        raise FormatError("two special tokens with one spelling", where=CONFIG_NAME, found=f"ids {pair[0]}, {pair[1]}")
    _check_extra(config, set(names.values()))
    wanted = config.get("add_bos_token", False)
    if type(wanted) is not bool:
        raise FormatError("add_bos_token is not a boolean", where=CONFIG_NAME, found=repr(wanted)[:80])
    if not wanted:
        return TokenizerConfig(names)
    begin = _spelling(config.get("bos_token"), f"{CONFIG_NAME}: bos_token")
    if begin not in names.values():
        raise FormatError("bos_token is no special token", where=CONFIG_NAME, found=repr(begin))
    return TokenizerConfig(names, begin)


def _added_tokens(value: Any) -> list[tuple[int, Any]]:
    """``added_tokens_decoder`` as an object (id in the key) or as a list (id in the entry); absent means none."""
    where = f"{CONFIG_NAME}: added_tokens_decoder"
    if value is None:
        return []
    if isinstance(value, dict):
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= 9):
                raise FormatError("key is no token id", where=where, found=repr(key)[:80])
        return [(int(key), entry) for key, entry in value.items()]
    if isinstance(value, list):
        pairs = []
        for entry in value:
            number = entry.get("id") if isinstance(entry, dict) else None
            if type(number) is not int:
                raise FormatError("entry has no id", where=where, found=repr(entry)[:80])
            pairs.append((number, entry))
        return pairs
    raise FormatError("neither an object nor a list", where=where, found=type(value).__name__)


def _spelling(entry: Any, where: str) -> str:
    """A token's text, given as a string or as an object with ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if type(text) is not str or not 0 < len(text) <= MAX_NAME_CHARS:
        raise FormatError("token has no spelling", where=where, expected="a string", found=repr(text)[:80])
    return text


def _check_extra(config: Mapping[str, Any], known: set[str]) -> None:
    """Lists of further special tokens only repeat what has an id; a spelling without one cannot be encoded."""
    for member in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(member)
        where = f"{CONFIG_NAME}: {member}"
        if value is None:
            continue
        if not isinstance(value, list | dict):
            raise FormatError("neither a list nor an object", where=where, found=type(value).__name__)
        entries = value.values() if isinstance(value, dict) else value
        unknown = sorted({_spelling(entry, where) for entry in entries} - known)
        if unknown:
            raise FormatError("special token without an id", where=where, found=repr(unknown[0]))


def read_pattern(data: bytes) -> str:
    """The split pattern of the release's code: the one assignment to ``pat_str``, which must be a literal.

    Understood are a string, strings joined by ``+``, and ``"|".join([...])`` of strings.

    Raises:
        FormatError: not Python, or the assignment is absent, stands twice or is computed.
    """
    if len(data) > MAX_CODE_BYTES:
        raise FormatError("file is too long", where=CODE_NAME, expected=f"at most {MAX_CODE_BYTES}", found=len(data))
    try:
        with warnings.catch_warnings(action="ignore"):  # of how its strings are written
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FormatError("not a Python source file", where=CODE_NAME) from None
    found = [value for node in ast.walk(tree) for value in _assigned(node)]
    if len(found) != 1:
        raise FormatError(
            "split pattern is not assigned once", where=CODE_NAME, expected="one pat_str = ...", found=len(found)
        )
    pattern = _literal(found[0], 0)
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise FormatError("split pattern has an odd length", where=CODE_NAME, found=len(pattern))
    return pattern


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [node.value for target in node.targets if isinstance(target, ast.Name) and target.id == "pat_str"]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "pat_str":
        return [] if node.value is None else [node.value]
    return []


def _literal(node: ast.expr, depth: int) -> str:
    if depth < MAX_CODE_DEPTH:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _literal(node.left, depth + 1) + _literal(node.right, depth + 1)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "join"
            and len(node.args) == 1
            and not node.keywords
            and isinstance(node.args[0], ast.List | ast.Tuple)
        ):
            separator = _literal(node.func.value, depth + 1)
            return separator.join(_literal(item, depth + 1) for item in node.args[0].elts)
    raise FormatError(
        "split pattern is computed, not written out", where=f"{CODE_NAME}: line {node.lineno}", expected="strings"
    )
