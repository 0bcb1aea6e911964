"""The shape of the manifest: one frozen struct an object of SPEC section 4, strict about members and types."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

FILE_NAME = "manifest.json"
INDEX_NAME = "index.bin"
TRUNK_NAME = "trunk.bin"
EXPERTS_DIR = "experts"
ASSETS_DIR = "assets"
WORK_DIR = ".packing"  # of a pack that has not ended: no part of a container


Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # the ``int`` of SPEC section 4.2


def bank_name(layer: int) -> str:
    """The file of one layer's records, relative to the container."""
    return f"{EXPERTS_DIR}/layer-{layer:05d}.bank"


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON object that refuses unknown members and wrong types."""


class Tool(_Strict, frozen=True, kw_only=True):
    """What wrote the container."""

    name: str
    version: str


class ArchitectureInfo(_Strict, frozen=True, kw_only=True):
    """The model, as far as the layout of the container depends on it; ``assets/config.json`` has the rest."""

    family: str
    name: str
    hidden_layers: Whole
    moe_layers: tuple[Whole, ...]
    experts: Whole
    experts_per_token: Whole
    hidden_size: Whole


class ShardInfo(_Strict, frozen=True, kw_only=True):
    """One source file: its name, length and SHA-256."""

    name: str
    bytes: Whole
    sha256: str


class SourceInfo(_Strict, frozen=True, kw_only=True):
    """Where the weights came from. ``bytes`` counts tensor bytes, ``shards`` are those read."""

    repository: str | None
    commit: str | None
    tensors: Whole
    bytes: Whole
    scale_bias: Whole
    nonfinite: str
    shards: tuple[ShardInfo, ...]


class Coverage(_Strict, frozen=True, kw_only=True):
    """The fate of every source tensor, counted; ``names_blake3`` stands for the sorted names of the first three."""

    packed: Whole
    copied: Whole
    dropped: Whole
    omitted: Whole
    names_blake3: str


class Dropped(_Strict, frozen=True, kw_only=True):
    """A source tensor that a rule of the recipe leaves out."""

    name: str
    rule: Whole


class Fitting(_Strict, frozen=True, kw_only=True):
    """How lossy codes were chosen: enough to repeat it."""

    method: str
    seed: Whole
    kernel: str


class ExpertsInfo(_Strict, frozen=True, kw_only=True):
    """All expert records together.

    ``shapes`` are the [rows, columns] of gate, up and down, alike in every record; ``weights`` counts the weights of
    all records; ``tensors`` holds, by matrix, the source names with {layer} and {expert}.
    """

    count: Whole
    bytes: Whole
    weights: Whole
    shapes: tuple[tuple[Whole, Whole], tuple[Whole, Whole], tuple[Whole, Whole]]
    tensors: dict[str, tuple[str, ...]]


class LayerInfo(_Strict, frozen=True, kw_only=True):
    """One bank: ``records`` rows of the index from ``first_row`` on, with the digest of these rows.

    ``experts`` is how many the layer's router chooses from in this container; ``dropped_experts`` are those of the
    source's ``source_experts`` that a rule leaves out.
    """

    layer: Whole
    file: str
    bytes: Whole
    records: Whole
    experts: Whole
    source_experts: Whole
    dropped_experts: tuple[Whole, ...]
    first_row: Whole
    index_blake3: str


class IndexInfo(_Strict, frozen=True, kw_only=True):
    """``index.bin``."""

    file: str
    bytes: Whole
    rows: Whole
    blake3: str


class Segment(_Strict, frozen=True, kw_only=True):
    """A page-aligned run of ``trunk.bin`` that the forward pass needs at one time."""

    name: str
    offset: Whole
    bytes: Whole


class TrunkInfo(_Strict, frozen=True, kw_only=True):
    """``trunk.bin``."""

    file: str
    bytes: Whole
    segments: tuple[Segment, ...]


class TensorInfo(_Strict, frozen=True, kw_only=True):
    """One tensor of the trunk; ``offset`` counts from the start of ``trunk.bin``."""

    name: str
    role: str
    layer: Whole | None
    dtype: str
    shape: tuple[Whole, ...]
    codec: str
    parameters: dict[str, Whole | str]
    scale_exponent: int
    offset: Whole
    bytes: Whole
    blake3: str
    source_blake3: str
    rel_error: float


class AssetInfo(_Strict, frozen=True, kw_only=True):
    """One file that goes along unchanged; ``path`` is relative to the container."""

    path: str
    bytes: Whole
    blake3: str


class Partial(_Strict, frozen=True, kw_only=True):
    """What a partial container was limited to; ``experts`` is null when whole layers were packed."""

    layers: tuple[Whole, ...]
    experts: tuple[Whole, ...] | None


class Manifest(_Strict, frozen=True, kw_only=True):
    """The whole manifest, without its seal."""

    format: str
    format_version: Whole
    format_revision: Whole
    tool: Tool
    architecture: ArchitectureInfo
    source: SourceInfo
    coverage: Coverage
    dropped: tuple[Dropped, ...]
    recipe: dict[str, Any]
    fitting: Fitting
    partial: Partial | None
    experts: ExpertsInfo
    layers: tuple[LayerInfo, ...]
    index: IndexInfo
    trunk: TrunkInfo
    tensors: tuple[TensorInfo, ...]
    assets: tuple[AssetInfo, ...]
