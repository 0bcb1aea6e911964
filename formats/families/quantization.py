"""Reading ``quantization_config``: are the routed experts MXFP4, and in groups of how many columns?

Names decide what is packed; the configuration must agree with them. Its patterns come from a file, so only
those are evaluated whose worst case is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from formats.errors import FormatError
from formats.families.fields import Fields

MXFP4_FORMAT = "mxfp4-pack-quantized"
GROUP_SIZE = 32  # the only one that MXFP4 has
SCALE_DTYPE = "torch.uint8"  # exponents
MAX_PATTERNS = 256
MAX_GROUPS = 64

# Literals, escaped signs, `.`, `\d`, groups of literal alternatives; repetitions of single atoms only, and at most
# three choices (repetitions or groups) in all: matching a name of 70 characters takes some 60,000 steps at worst.
_ATOM = r"[A-Za-z0-9_/\- ]|\\[.\-_/d]"
_SAFE_PATTERN = re.compile(rf"\^?(?:(?:{_ATOM}|\.)[*+?]?|\((?:\?:)?(?:{_ATOM}|\|)*\))*\$?")
_CHOICE = re.compile(r"[*+(]|(?<!\()\?")
_MAX_CHOICES = 3
_MAX_PATTERN_LENGTH = 200


@dataclass(frozen=True)
class Quantization:
    """What the configuration says about MXFP4.

    Attributes:
        where: the configuration's object, for messages.
        groups: for each group its target patterns and its group size.
        ignore: patterns of modules that stay dense.
    """

    where: str
    groups: tuple[tuple[tuple[str, ...], int], ...]
    ignore: tuple[str, ...]

    def check_experts(self, modules: Iterable[str]) -> int:
        """Insist that the patterns agree with ``modules``, names of packed expert matrices; return the group size.

        Raises:
            FormatError: a pattern excludes a packed matrix, none includes it, or it cannot be evaluated cheaply.
        """
        sizes: set[int] = set()
        for module in modules:
            for pattern in self.ignore:
                if _matches(pattern, module, self.where):
                    raise FormatError(
                        "an ignore pattern matches routed experts whose tensors are packed",
                        where=f"{self.where}: ignore",
                        expected=f"no pattern that matches {module}",
                        found=repr(pattern),
                    )
            size = next(
                (s for targets, s in self.groups if any(_matches(t, module, self.where) for t in targets)), None
            )
            if size is None:
                raise FormatError(
                    "no config group targets the packed experts", where=self.where, expected=f"a target for {module}"
                )
            sizes.add(size)
        if len(sizes) > 1:
            raise FormatError("experts have several group sizes", where=self.where, found=sorted(sizes))
        return sizes.pop() if sizes else GROUP_SIZE


def read_quantization(fields: Fields | None) -> Quantization | None:
    """The MXFP4 settings of a ``quantization_config``, or None if there is no such object.

    Raises:
        FormatError: another method or format, or parameters that MXFP4 does not have.
    """
    if fields is None:
        return None
    method, layout = fields.text("quant_method"), fields.text("format")
    if method != "compressed-tensors" or layout != MXFP4_FORMAT:
        raise FormatError(
            "quantization method that this family is not read in",
            where=fields.where,
            expected=f"compressed-tensors, {MXFP4_FORMAT}",
            found=f"{method}, {layout}",
        )
    groups = fields.inner("config_groups")
    if groups is None or not 1 <= len(groups.values) <= MAX_GROUPS:
        raise FormatError("config_groups is absent, empty or too long", where=fields.where)
    return Quantization(
        fields.where,
        tuple(_read_group(groups, name) for name in groups.values),
        fields.strings("ignore", most=MAX_PATTERNS),
    )


def _read_group(groups: Fields, name: str) -> tuple[tuple[str, ...], int]:
    group = groups.inner(name)
    weights = None if group is None else group.inner("weights")
    if group is None or weights is None:
        raise FormatError("config group has no weights", where=f"{groups.where}: {name}")
    layout = group.text("format")
    if layout not in (None, MXFP4_FORMAT):
        raise FormatError("config group has another format", where=group.where, expected=MXFP4_FORMAT, found=layout)
    for member, expected in (("num_bits", 4), ("type", "float"), ("group_size", GROUP_SIZE), ("strategy", "group")):
        value = weights.values.get(member)
        if value != expected or type(value) is not type(expected):
            raise FormatError(
                f"{member} is not that of MXFP4", where=weights.where, expected=expected, found=repr(value)[:80]
            )
    if not weights.flag("symmetric", default=True) or weights.values.get("zp_dtype") is not None:
        raise FormatError("MXFP4 has no zero points", where=weights.where, expected="symmetric true, zp_dtype null")
    if weights.values.get("actorder") is not None:
        raise FormatError(
            "columns of MXFP4 stand in their own order",
            where=weights.where,
            expected="actorder null",
            found=repr(weights.values["actorder"])[:80],
        )
    weights.choice("scale_dtype", SCALE_DTYPE)
    return group.strings("targets", most=MAX_PATTERNS), GROUP_SIZE


def _matches(pattern: str, module: str, where: str) -> bool:
    """As compressed-tensors does it: ``re:`` matches from the start, else the name or the class ``Linear``."""
    if not pattern.startswith("re:"):
        return pattern in (module, "Linear")
    text = pattern.removeprefix("re:")
    choices = len(_CHOICE.findall(re.sub(r"\\.", "", text)))
    if len(text) > _MAX_PATTERN_LENGTH or choices > _MAX_CHOICES or not _SAFE_PATTERN.fullmatch(text):
        raise FormatError("pattern cannot be evaluated safely", where=where, found=repr(pattern)[:200])
    return re.match(text, module) is not None
