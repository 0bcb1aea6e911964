"""What ``packer.inspect.reading`` hands out: frozen views of a container, a layer, a record and a matrix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from formats.manifest_types import TensorInfo


@dataclass(frozen=True)
class Spread:
    """How a set of relative errors is distributed; None where there is none."""

    count: int
    min: float | None
    median: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True)
class FileSize:
    """A file of the container."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Pruned:
    """What a prune plan left of the experts.

    Attributes:
        source_experts: experts that the packed layers have in the source.
        dropped: those of them that are left out.
        kept_min, kept_max: experts that stay, in the layer with the fewest and in that with the most.
        lossless: records of the lossless tier.
    """

    source_experts: int
    dropped: int
    kept_min: int
    kept_max: int
    lossless: int


@dataclass(frozen=True)
class Summary:
    """What fits one screen about a container.

    Attributes:
        format_version, format_revision, container_id, tool, architecture, source, recipe, fitting: as in the manifest.
        coverage: likewise.
        partial: the selection of a partial container, else None.
        unfinished: False; an unfinished pack is an :class:`Unfinished`.
        files: every file with its length.
        container_bytes, expert_bytes, trunk_bytes, other_bytes: sizes; the first is the sum of the others.
        layers: banks. experts: records. weights: of all experts.
        record_bytes: the largest record.
        bits_per_weight: of the experts, record padding included; None without experts.
        codecs: records of each codec.
        pruned: what a plan left of the experts, None if none are dropped and no plan was given.
        roles: trunk bytes of each role.
        matrix_errors: recorded relative errors of all expert matrices.
        tensor_errors: of all trunk tensors.
    """

    format_version: int
    format_revision: int
    container_id: str
    tool: dict[str, Any]
    architecture: dict[str, Any]
    source: dict[str, Any]
    recipe: dict[str, Any]
    fitting: dict[str, Any]
    coverage: dict[str, Any]
    partial: dict[str, Any] | None
    unfinished: bool
    files: tuple[FileSize, ...]
    container_bytes: int
    expert_bytes: int
    trunk_bytes: int
    other_bytes: int
    layers: int
    experts: int
    weights: int
    record_bytes: int
    bits_per_weight: float | None
    codecs: dict[str, int]
    pruned: Pruned | None
    roles: dict[str, int]
    matrix_errors: Spread
    tensor_errors: Spread

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Unfinished:
    """An output whose pack has not ended: what was asked for, and how much of it is durable.

    The members that a finished container has and this has not yet are None.

    Attributes:
        identity: what the journal begins with, everything that decides the container's bytes.
        architecture, source, recipe: as the manifest will state them; None where the journal does not say.
        units_done, records_done, files_done: durable. records_planned: in all, None where the journal does not say.
        files: what stands there, but for ``files_in_work``, whose lengths were set in advance and say nothing.
        matrix_errors: relative errors of the expert matrices that are done.
    """

    identity: dict[str, Any]
    architecture: dict[str, Any] | None
    source: dict[str, Any] | None
    recipe: dict[str, Any] | None
    units_done: int
    records_done: int
    records_planned: int | None
    files_done: tuple[FileSize, ...]
    files: tuple[FileSize, ...]
    files_in_work: tuple[str, ...]
    matrix_errors: Spread

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --json``, with every key that other programs read."""
        nothing = ("format_version", "layers", "experts", "bits_per_weight", "container_id")
        return {**dict.fromkeys(nothing), "partial": None, "unfinished": True, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class RecordLine:
    """A row of the index, as the listing of a layer shows it."""

    expert: int
    source_expert: int
    codec: str
    parameters: dict[str, Any]
    offset: int
    bytes: int
    rel_error: float
    matrix_errors: tuple[float, ...]
    blake3: str


@dataclass(frozen=True)
class TrunkView:
    """The trunk's file and its tensors, in the order in which they are stored."""

    file: str
    bytes: int
    tensors: tuple[TensorInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --trunk --json``."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True)
class LayerView:
    """One layer: its bank and records, and its tensors in the trunk. ``file`` is None where it has no experts here."""

    layer: int
    file: str | None
    bytes: int
    experts: int
    source_experts: int
    dropped_experts: tuple[int, ...]
    records: tuple[RecordLine, ...]
    tensors: tuple[TensorInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --layer N --json``."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True)
class SectionView:
    """A section of a record."""

    name: str
    offset: int
    bytes: int
    blake3: str


@dataclass(frozen=True)
class MatrixLine:
    """A line of a record's matrix table."""

    name: str
    rows: int
    cols: int
    scale_exponent: int
    rel_error: float
    source_blake3: str
    source_tensors: tuple[str, ...]


@dataclass(frozen=True)
class ExpertView:
    """The header of one record."""

    layer: int
    expert: int
    source_expert: int
    codec: str
    parameters: dict[str, Any]
    file: str
    offset: int
    bytes: int
    payload_bytes: int
    rel_error: float
    blake3: str
    matrices: tuple[MatrixLine, ...]
    sections: tuple[SectionView, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --layer N --expert M --json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class MatrixView:
    """One matrix, decoded.

    Attributes:
        corner: the first values, at most 4 rows of 8.
        scales: the first stored scales in storage order, or scale bytes of mxfp4; empty for raw.
        mean, standard_deviation, smallest, largest, zeros: of the decoded values, in float64.
        codebooks: for rvq: one entry a stage with norms of its entries and how the codes use them; else empty.
    """

    layer: int
    expert: int
    matrix: str
    codec: str
    parameters: dict[str, Any]
    rows: int
    cols: int
    scale_exponent: int
    rel_error: float
    source_tensors: tuple[str, ...]
    corner: tuple[tuple[float, ...], ...]
    scales: tuple[float, ...]
    mean: float
    standard_deviation: float
    smallest: float
    largest: float
    zeros: int
    codebooks: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``inspect --layer N --expert M --matrix gate --json``."""
        return dataclasses.asdict(self)
