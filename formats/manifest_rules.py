"""What the members of a manifest must say together (SPEC sections 4.2 to 4.6, 7): order, sums, extents, names."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from formats import layout
from formats.errors import FormatError
from formats.index import INDEX_ROW_BYTES
from formats.manifest_types import (
    ASSETS_DIR,
    INDEX_NAME,
    TRUNK_NAME,
    Manifest,
    TensorInfo,
    bank_name,
)
from formats.names import check_distinct, check_relative_name

MAX_LAYER = 65_535
MAX_EXPERTS = 65_536
MAX_RANK = 8
MAX_SCALE_BIAS = 254

_SEGMENTS = ("embedding", "layer", "output", "vision", "projector", "other")
_LAYER_SEGMENT = re.compile(r"layer\.(0|[1-9][0-9]{0,4})")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Insist on everything that the manifest alone can contradict.

    Raises:
        FormatError: naming the member, what it should be and what it is.
    """
    _check_architecture(manifest, where)
    _check_source(manifest, where)
    _check_layers(manifest, where)
    _check_partial(manifest, where)
    _check_trunk(manifest, where)
    _check_files(manifest, where)
    _check_coverage(manifest, where)


def _require(condition: bool, what: str, where: str, expected: object = None, found: object = None) -> None:
    if not condition:
        raise FormatError(what, where=where, expected=expected, found=found)


def _require_digest(text: str, what: str, where: str) -> None:
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise FormatError(
            f"{what} is not a digest", where=where, expected="64 hexadecimal digits", found=repr(text[:80])
        )


def _require_range(value: int, low: int, high: int, what: str, where: str) -> None:
    if not low <= value <= high:
        raise FormatError(f"{what} is out of range", where=where, expected=f"{low} to {high}", found=value)


def _require_sorted(names: list[str], what: str, where: str) -> None:
    """Names of files: distinct, and ascending by their bytes."""
    check_distinct(names, where=where)
    for before, name in pairwise(names):
        _require(
            before.encode() < name.encode(), f"{what} are not sorted by name", where, f"above {before!r}", repr(name)
        )


def _check_architecture(manifest: Manifest, where: str) -> None:
    arch = manifest.architecture
    _require_range(arch.hidden_layers, 1, MAX_LAYER, "architecture.hidden_layers", where)
    _require_range(arch.experts, 1, MAX_EXPERTS, "architecture.experts", where)
    _require_range(arch.experts_per_token, 1, arch.experts, "architecture.experts_per_token", where)
    _require_range(arch.hidden_size, 1, layout.MAX_SIDE, "architecture.hidden_size", where)
    _require(
        list(arch.moe_layers) == sorted(set(arch.moe_layers))
        and all(0 <= n < arch.hidden_layers for n in arch.moe_layers),
        "architecture.moe_layers is not an ascending list of layers",
        where,
    )


def _check_source(manifest: Manifest, where: str) -> None:
    source = manifest.source
    _require_range(source.scale_bias, 1, MAX_SCALE_BIAS, "source.scale_bias", where)
    _require(
        source.nonfinite == "refuse", "source.nonfinite is not known", where, "refuse", repr(source.nonfinite[:80])
    )


def _check_layers(manifest: Manifest, where: str) -> None:
    row = 0
    previous = -1
    for info in manifest.layers:
        place = f"{where}: layers[layer {info.layer}]"
        _require(info.layer > previous, "layers are not in ascending order", place, f"above {previous}", info.layer)
        _require(info.layer in manifest.architecture.moe_layers, "layer has no experts in this model", place)
        _require(
            info.file == bank_name(info.layer),
            "bank has an unexpected name",
            place,
            bank_name(info.layer),
            repr(info.file),
        )
        experts = manifest.architecture.experts
        _require(
            info.source_experts == experts,
            "source_experts is not architecture.experts",
            place,
            experts,
            info.source_experts,
        )
        dropped = info.dropped_experts
        _require(
            list(dropped) == sorted(set(dropped)) and all(0 <= number < info.source_experts for number in dropped),
            "dropped_experts is not an ascending list of source experts",
            place,
        )
        kept = info.source_experts - len(dropped)
        _require(info.experts == kept >= 1, "experts does not follow from what was dropped", place, kept, info.experts)
        _require_range(info.records, 1, info.experts, "records", place)
        _require(info.first_row == row, "first_row does not follow the layer before", place, row, info.first_row)
        _require(
            info.bytes % layout.PAGE == 0 and layout.PAGE * info.records <= info.bytes <= 1 << 62,
            "bank length is impossible",
            place,
            found=info.bytes,
        )
        _require_digest(info.index_blake3, "index_blake3", place)
        row += info.records
        previous = info.layer
    total = sum(info.bytes for info in manifest.layers)
    index = manifest.index
    expected = INDEX_ROW_BYTES * (1 + row)
    _require(
        manifest.experts.count == row,
        "experts.count is not the sum of the layers' records",
        where,
        row,
        manifest.experts.count,
    )
    _require(
        manifest.experts.bytes == total,
        "experts.bytes is not the sum of the banks",
        where,
        total,
        manifest.experts.bytes,
    )
    _require(index.rows == row, "index.rows is not the sum of the layers' records", where, row, index.rows)
    _require(index.bytes == expected, "index.bytes does not follow from its rows", where, expected, index.bytes)
    shapes = manifest.experts.shapes
    for side in (side for shape in shapes for side in shape):
        _require_range(side, 1, layout.MAX_SIDE, "experts.shapes", where)
    weights = row * sum(rows * cols for rows, cols in shapes)
    _require(
        manifest.experts.weights == weights, "experts.weights does not follow", where, weights, manifest.experts.weights
    )


def _check_partial(manifest: Manifest, where: str) -> None:
    arch, partial = manifest.architecture, manifest.partial
    if partial is None:
        _require(
            tuple(info.layer for info in manifest.layers) == arch.moe_layers,
            "layers are missing, yet partial is null",
            where,
        )
        _require(
            all(info.records == info.experts for info in manifest.layers),
            "experts are missing, yet partial is null",
            where,
        )
        _require(manifest.coverage.omitted == 0, "tensors were omitted, yet partial is null", where)
        return
    _require(manifest.coverage.omitted > 0, "nothing was omitted, yet partial is not null", where)
    for name, numbers, end in (
        ("layers", partial.layers, arch.hidden_layers),
        ("experts", partial.experts or (), arch.experts),
    ):
        _require(
            list(numbers) == sorted(set(numbers)) and all(0 <= number < end for number in numbers),
            f"partial.{name} is not an ascending list of {name}",
            where,
        )
    _require(
        set(partial.layers) >= {info.layer for info in manifest.layers}, "a layer is outside partial.layers", where
    )


def _check_trunk(manifest: Manifest, where: str) -> None:
    trunk = manifest.trunk
    end = layout.TRUNK_HEADER_BYTES
    previous = (-1, -1)
    for segment in trunk.segments:
        place = f"{where}: trunk.segments[{segment.name}]"
        rank = _segment_rank(segment.name, manifest.architecture.hidden_layers, place)
        _require(previous < rank, "segments are not in the order of the forward pass", place)
        previous = rank
        _require(segment.offset == end, "segment does not follow the one before", place, end, segment.offset)
        _require(
            segment.bytes > 0 and segment.bytes % layout.PAGE == 0,
            "segment is not page aligned",
            place,
            found=segment.bytes,
        )
        end = segment.offset + segment.bytes
    _require(trunk.bytes == end <= 1 << 62, "trunk.bytes is not the end of its last segment", where, end, trunk.bytes)
    _check_tensors(manifest, where)


def _segment_rank(name: str, layers: int, place: str) -> tuple[int, int]:
    """Where a segment stands in the order of SPEC section 7, and its layer (-1 for none)."""
    match = _LAYER_SEGMENT.fullmatch(name)
    if match is not None and int(match[1]) < layers:
        return _SEGMENTS.index("layer"), int(match[1])
    if name == "layer" or name not in _SEGMENTS:
        raise FormatError(
            "segment has an unknown name",
            where=place,
            expected=f"embedding, layer.0 to layer.{layers - 1}, output, vision, projector or other",
        )
    return _SEGMENTS.index(name), -1


def _check_tensors(manifest: Manifest, where: str) -> None:
    """Tensors fill the segments in order, each 64-aligned, with no gap beyond the alignment."""
    segments = iter(manifest.trunk.segments)
    names: set[str] = set()
    cursor = limit = layout.TRUNK_HEADER_BYTES
    layer: int | None = None
    for tensor in manifest.tensors:
        place = f"{where}: tensors[{tensor.name}]"
        _require(tensor.name not in names, "tensor stands twice", place)
        names.add(tensor.name)
        _check_tensor(tensor, manifest.architecture.hidden_layers, place)
        if tensor.offset != cursor or (cursor == limit and tensor.bytes):
            _require(
                layout.align(cursor, layout.PAGE) == limit,
                "tensor does not follow the one before",
                place,
                cursor,
                tensor.offset,
            )
            segment = next(segments, None)
            if segment is None:
                raise FormatError("tensor lies behind the last segment", where=place, found=tensor.offset)
            cursor, limit = segment.offset, segment.offset + segment.bytes
            match = _LAYER_SEGMENT.fullmatch(segment.name)
            layer = None if match is None else int(match[1])
        _require(tensor.offset == cursor, "tensor does not follow the one before", place, cursor, tensor.offset)
        _require(
            0 <= tensor.bytes <= limit - cursor,
            "tensor does not fit its segment",
            place,
            f"at most {limit - cursor}",
            tensor.bytes,
        )
        # A tensor of no bytes lies in whatever segment stands next to its place.
        _require(
            not tensor.bytes or tensor.layer == layer, "layer is not that of the segment", place, layer, tensor.layer
        )
        cursor = min(layout.align(tensor.offset + tensor.bytes, layout.LINE), limit)
    _require(layout.align(cursor, layout.PAGE) == limit, "segment is longer than its tensors", where, cursor, limit)
    rest = next(segments, None)
    _require(rest is None, "segment holds no tensor", where, found=rest.name if rest else None)


def _check_tensor(tensor: TensorInfo, layers: int, place: str) -> None:
    _require(len(tensor.shape) <= MAX_RANK, "tensor has too many dimensions", place, MAX_RANK, len(tensor.shape))
    _require(
        all(0 <= side < 1 << 48 for side in tensor.shape) and math.prod(tensor.shape) < 1 << 60,
        "tensor has an impossible shape",
        place,
        found=list(tensor.shape),
    )
    _require(0.0 <= tensor.rel_error < math.inf, "rel_error is not a finite number", place)
    _require_range(
        tensor.scale_exponent, -layout.MAX_SCALE_EXPONENT, layout.MAX_SCALE_EXPONENT, "scale_exponent", place
    )
    if tensor.layer is not None:
        _require_range(tensor.layer, 0, layers - 1, "layer", place)
    _require_digest(tensor.blake3, "blake3", place)
    _require_digest(tensor.source_blake3, "source_blake3", place)


def _check_files(manifest: Manifest, where: str) -> None:
    index, trunk = manifest.index, manifest.trunk
    _require(index.file == INDEX_NAME, "index has an unexpected name", where, INDEX_NAME, repr(index.file))
    _require(trunk.file == TRUNK_NAME, "trunk has an unexpected name", where, TRUNK_NAME, repr(trunk.file))
    _require_digest(index.blake3, "index.blake3", where)
    for asset in manifest.assets:
        check_relative_name(asset.path, where=where)
        _require(asset.path.startswith(f"{ASSETS_DIR}/"), "asset lies outside assets/", where, found=repr(asset.path))
        _require_range(asset.bytes, 0, 1 << 40, f"length of {asset.path}", where)
        _require_digest(asset.blake3, f"digest of {asset.path}", where)
    _require_sorted([asset.path for asset in manifest.assets], "assets", where)
    for shard in manifest.source.shards:
        check_relative_name(shard.name, where=where)
        _require_range(shard.bytes, 0, 1 << 62, f"length of {shard.name}", where)
        _require_digest(shard.sha256, f"digest of {shard.name}", where)
    _require_sorted([shard.name for shard in manifest.source.shards], "source.shards", where)


def _check_coverage(manifest: Manifest, where: str) -> None:
    coverage = manifest.coverage
    _require_digest(coverage.names_blake3, "coverage.names_blake3", where)
    total = coverage.packed + coverage.copied + coverage.dropped + coverage.omitted
    _require(
        min(coverage.packed, coverage.copied, coverage.dropped, coverage.omitted) >= 0
        and total == manifest.source.tensors,
        "coverage does not add up to the source's tensors",
        where,
        manifest.source.tensors,
        total,
    )
    _require(
        set(manifest.experts.tensors) == {matrix.label for matrix in layout.Matrix},
        "experts.tensors does not name gate, up and down",
        where,
    )
    for templates in manifest.experts.tensors.values():
        _require(
            bool(templates) and all("{layer}" in text and "{expert}" in text for text in templates),
            "experts.tensors has a name without {layer} or {expert}",
            where,
        )
