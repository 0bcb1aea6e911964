"""What activation statistics are: of which model and text, and the sums of one layer, checked.

They are counted by a pass of sample text through the model, in windows of equal length, each window with a label: the
source of text that it comes from. Nothing here reads or writes; the file is the business of ``packer.statistics.file``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from formats import strict_json
from formats.errors import FormatError, UsageError
from packer.documents import converted
from packer.model_stamp import Digest, ModelStamp, Text

MAX_LABELS = 64
MAX_TOKENS = 1 << 40  # of a label: sums over experts then fit 64 bits
MAX_SUM = 1e30  # of squares: mean squares then fit float32

Double = NDArray[np.float64]
Single = NDArray[np.float32]
Whole = NDArray[np.int64]

_AGREEMENT = 1e-6  # of sums that were added up in another order


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An object that refuses unknown members and wrong types."""


class SampledModel(ModelStamp, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that the text went through; ``source`` is where its weights came from, as it was given."""

    source: Annotated[str, Meta(min_length=1, max_length=4096)]


class SampleText(_Strict, frozen=True, kw_only=True):
    """A file of sample text: its name as it was given, its length and its BLAKE3."""

    name: Annotated[str, Meta(min_length=1, max_length=4096)]
    bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    blake3: Digest


class SampleLabel(_Strict, frozen=True, kw_only=True):
    """A source of text: its name, the tokens that went through the model, and its files."""

    name: Text
    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    texts: Annotated[tuple[SampleText, ...], Meta(max_length=1 << 16)]


class Provenance(_Strict, frozen=True, kw_only=True):
    """What statistics are of. ``window`` is how many tokens were seen together, ``tool`` what counted."""

    model: SampledModel
    labels: Annotated[tuple[SampleLabel, ...], Meta(min_length=1, max_length=MAX_LABELS)]
    window: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    tool: Text

    @property
    def tokens(self) -> int:
        """Of all labels."""
        return sum(label.tokens for label in self.labels)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True)
class LayerStatistics:
    """The sums of one layer. The members are the tensors of the file.

    Attributes:
        tokens: int64 [labels, experts], tokens routed to each expert.
        gate: float64 [labels, experts], sums of their gate weights.
        saliency: float64 [labels, experts], sums of gate weight times the norm of the expert's output (REAP, equation 9
            of arXiv:2510.13999, without the division by the tokens).
        halves: float64 [2, labels, experts], the same of even and of odd windows.
        input: float64 [inputs], sums over all tokens of squares of the experts' input, which gate and up multiply.
        activation: float64 [width], sums over all routed (token, expert) pairs of squares of what down multiplies.
        expert_input: float32 [experts, inputs], sums of squares over the tokens of each expert.
        expert_activation: float32 [experts, width], likewise.
    """

    tokens: Whole
    gate: Double
    saliency: Double
    halves: Double
    input: Double
    activation: Double
    expert_input: Single
    expert_activation: Single


def layer_tables(labels: int, experts: int, inputs: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a layer, in the order of the file."""
    return {
        "tokens": ("I64", (labels, experts)),
        "gate": ("F64", (labels, experts)),
        "saliency": ("F64", (labels, experts)),
        "halves": ("F64", (2, labels, experts)),
        "input": ("F64", (inputs,)),
        "activation": ("F64", (width,)),
        "expert_input": ("F32", (experts, inputs)),
        "expert_activation": ("F32", (experts, width)),
    }


def check_layer(found: LayerStatistics, provenance: Provenance, *, where: str) -> None:
    """Insist on what the sums of a layer must say together.

    Raises:
        FormatError: sums that are not finite or below zero, tokens that are not k for each token of a label, an expert
            without tokens that did something, or halves that do not add up.
    """
    check_tokens(found.tokens, provenance, where=where)
    for name in ("gate", "saliency", "halves", "input", "activation", "expert_input", "expert_activation"):
        check_sums(getattr(found, name), where=f"{where}{name}")
    unseen = found.tokens == 0
    for name in ("gate", "saliency"):
        if getattr(found, name)[unseen].any():
            raise FormatError("an expert without tokens has a sum", where=f"{where}{name}")
    never = unseen.all(axis=0)
    for name in ("expert_input", "expert_activation"):
        if getattr(found, name)[never].any():
            raise FormatError("an expert without tokens has a sum", where=f"{where}{name}")
    together = found.halves.sum(axis=0)
    if not np.allclose(together, found.saliency, rtol=_AGREEMENT, atol=0.0):
        raise FormatError("the two halves are not the whole", where=f"{where}halves")


def check_tokens(tokens: Whole, provenance: Provenance, *, where: str) -> None:
    """Every token of a label is routed to as many experts as the model uses a token."""
    for label, counts in zip(provenance.labels, tokens, strict=True):
        expected = label.tokens * provenance.model.experts_per_token
        sound = bool(((counts >= 0) & (counts <= label.tokens)).all())
        if not sound or int(counts.sum()) != expected:
            raise FormatError(
                f"tokens of label {label.name} were not all routed",
                where=f"{where}tokens",
                expected=f"{expected} in all, at most {label.tokens} to an expert",
                found=int(counts.sum()) if sound else f"{int(counts.min())} to {int(counts.max())}",
            )


def check_sums(values: NDArray[Any], *, where: str, shape: tuple[int, ...] | None = None, first: int = 0) -> None:
    """Sums are finite, not below zero, and of a size that numbers of a model can come to.

    Args:
        values: at least one.
        where: for messages.
        shape: of the tensor, where ``values`` are a part of it.
        first: place of the first of them in the flat tensor.

    Raises:
        FormatError: with the place of the first that is not.
    """
    if bool(values.min() >= 0) and bool(values.max() <= MAX_SUM):  # both are NaN where one is: false then
        return
    at = int(np.flatnonzero(~((values >= 0) & (values <= MAX_SUM)).reshape(-1))[0])
    place = [int(index) for index in np.unravel_index(first + at, shape or values.shape)]
    raise FormatError(
        "sums are not all numbers in range",
        where=f"{where}{place}",
        expected=f"0 to {MAX_SUM:g}",
        found=f"{values.reshape(-1)[at]:g}",
    )


def check_provenance(provenance: Provenance, *, where: str) -> None:
    """Refuse what cannot stand in a file, before anything is computed for it.

    Raises:
        UsageError: a name that is too long, is no text or stands twice, or too many labels.
    """
    try:
        document = strict_json.parse_object(msgspec.json.encode(provenance), where=where)
    except UnicodeEncodeError as error:
        raise UsageError(f"a name is not text: {error.reason}", where=where) from None
    checked(converted(document, Provenance, where=where), where, UsageError)


def checked(provenance: Provenance, where: str, error: type[FormatError | UsageError]) -> Provenance:
    """``provenance``, if its parts agree with each other; ``error`` says what does not."""
    model, names = provenance.model, [label.name for label in provenance.labels]
    if model.experts_per_token > model.experts:
        raise error("more experts a token than there are", where=where, expected=model.experts)
    if len(set(names)) != len(names):
        raise error("a label stands twice", where=where, found=", ".join(names)[:80])
    return provenance
