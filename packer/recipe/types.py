"""The shape of a recipe: frozen structs of JSON types, and what their keys may say together.

The resolved recipe goes into the manifest and into the journal, and comes back from there unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from formats.errors import MoepackError, UsageError
from formats.families.model import TRUNK_KINDS
from packer.documents import converted
from packer.model_stamp import Digest
from packer.recipe.pruned import Prune

MAX_RANK = 8
MAX_STARS = 8  # a pattern, whose time grows with their number
MAX_NAMES = 256  # patterns a rule, and in all rules together: each is tried on every tensor
MAX_SUMMARY = 1000

Limit: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Group: TypeAlias = Annotated[int, Meta(ge=32, le=1024, multiple_of=32)]
Word: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table that refuses unknown keys and wrong types."""


class _Coded(_Strict, frozen=True, kw_only=True, tag_field="codec"):
    """A table whose key ``codec`` says which other keys it has."""

    @property
    def codec(self) -> str:
        """The codec's name, as recipes, manifests and messages write it."""
        return str(self.__struct_config__.tag)


class Rvq(_Coded, frozen=True, kw_only=True, tag="rvq"):
    """Residual vector quantisation of 8-vectors (lossy). ``codebooks`` is the scope of one set of codebooks."""

    stages: Annotated[int, Meta(ge=1, le=4)]
    entries: Annotated[int, Meta(ge=1, le=256)]  # one byte an index
    codebooks: Literal["expert", "matrix"] = "expert"
    max_rel_error: Limit
    fallback: SourceBytes | Mxfp4 | GroupInt | Raw | None = None


class Mxfp4(_Coded, frozen=True, kw_only=True, tag="mxfp4"):
    """The source's own MXFP4 bytes (lossless)."""

    max_rel_error: Limit = 0.0


class GroupInt(_Coded, frozen=True, kw_only=True, tag="group_int"):
    """Integers of ``bits`` bits, one float16 scale a ``group`` of columns (lossy)."""

    bits: Literal[4, 8]
    group: Group = 128
    max_rel_error: Limit


class Raw(_Coded, frozen=True, kw_only=True, tag="raw"):
    """The source's bytes (lossless)."""

    max_rel_error: Limit = 0.0


class SourceBytes(_Coded, frozen=True, kw_only=True, tag="source"):
    """The source's own bytes (lossless), whatever their format: a plan makes ``mxfp4`` or ``raw`` of it."""

    max_rel_error: Limit = 0.0


ExpertCodec: TypeAlias = Rvq | SourceBytes | Mxfp4 | GroupInt | Raw


class _Rule(_Coded, frozen=True, kw_only=True, tag_field="codec"):
    """What a rule takes: a tensor that fits every key that is given."""

    roles: tuple[Word, ...] = ()
    names: Annotated[tuple[Word, ...], Meta(max_length=MAX_NAMES)] = ()
    ranks: tuple[Annotated[int, Meta(ge=0, le=MAX_RANK)], ...] | None = None

    def takes(self, name: str, role: str, rank: int) -> bool:
        """Whether the rule takes this tensor; ``*`` in a name's pattern stands for any characters, dots included."""
        return (
            (not self.roles or role in self.roles)
            and (not self.names or any(fnmatchcase(name, pattern) for pattern in self.names))
            and (self.ranks is None or rank in self.ranks)
        )


class RawRule(_Rule, frozen=True, kw_only=True, tag="raw"):
    """Copy the tensor's bytes."""

    max_rel_error: Limit = 0.0


class GroupIntRule(_Rule, frozen=True, kw_only=True, tag="group_int"):
    """Quantise to integers; only matrices have rows for the groups to run along."""

    ranks: tuple[Annotated[int, Meta(ge=2, le=2)], ...] = (2,)
    bits: Literal[4, 8]
    group: Group = 128
    max_rel_error: Limit


class DropRule(_Rule, frozen=True, kw_only=True, tag="drop"):
    """Leave the tensor out; the container lists it as dropped by this rule."""


TrunkRule: TypeAlias = RawRule | GroupIntRule | DropRule

# For messages: msgspec says which word is wrong, not which are right.
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "bits": "4 or 8",
        "codebooks": "expert or matrix",
        "effort": "fast, default or max",
        "codec": "rvq, group_int, source, mxfp4 or raw; in the trunk group_int, raw or drop",
    }
)


class Source(_Strict, frozen=True, kw_only=True):
    """How the source is to be read: an MXFP4 scale byte s means 2^(s - ``mxfp4_bias``)."""

    mxfp4_bias: Annotated[int, Meta(ge=1, le=254)] = 127


class Fitting(_Strict, frozen=True, kw_only=True):
    """How codebooks are fitted: where the random generators start, and how much work is spent."""

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    effort: Literal["fast", "default", "max"] = "default"


class ColumnWeights(_Strict, frozen=True, kw_only=True):
    """What the columns of expert matrices count in fitting: second moments of the statistics with this digest."""

    blake3: Digest


class Recipe(_Strict, frozen=True, kw_only=True):
    """A whole recipe. ``msgspec.to_builtins`` and ``msgspec.convert`` carry it through JSON without a difference.

    ``prune`` and ``statistics`` are no settings: a plan adds them for what was given beside the recipe, and where
    nothing was given they are absent from JSON.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")]
    summary: Annotated[str, Meta(max_length=MAX_SUMMARY)] = ""
    families: Annotated[tuple[Word, ...], Meta(min_length=1)]
    source: Source = Source()
    fitting: Fitting = Fitting()
    experts: ExpertCodec
    trunk: Annotated[tuple[TrunkRule, ...], Meta(min_length=1, max_length=1000)]
    prune: Prune | UnsetType = UNSET
    statistics: ColumnWeights | UnsetType = UNSET


def recipe_from_builtins(document: Any, *, where: str, error: type[MoepackError] = UsageError) -> Recipe:
    """Make a recipe of plain values, checking types, ranges and what the keys say together.

    Args:
        document: dictionaries, lists, strings, numbers, as ``tomllib``, ``json`` or ``msgspec.to_builtins`` give them.
        where: for messages.
        error: what to raise; ``FormatError`` if the document came from a container.
    """
    recipe = converted(document, Recipe, where=where, error=error, words=_WORDS)
    for key, what in _contradictions(recipe):
        raise error(what, where=f"{where}: {key}")
    return recipe


def plain(recipe: Recipe) -> dict[str, Any]:
    """``recipe`` as JSON would carry it, free to be changed."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(recipe))
    return document


def _contradictions(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """What types and ranges cannot express: (key, what is wrong)."""
    tables: list[tuple[str, ExpertCodec | TrunkRule]] = [("experts", recipe.experts)]
    if isinstance(recipe.experts, Rvq) and recipe.experts.fallback is not None:
        tables.append(("experts.fallback", recipe.experts.fallback))
    tables += [(f"trunk.{number}", rule) for number, rule in enumerate(recipe.trunk)]
    for key, table in tables:
        if isinstance(table, SourceBytes | Mxfp4 | Raw | RawRule) and table.max_rel_error != 0:
            yield f"{key}.max_rel_error", f"{table.codec} is lossless, its error limit is 0"
    if sum(len(rule.names) for rule in recipe.trunk) > MAX_NAMES:
        yield "trunk", f"more than {MAX_NAMES} names in all rules"
    for number, rule in enumerate(recipe.trunk):
        if any(pattern.count("*") > MAX_STARS for pattern in rule.names):
            yield f"trunk.{number}.names", f"a pattern has more than {MAX_STARS} stars"
        if not rule.roles and not rule.names:
            yield f"trunk.{number}", 'rule says neither roles nor names (names = ["*"] takes all)'
        if rule.ranks == ():
            yield f"trunk.{number}.ranks", "no rank is listed, the rule can take nothing"
        for role in rule.roles:
            if role not in TRUNK_KINDS:
                yield f"trunk.{number}.roles", f"unknown role {role!r} (known: {', '.join(TRUNK_KINDS)})"
