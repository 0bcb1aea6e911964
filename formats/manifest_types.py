"""The shape of the manifest: one frozen struct an object of SPEC section 4, strict about members and types."""

from __future__ import annotations

from typing import Any

import msgspec

FILE_NAME = "manifest.json"
INDEX_NAME = "index.bin"
TRUNK_NAME = "trunk.bin"
EXPERTS_DIR = "experts"
ASSETS_DIR = "assets"


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
    hidden_layers: int
    moe_layers: tuple[int, ...]
    experts: int
    experts_per_token: int
    hidden_size: int


class ShardInfo(_Strict, frozen=True, kw_only=True):
    """One source file: its name, length and SHA-256."""

    name: str
    bytes: int
    sha256: str


class SourceInfo(_Strict, frozen=True, kw_only=True):
    """Where the weights came from. ``bytes`` counts tensor bytes, ``shards`` are those read."""

    repository: str | None
    commit: str | None
    tensors: int
    bytes: int
    scale_bias: int
    nonfinite: str
    shards: tuple[ShardInfo, ...]


class Coverage(_Strict, frozen=True, kw_only=True):
    """The fate of every source tensor, counted; ``names_blake3`` stands for the sorted names of the first three."""

    packed: int
    copied: int
    dropped: int
    omitted: int
    names_blake3: str


class Dropped(_Strict, frozen=True, kw_only=True):
    """A source tensor that a rule of the recipe leaves out."""

    name: str
    rule: int


class Fitting(_Strict, frozen=True, kw_only=True):
    """How lossy codes were chosen: enough to repeat it."""

    method: str
    seed: int
    kernel: str


class ExpertsInfo(_Strict, frozen=True, kw_only=True):
    """All expert records together.

    ``shapes`` are the [rows, columns] of gate, up and down, alike in every record; ``weights`` counts the weights of
    all records; ``tensors`` holds, by matrix, the source names with {layer} and {expert}.
    """

    count: int
    bytes: int
    weights: int
    shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    tensors: dict[str, tuple[str, ...]]


class LayerInfo(_Strict, frozen=True, kw_only=True):
    """One bank: ``records`` rows of the index from ``first_row`` on, with the digest of these rows.

    ``experts`` is how many the layer's router chooses from in this container; ``dropped_experts`` are those of the
    source's ``source_experts`` that a rule leaves out.
    """

    layer: int
    file: str
    bytes: int
    records: int
    experts: int
    source_experts: int
    dropped_experts: tuple[int, ...]
    first_row: int
    index_blake3: str


class IndexInfo(_Strict, frozen=True, kw_only=True):
    """``index.bin``."""

    file: str
    bytes: int
    rows: int
    blake3: str


class Segment(_Strict, frozen=True, kw_only=True):
    """A page-aligned run of ``trunk.bin`` that the forward pass needs at one time."""

    name: str
    offset: int
    bytes: int


class TrunkInfo(_Strict, frozen=True, kw_only=True):
    """``trunk.bin``."""

    file: str
    bytes: int
    segments: tuple[Segment, ...]


class TensorInfo(_Strict, frozen=True, kw_only=True):
    """One tensor of the trunk; ``offset`` counts from the start of ``trunk.bin``."""

    name: str
    role: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    codec: str
    parameters: dict[str, int | str]
    scale_exponent: int
    offset: int
    bytes: int
    blake3: str
    source_blake3: str
    rel_error: float


class AssetInfo(_Strict, frozen=True, kw_only=True):
    """One file that goes along unchanged; ``path`` is relative to the container."""

    path: str
    bytes: int
    blake3: str


class Partial(_Strict, frozen=True, kw_only=True):
    """What a partial container was limited to; ``experts`` is null when whole layers were packed."""

    layers: tuple[int, ...]
    experts: tuple[int, ...] | None


class Manifest(_Strict, frozen=True, kw_only=True):
    """The whole manifest, without its seal."""

    format: str
    format_version: int
    format_revision: int
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
