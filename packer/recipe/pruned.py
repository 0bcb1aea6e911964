"""What a resolved recipe records of a prune plan: which experts of each layer stay, and in what tier.

The record goes into the manifest and into the journal. It is complete: what a container leaves out can be checked
against it without the plan's file.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from formats.families.kimi_config import MAX_LAYERS
from packer.model_stamp import Digest, Text
from packer.number_lists import MAX_LENGTH

MAX_SOURCES = 64

Numbers: TypeAlias = Annotated[str, Meta(max_length=MAX_LENGTH)]
LayerNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table that refuses unknown keys and wrong types."""


class Made(_Strict, frozen=True, kw_only=True):
    """How a plan came about.

    Attributes:
        by: the tool and its version.
        mode: how experts were ranked: ``uniform``, ``global``, ``graded``, or another tool's word.
        keep: how many were to stay, as it was asked for.
        sources: labels of the sample text that counted; empty for all.
        statistics_blake3: of the statistics' file, None if there were none.
        retained_saliency: share of all layers' saliency that the kept experts have, None if it is not known.
    """

    by: Text
    mode: Text
    keep: Text
    sources: Annotated[tuple[Text, ...], Meta(max_length=MAX_SOURCES)] = ()
    statistics_blake3: Digest | None = None
    retained_saliency: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class KeptExperts(_Strict, frozen=True, kw_only=True):
    """The experts of one layer that stay, as source numbers ``0-3,7``: in the recipe's own codec, and lossless."""

    layer: LayerNumber
    keep: Numbers
    lossless: Numbers = ""


class Prune(_Strict, frozen=True, kw_only=True):
    """A plan that was applied.

    Attributes:
        blake3: of the plan in its written form.
        made: how it came about, if it says so.
        lossless_codec: what lossless experts are stored with, None if there are none.
        layers: those that the plan names, ascending; every other layer keeps all of its experts.
    """

    blake3: Digest
    made: Made | None
    lossless_codec: Literal["mxfp4", "raw"] | None
    layers: Annotated[tuple[KeptExperts, ...], Meta(max_length=MAX_LAYERS)]
