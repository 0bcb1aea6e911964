"""The manifest: the typed root of a container, its canonical bytes and its seal (SPEC section 4).

The manifest is JSON with one member or one list item a line. Its last member, the container id, is the BLAKE3 of
every byte before it, so the file proves itself, and through the digests that it holds all other files. What is
known only after packing (digests, errors, scale exponents) has a bounded width: the text is filled up with blanks to
a length that follows from the plan alone, so that a plan is exact to the byte.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from formats import layout
from formats.errors import FormatError, IntegrityError
from formats.manifest_rules import check_manifest
from formats.manifest_types import (
    ASSETS_DIR,
    EXPERTS_DIR,
    FILE_NAME,
    INDEX_NAME,
    TRUNK_NAME,
    WORK_DIR,
    ArchitectureInfo,
    AssetInfo,
    Coverage,
    Dropped,
    ExpertsInfo,
    Fitting,
    IndexInfo,
    LayerInfo,
    Manifest,
    Partial,
    Segment,
    ShardInfo,
    SourceInfo,
    TensorInfo,
    Tool,
    TrunkInfo,
    bank_name,
)
from formats.strict_json import parse_object

__all__ = [
    "ASSETS_DIR",
    "BLANK_DIGEST",
    "EXPERTS_DIR",
    "FILE_NAME",
    "FORMAT_NAME",
    "FORMAT_REVISION",
    "INDEX_NAME",
    "MAX_BYTES",
    "TRUNK_NAME",
    "WORK_DIR",
    "ArchitectureInfo",
    "AssetInfo",
    "Coverage",
    "Dropped",
    "ExpertsInfo",
    "Fitting",
    "IndexInfo",
    "LayerInfo",
    "Manifest",
    "Partial",
    "Segment",
    "ShardInfo",
    "SourceInfo",
    "TensorInfo",
    "Tool",
    "TrunkInfo",
    "bank_name",
    "covered_names",
    "decode",
    "encode",
    "expert_tensor_names",
    "names_digest",
    "planned_bytes",
    "rounded_error",
]

FORMAT_NAME = "moepack"
FORMAT_REVISION = 0
MAX_BYTES = 64 << 20
BLANK_DIGEST = "0" * 64

_SEAL_HEAD = b'"container_id":"'
_SEAL_TAIL = b'"}\n'
_SEAL_BYTES = len(_SEAL_HEAD) + 2 * layout.DIGEST_BYTES + len(_SEAL_TAIL)
_WIDEST_ERROR = 1.23457e-100
_WIDEST_EXPONENT = -layout.MAX_SCALE_EXPONENT
_WIDEST_SHARD = 999_999_999_999_999  # so that a plan is exact without the shards


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
    templates = [template for matrix in layout.Matrix for template in manifest.experts.tensors[matrix.label]]
    for info in manifest.layers:  # half a million names for K3, so the number of the layer is filled in once
        of_layer = [template.replace("{layer}", str(info.layer)) for template in templates]
        for expert in map(str, (*source_experts[info.layer], *info.dropped_experts)):
            names += [template.replace("{expert}", expert) for template in of_layer]
    return names


def rounded_error(value: float) -> float:
    """An error as the manifest holds it: six significant digits, so that its width is bounded."""
    return float(f"{value:.6g}")


def planned_bytes(draft: Manifest) -> int:
    """The length of the file that ``draft`` will have once its digests, errors and exponents are known."""
    replace = msgspec.structs.replace
    tensors = tuple(
        replace(tensor, rel_error=_WIDEST_ERROR, scale_exponent=_WIDEST_EXPONENT) for tensor in draft.tensors
    )
    shards = tuple(replace(shard, bytes=_WIDEST_SHARD) for shard in draft.source.shards)
    widest = replace(draft, tensors=tensors, source=replace(draft.source, shards=shards))
    return len(_body(widest)) + _SEAL_BYTES


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
    check_manifest(manifest, where)
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
