"""Where every byte of a planned container will lie: banks of expert records, and segments of the trunk.

Pure functions of the bound model and the resolved recipe. A record's length follows from its codec, parameters and
shapes (``formats.codecs``), a bank is its records one after another, and the trunk is its tensors in the order of the
forward pass, each on a line of 64 bytes, each segment on a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from formats import codecs, layout
from formats.codecs import Parameters, group_int, mxfp4, raw, rvq
from formats.errors import UsageError
from formats.families import Architecture, BoundTensor
from formats.layout import Codec
from formats.manifest import Dropped
from formats.trunk import WEIGHT_DTYPES
from packer.planning.selection import Selection
from packer.prune.pruning import NOTHING_PRUNED, KeptByLayer
from packer.recipe.recipe import DropRule, ExpertCodec, GroupInt, GroupIntRule, Mxfp4, Recipe, Rvq, choose_rule

ENTRY_BYTES = 2 * rvq.DIMENSION  # one codebook entry: eight float16 numbers

BY_EXPERT = ("router", "router_bias")  # roles of tensors that have a row for each expert of their layer

TrunkParameters: TypeAlias = group_int.Parameters | raw.Parameters


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """An expert record: which expert it holds, how, and where in its bank."""

    expert: int
    source_expert: int
    codec: Codec
    parameters: Parameters
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A bank: the records of one layer, by expert, without gaps from offset 0; ``dropped`` are source experts."""

    layer: int
    bytes: int
    records: tuple[RecordPlan, ...]
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A trunk tensor: what it is in the source, how it is stored, and where in ``trunk.bin``.

    Where only ``rows`` of the source's tensor are stored, ``shape`` and ``source_bytes`` are those of these rows.
    """

    name: str
    role: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    shard: str
    source_bytes: int
    codec: Codec
    parameters: TrunkParameters
    offset: int
    bytes: int
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A page-aligned run of ``trunk.bin``; ``bytes`` includes the zeros up to the next page."""

    name: str
    offset: int
    bytes: int
    tensors: tuple[TensorPlan, ...]


@dataclass(frozen=True)
class TrunkPlan:
    """The trunk, and the fate of every tensor that is not in it."""

    segments: tuple[SegmentPlan, ...]
    dropped: tuple[Dropped, ...]
    omitted: tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    """A tensor that is stored: how, and which rows of it (None for all)."""

    tensor: BoundTensor
    codec: Codec
    parameters: TrunkParameters
    rows: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is stored."""
        shape = self.tensor.shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def bytes(self) -> int:
        """Stored bytes."""
        return codecs.trunk_bytes(self.codec, self.parameters, self.shape, where=self.tensor.name)

    def placed(self, offset: int) -> TensorPlan:
        """The tensor with its place."""
        tensor = self.tensor
        length = tensor.bytes
        if self.rows is not None:
            length = tensor.bytes // tensor.shape[0] * len(self.rows)
        return TensorPlan(
            tensor.name,
            tensor.role.kind,
            tensor.role.layer,
            tensor.dtype,
            self.shape,
            tensor.shard,
            length,
            self.codec,
            self.parameters,
            offset,
            self.bytes,
            self.rows,
        )


def expert_codec(recipe: Recipe, architecture: Architecture) -> tuple[Codec, Parameters, str | None]:
    """How the experts are stored: all have the same shapes, so all are stored alike, but for a plan's lossless tier.

    rvq gives way to its fallback where it makes no sense: fewer 8-vectors than entries, or codebooks that are larger
    than the indices they serve. With codebooks for each matrix, the
    smallest matrix decides.

    Returns:
        Codec, parameters, and a note for people if the fallback was taken.

    Raises:
        UsageError: the fallback is needed and the recipe has none.
    """
    wanted = recipe.experts
    if not isinstance(wanted, Rvq):
        return (*_coded(wanted, recipe, architecture), None)
    reason = _too_small(wanted, architecture)
    if reason is None:
        return (*_coded(wanted, recipe, architecture), None)
    if wanted.fallback is None:
        raise UsageError(
            f"experts are too small for rvq: {reason}",
            where=f"recipe {recipe.name}: experts",
            hint="give the recipe an experts.fallback, or fewer entries",
        )
    chosen = wanted.fallback
    detail = f" with {chosen.bits} bits" if isinstance(chosen, GroupInt) else ""
    note = f"experts are stored as {chosen.codec}{detail} instead of rvq, the recipe's fallback: {reason}"
    return (*_coded(chosen, recipe, architecture), note)


def _too_small(wanted: Rvq, architecture: Architecture) -> str | None:
    vectors = [rows * rvq.vectors_per_row(cols) for rows, cols in architecture.expert_shapes]
    served = sum(vectors) if wanted.codebooks == "expert" else min(vectors)
    codebooks, indices = ENTRY_BYTES * wanted.entries * wanted.stages, served * wanted.stages
    if served < wanted.entries:
        return f"{served} vectors cannot fill {wanted.entries} entries"
    if codebooks > indices:
        return f"{codebooks} bytes of codebooks would serve {indices} bytes of indices"
    return None


def _coded(coded: ExpertCodec, recipe: Recipe, architecture: Architecture) -> tuple[Codec, Parameters]:
    if isinstance(coded, Rvq):
        return Codec.RVQ, rvq.Parameters(stages=coded.stages, entries=coded.entries, scope=coded.codebooks)
    if isinstance(coded, Mxfp4):
        return Codec.MXFP4, mxfp4.Parameters(bias=recipe.source.mxfp4_bias)
    if isinstance(coded, GroupInt):
        return Codec.GROUP_INT, group_int.Parameters(bits=coded.bits, group=coded.group)
    return Codec.RAW, raw.Parameters(architecture.expert_dtype)


def lossless_codec(recipe: Recipe, architecture: Architecture) -> tuple[Codec, Parameters]:
    """How experts are stored whose own bytes are to stay."""
    if architecture.expert_format == "mxfp4":
        return Codec.MXFP4, mxfp4.Parameters(bias=recipe.source.mxfp4_bias)
    return Codec.RAW, raw.Parameters(architecture.expert_dtype)


def plan_layers(
    architecture: Architecture,
    codec: Codec,
    parameters: Parameters,
    selection: Selection | None,
    *,
    kept: KeptByLayer = NOTHING_PRUNED,
    lossless: tuple[Codec, Parameters] | None = None,
) -> tuple[LayerPlan, ...]:
    """The bank of every selected layer that has experts.

    Args:
        architecture: of the model.
        codec, parameters: of all experts but the lossless ones.
        selection: layers, or experts of each layer; no experts where ``kept`` says something.
        kept: by layer the experts that stay, where not all do or not all are stored alike. They are renumbered.
        lossless: codec and parameters of those that keep the source's bytes.
    """
    experts: Sequence[int] = range(architecture.experts)
    layers = architecture.moe_layers
    if selection is not None:
        experts = experts if selection.experts is None else selection.experts
        layers = tuple(layer for layer in layers if selection.layers is None or layer in selection.layers)
    usual = (codec, parameters)
    same = _records([(expert, expert, usual) for expert in experts], architecture)
    plans = []
    for layer in layers:
        stay = kept.get(layer)
        records = same
        if stay is not None:
            numbered = enumerate(stay.experts)
            how = [(new, old, (lossless or usual) if old in stay.lossless else usual) for new, old in numbered]
            records = _records(how, architecture)
        dropped = () if stay is None else stay.dropped
        plans.append(LayerPlan(layer, sum(record.bytes for record in records), records, dropped))
    return tuple(plans)


def _records(
    experts: Sequence[tuple[int, int, tuple[Codec, Parameters]]], architecture: Architecture
) -> tuple[RecordPlan, ...]:
    """Records one after another, of (number, source number, (codec, parameters))."""
    records = []
    lengths: dict[tuple[Codec, Parameters], int] = {}
    end = 0
    for expert, source_expert, how in experts:
        if how not in lengths:
            lengths[how] = codecs.record_bytes(*how, architecture.expert_shapes)
        records.append(RecordPlan(expert, source_expert, *how, end, lengths[how]))
        end += lengths[how]
    return tuple(records)


def plan_trunk(
    trunk: Sequence[BoundTensor], recipe: Recipe, selection: Selection | None, *, kept: KeptByLayer = NOTHING_PRUNED
) -> TrunkPlan:
    """Place every tensor that is not an expert's.

    Args:
        trunk: in the order of the forward pass.
        recipe: its rules decide.
        selection: tensors of other layers, and those of no layer, are omitted.
        kept: by layer the experts that stay: routers have these rows only, in this order.

    Raises:
        UsageError: no rule takes a tensor, or a rule quantises what has no values of its own.
    """
    dropped: list[Dropped] = []
    omitted: list[str] = []
    groups: dict[str, list[_Member]] = {}
    for tensor in trunk:
        if selection is not None and selection.layers is not None and tensor.role.layer not in selection.layers:
            omitted.append(tensor.name)
            continue
        number, rule = choose_rule(recipe, tensor.name, tensor.role.kind, len(tensor.shape))
        if isinstance(rule, DropRule):
            dropped.append(Dropped(name=tensor.name, rule=number))
            continue
        if isinstance(rule, GroupIntRule):
            if tensor.dtype not in WEIGHT_DTYPES:
                raise UsageError(
                    f"rule {number} of recipe {recipe.name} quantises a tensor whose dtype is not for weights",
                    where=tensor.name,
                    expected=", ".join(WEIGHT_DTYPES),
                    found=tensor.dtype,
                    hint="put a raw rule for it before that one",
                )
            how: tuple[Codec, TrunkParameters] = Codec.GROUP_INT, group_int.Parameters(bits=rule.bits, group=rule.group)
        else:
            how = Codec.RAW, raw.Parameters(tensor.dtype)
        groups.setdefault(segment_name(tensor), []).append(_Member(tensor, *how, _kept_rows(tensor, kept)))
    return TrunkPlan(_place(groups), tuple(dropped), tuple(omitted))


def _kept_rows(tensor: BoundTensor, kept: KeptByLayer) -> tuple[int, ...] | None:
    """The rows of a router's tensor that belong to experts which stay; None for all rows, and for other tensors."""
    layer = tensor.role.layer
    if tensor.role.kind not in BY_EXPERT or layer is None or layer not in kept or not kept[layer].dropped:
        return None
    return kept[layer].experts


def segment_name(tensor: BoundTensor) -> str:
    """The part of the forward pass that needs a tensor: embedding, layer.N, output, vision, projector or other."""
    kind = tensor.role.kind
    if kind in ("embedding", "vision", "projector"):
        return kind
    if kind == "unknown":
        return "other"
    return "output" if tensor.role.layer is None else f"layer.{tensor.role.layer}"


def _place(groups: Mapping[str, Sequence[_Member]]) -> tuple[SegmentPlan, ...]:
    """Segments one after another behind the header page."""
    segments: list[SegmentPlan] = []
    end = layout.TRUNK_HEADER_BYTES
    for name, members in _without_empty(groups).items():
        segments.append(_segment(name, end, members))
        end += segments[-1].bytes
    return tuple(segments)


def _without_empty(groups: Mapping[str, Sequence[_Member]]) -> dict[str, list[_Member]]:
    """A segment has at least one page, so tensors of no bytes go along with the segment before, or else behind."""
    kept: dict[str, list[_Member]] = {}
    waiting: list[_Member] = []
    for name, members in groups.items():
        if any(member.bytes for member in members):
            kept[name] = [*waiting, *members]
            waiting = []
        elif kept:
            kept[next(reversed(kept))] += members
        else:
            waiting += members
    if waiting:
        raise UsageError("nothing is left of the trunk but tensors without elements", where=waiting[0].tensor.name)
    return kept


def _segment(name: str, offset: int, members: Sequence[_Member]) -> SegmentPlan:
    tensors = []
    end = offset
    for member in members:
        tensors.append(member.placed(layout.align(end, layout.LINE)))
        end = tensors[-1].offset + tensors[-1].bytes
    return SegmentPlan(name, offset, layout.align(end, layout.PAGE) - offset, tuple(tensors))
