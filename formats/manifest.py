"""The manifest: the typed root of a container, its canonical bytes and its seal (SPEC section 4).

The manifest is JSON with one member or one list item a line. Its last member, the container id, is the BLAKE3 of
every byte before it, so the file proves itself, and through the digests that it holds all other files. What is
known only after packing (digests, errors, scale exponents) has a bounded width: the text is filled up with blanks to
a length that follows from the plan alone, so that a plan is exact to the byte.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from blake3 import blake3

from formats import layout
from formats.errors import FormatError, IntegrityError
from formats.names import check_distinct, check_relative_name
from formats.strict_json import parse_object

FILE_NAME = "manifest.json"
INDEX_NAME = "index.bin"
TRUNK_NAME = "trunk.bin"
EXPERTS_DIR = "experts"
ASSETS_DIR = "assets"
FORMAT_NAME = "moepack"
FORMAT_REVISION = 0
MAX_BYTES = 64 << 20
MAX_LAYER = 65_535
MAX_EXPERTS = 65_536
MAX_RANK = 8

_SEAL_HEAD = b'"container_id":"'
_SEAL_TAIL = b'"}\n'
_SEAL_BYTES = len(_SEAL_HEAD) + 2 * layout.DIGEST_BYTES + len(_SEAL_TAIL)
BLANK_DIGEST = "0" * 64
_WIDEST_ERROR = 1.23457e-100
_WIDEST_EXPONENT = -layout.MAX_SCALE_EXPONENT


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


def bank_name(layer: int) -> str:
    """The file of one layer's records, relative to the container."""
    return f"{EXPERTS_DIR}/layer-{layer:05d}.bank"


def names_digest(names: list[str]) -> str:
    """BLAKE3 of the sorted names, each followed by a newline (SPEC section 4.5)."""
    hasher = blake3()
    for name in sorted(names, key=str.encode):
        hasher.update(name.encode() + b"\n")
    return hasher.hexdigest()


def expert_tensor_names(experts: ExpertsInfo, layer: int, source_expert: int) -> list[str]:
    """The source tensors of one expert, gate, up and down (plain replacement: the templates come from a file)."""
    return [
        template.replace("{layer}", str(layer)).replace("{expert}", str(source_expert))
        for matrix in layout.Matrix
        for template in experts.tensors[matrix.label]
    ]


def covered_names(manifest: Manifest, source_experts: dict[int, list[int]]) -> list[str]:
    """Every source tensor that the container packed, copied or dropped by a rule (SPEC section 4.5).

    Args:
        manifest: the manifest; its coverage is not looked at.
        source_experts: for each packed layer the source numbers of its records, from the index.
    """
    names = [tensor.name for tensor in manifest.tensors] + [item.name for item in manifest.dropped]
    for info in manifest.layers:
        for expert in (*source_experts[info.layer], *info.dropped_experts):
            names += expert_tensor_names(manifest.experts, info.layer, expert)
    return names


def rounded_error(value: float) -> float:
    """An error as the manifest holds it: six significant digits, so that its width is bounded."""
    return float(f"{value:.6g}")


def planned_bytes(draft: Manifest) -> int:
    """The length of the file that ``draft`` will have once its digests, errors and exponents are known."""
    widest = tuple(
        msgspec.structs.replace(tensor, rel_error=_WIDEST_ERROR, scale_exponent=_WIDEST_EXPONENT)
        for tensor in draft.tensors
    )
    return len(_body(msgspec.structs.replace(draft, tensors=widest))) + _SEAL_BYTES


def encode(manifest: Manifest) -> bytes:
    """The canonical, sealed bytes of ``manifest``."""
    body = _body(manifest)
    body = body.ljust(planned_bytes(manifest) - _SEAL_BYTES)
    return body + _SEAL_HEAD + blake3(body).hexdigest().encode() + _SEAL_TAIL


def _body(manifest: Manifest) -> bytes:
    lines = []
    for name in manifest.__struct_fields__:
        value = getattr(manifest, name)
        if isinstance(value, tuple) and value:
            text = b"[\n" + b",\n".join(msgspec.json.encode(item) for item in value) + b"\n]"
        else:
            text = msgspec.json.encode(value)
        lines.append(b'"' + name.encode() + b'":' + text + b",\n")
    return b"{" + b"".join(lines)


def decode(data: bytes, *, where: str = FILE_NAME) -> tuple[Manifest, str]:
    """Read a manifest and prove it against its seal.

    Returns:
        The manifest and the container id (64 hexadecimal digits).

    Raises:
        FormatError: malformed, of an unknown version, or contradicting itself.
        IntegrityError: the bytes are not those that were sealed.
    """
    if len(data) > MAX_BYTES:
        raise FormatError("manifest is too long", where=where, expected=f"at most {MAX_BYTES}", found=len(data))
    document = parse_object(data, where=where)
    if document.get("format") != FORMAT_NAME:
        raise FormatError(
            "not a moepack manifest", where=where, expected=FORMAT_NAME, found=repr(document.get("format"))
        )
    if document.get("format_version") != layout.FORMAT_VERSION or isinstance(document["format_version"], bool):
        raise FormatError(
            "unknown format version",
            where=where,
            expected=layout.FORMAT_VERSION,
            found=repr(document.get("format_version")),
        )
    container_id = _check_seal(data, where)
    document.pop("container_id", None)
    try:
        manifest = msgspec.convert(_without_optional(document), Manifest, strict=True)
    except msgspec.ValidationError as error:
        raise FormatError(f"manifest is malformed: {error}", where=where) from None
    _check(manifest, where)
    return manifest, container_id


def _check_seal(data: bytes, where: str) -> str:
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    stated = seal[len(_SEAL_HEAD) : -len(_SEAL_TAIL)]
    if not (seal.startswith(_SEAL_HEAD) and seal.endswith(_SEAL_TAIL)):
        raise FormatError(
            "manifest does not end with its seal", where=where, offset=len(body), expected='"container_id"'
        )
    found = blake3(body).hexdigest().encode()
    if stated != found:
        raise IntegrityError(
            "manifest was changed after it was sealed",
            where=where,
            expected=stated.decode("utf-8", "replace"),
            found=found.decode(),
        )
    return found.decode()


def _without_optional(value: Any) -> Any:
    """Members whose name begins with ``x-`` are optional: a reader that does not know them passes over them."""
    if isinstance(value, dict):
        return {key: _without_optional(item) for key, item in value.items() if not key.startswith("x-")}
    if isinstance(value, list):
        return [_without_optional(item) for item in value]
    return value


def _check(manifest: Manifest, where: str) -> None:
    """Everything that the manifest alone can contradict."""
    _check_architecture(manifest, where)
    _check_layers(manifest, where)
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
        _require_range(info.source_experts, 1, MAX_EXPERTS, "source_experts", place)
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
    expected = layout.INDEX_ROW_BYTES * (1 + row)
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
    whole = manifest.architecture.moe_layers
    if manifest.partial is None:
        _require(
            tuple(info.layer for info in manifest.layers) == whole, "layers are missing, yet partial is null", where
        )
        _require(
            all(info.records == info.experts for info in manifest.layers),
            "experts are missing, yet partial is null",
            where,
        )
    else:
        _require(
            set(manifest.partial.layers) >= {info.layer for info in manifest.layers},
            "a layer is outside partial.layers",
            where,
        )


def _check_trunk(manifest: Manifest, where: str) -> None:
    trunk = manifest.trunk
    end = layout.TRUNK_HEADER_BYTES
    for segment in trunk.segments:
        place = f"{where}: trunk.segments[{segment.name}]"
        _require(segment.offset == end, "segment does not follow the one before", place, end, segment.offset)
        _require(
            segment.bytes > 0 and segment.bytes % layout.PAGE == 0,
            "segment is not page aligned",
            place,
            found=segment.bytes,
        )
        end = segment.offset + segment.bytes
    _require(trunk.bytes == end <= 1 << 62, "trunk.bytes is not the end of its last segment", where, end, trunk.bytes)
    check_distinct([segment.name for segment in trunk.segments], where=where)

    _check_tensors(manifest, where)


def _check_tensors(manifest: Manifest, where: str) -> None:
    """Tensors fill the segments in order, each 64-aligned, with no gap beyond the alignment."""
    segments = iter(manifest.trunk.segments)
    names: set[str] = set()
    cursor = limit = layout.TRUNK_HEADER_BYTES
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
        _require(tensor.offset == cursor, "tensor does not follow the one before", place, cursor, tensor.offset)
        _require(
            0 <= tensor.bytes <= limit - cursor,
            "tensor does not fit its segment",
            place,
            f"at most {limit - cursor}",
            tensor.bytes,
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
    check_distinct([asset.path for asset in manifest.assets], where=where)
    for shard in manifest.source.shards:
        check_relative_name(shard.name, where=where)
        _require_range(shard.bytes, 0, 1 << 62, f"length of {shard.name}", where)
        _require_digest(shard.sha256, f"digest of {shard.name}", where)
    check_distinct([shard.name for shard in manifest.source.shards], where=where)


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
    _require(coverage.omitted == 0 or manifest.partial is not None, "tensors were omitted, yet partial is null", where)
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
