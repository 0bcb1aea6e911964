"""Small valid containers of random weights, built with ``formats`` alone, and a forge that breaks one rule at a time.

``build_container`` needs no checkpoint and no packer: codes, scales and codebooks are random bytes that the codec's
page allows. ``Forge`` changes any byte or manifest member of a container and makes every digest above the change right
again, so that nothing but the violated rule can give it away.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from formats import codecs, layout, manifest
from formats.codecs import group_int, mxfp4, raw, rvq
from formats.index import INDEX_ROW_BYTES, IndexRow, pack_index, pack_index_row, unpack_index_rows
from formats.layout import Codec, MatrixEntry, RecordHeader, Section, SectionKind
from formats.manifest import Manifest
from formats.spelling import spelled

TEMPLATES = {
    matrix: [f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{name}.weight"]
    for matrix, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}

RVQ_EXPERT = rvq.Parameters(stages=3, entries=16, scope="expert")
RVQ_MATRIX = rvq.Parameters(stages=2, entries=256, scope="matrix")
MXFP4 = mxfp4.Parameters()
INT8 = group_int.Parameters(bits=8, group=32)
INT4 = group_int.Parameters(bits=4, group=64)
BF16 = raw.Parameters("BF16")
_CODECS = {
    rvq.Parameters: Codec.RVQ,
    mxfp4.Parameters: Codec.MXFP4,
    group_int.Parameters: Codec.GROUP_INT,
    raw.Parameters: Codec.RAW,
}

RECIPE = {
    "name": "forged",
    "families": ["kimi_linear"],
    "experts": {
        "codec": "rvq",
        "stages": 3,
        "entries": 16,
        "codebooks": "expert",
        "max_rel_error": 0.5,
        "fallback": {"codec": "group_int", "bits": 8, "group": 32, "max_rel_error": 0.5},
    },
    "trunk": [
        {"codec": "drop", "names": ["*.rotary"]},
        {
            "codec": "group_int",
            "roles": ["embedding", "head", "attention"],
            "bits": 8,
            "group": 32,
            "max_rel_error": 0.5,
        },
        {"codec": "raw", "names": ["*"]},
    ],
}


@dataclass(frozen=True)
class Layer:
    """A bank: the codec parameters of each record, and the source experts that were dropped."""

    records: tuple[Any, ...]
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A trunk tensor and the segment it lies in; ``parameters`` decide the codec."""

    name: str
    role: str
    layer: int | None
    segment: str
    shape: tuple[int, ...]
    parameters: Any = BF16


@dataclass(frozen=True)
class Spec:
    """What to build. The default has every codec, a dropped expert, a dropped tensor, odd shapes and two assets."""

    hidden_layers: int = 4
    layers: dict[int, Layer] = field(
        default_factory=lambda: {
            1: Layer((RVQ_EXPERT, RVQ_EXPERT, RVQ_EXPERT, RVQ_EXPERT)),
            2: Layer((INT8, RVQ_EXPERT, INT8, RVQ_EXPERT)),
            3: Layer((RVQ_EXPERT, INT8, RVQ_EXPERT), dropped=(1,)),
        }
    )
    shapes: tuple[tuple[int, int], ...] = ((66, 40), (66, 40), (40, 66))
    tensors: tuple[Tensor, ...] = (
        Tensor("model.embed_tokens.weight", "embedding", None, "embedding", (50, 40), INT8),
        Tensor("model.layers.0.input_layernorm.weight", "norm", 0, "layer.0", (40,)),
        Tensor("model.layers.0.self_attn.q_proj.weight", "attention", 0, "layer.0", (33, 40), INT8),
        Tensor("model.layers.0.self_attn.q_conv1d.weight", "conv", 0, "layer.0", (33, 1, 4), raw.Parameters("F32")),
        Tensor("model.layers.1.block_sparse_moe.gate.weight", "router", 1, "layer.1", (4, 40)),
        Tensor("model.layers.2.block_sparse_moe.gate.weight", "router", 2, "layer.2", (4, 40)),
        Tensor("model.layers.3.block_sparse_moe.gate.weight", "router", 3, "layer.3", (3, 40)),
        Tensor("model.norm.weight", "norm", None, "output", (40,)),
        Tensor("model.scale", "unknown", None, "other", (), raw.Parameters("F32")),
        Tensor("model.empty", "unknown", None, "other", (0, 40)),
    )
    dropped: tuple[str, ...] = ("model.layers.0.self_attn.rotary",)
    assets: dict[str, bytes] = field(
        default_factory=lambda: {"config.json": b'{"a": 1}\n', "sub/chat.jinja": b"{{ x }}"}
    )
    recipe: dict[str, Any] = field(default_factory=lambda: RECIPE)
    partial: dict[str, Any] | None = None
    omitted: int = 0
    seed: int = 0


def all_codecs() -> Spec:
    """One layer in which every codec has a record."""
    records = (RVQ_EXPERT, RVQ_MATRIX, MXFP4, INT8, INT4, BF16)
    return Spec(hidden_layers=2, layers={1: Layer(records)}, tensors=Spec().tensors[:5])


def build_container(directory: Path, spec: Spec | None = None) -> Path:
    """Write a valid container into ``directory`` (made if need be) and return it."""
    spec = spec or Spec()
    rng = np.random.default_rng(spec.seed)
    (directory / manifest.EXPERTS_DIR).mkdir(parents=True)
    rows: list[IndexRow] = []
    layers = []
    for layer, bank in spec.layers.items():
        data = b""
        first_row = len(rows)
        total = len(bank.records) + len(bank.dropped)
        numbers = [number for number in range(total) if number not in bank.dropped]
        for expert, (parameters, source_expert) in enumerate(zip(bank.records, numbers, strict=True)):
            record, header = random_record(rng, layer, expert, source_expert, parameters, spec.shapes)
            rows.append(index_row(record, header, len(data)))
            data += record
        file = manifest.bank_name(layer)
        (directory / file).write_bytes(data)
        layers.append(
            {
                "layer": layer,
                "file": file,
                "bytes": len(data),
                "records": len(bank.records),
                "experts": len(bank.records),
                "source_experts": total,
                "dropped_experts": bank.dropped,
                "first_row": first_row,
                "index_blake3": blake3(b"".join(pack_index_row(row) for row in rows[first_row:])).hexdigest(),
            }
        )
    index = pack_index(rows)
    (directory / manifest.INDEX_NAME).write_bytes(index)
    trunk, segments, tensors = _trunk(rng, spec)
    (directory / manifest.TRUNK_NAME).write_bytes(trunk)
    assets = []
    for name, content in sorted(spec.assets.items()):
        path = f"{manifest.ASSETS_DIR}/{name}"
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
        assets.append({"path": path, "bytes": len(content), "blake3": blake3(content).hexdigest()})
    document = {
        "format": manifest.FORMAT_NAME,
        "format_version": layout.FORMAT_VERSION,
        "format_revision": manifest.FORMAT_REVISION,
        "tool": {"name": "forge", "version": "0"},
        "architecture": {
            "family": "kimi_linear",
            "name": "Forged",
            "hidden_layers": spec.hidden_layers,
            "moe_layers": list(spec.layers),
            "experts": max(info["source_experts"] for info in layers),
            "experts_per_token": min(2, *(info["source_experts"] for info in layers)),
            "hidden_size": spec.shapes[0][1],
        },
        "source": {
            "repository": None,
            "commit": None,
            "tensors": 0,
            "bytes": 123_456,
            "scale_bias": 127,
            "nonfinite": "refuse",
            "shards": [{"name": "model.safetensors", "bytes": 124_000, "sha256": "ab" * 32}],
        },
        "coverage": {"packed": 0, "copied": 0, "dropped": 0, "omitted": spec.omitted, "names_blake3": "0" * 64},
        "dropped": [{"name": name, "rule": 0} for name in spec.dropped],
        "recipe": {**_prune(spec), **spec.recipe},
        "fitting": {"method": "random", "seed": spec.seed, "kernel": "numpy"},
        "partial": spec.partial,
        "experts": {
            "count": len(rows),
            "bytes": sum(info["bytes"] for info in layers),
            "weights": len(rows) * sum(rows_ * cols for rows_, cols in spec.shapes),
            "shapes": spec.shapes,
            "tensors": TEMPLATES,
        },
        "layers": layers,
        "index": {
            "file": manifest.INDEX_NAME,
            "bytes": len(index),
            "rows": len(rows),
            "blake3": blake3(index).hexdigest(),
        },
        "trunk": {"file": manifest.TRUNK_NAME, "bytes": len(trunk), "segments": segments},
        "tensors": tensors,
        "assets": assets,
    }
    draft = msgspec.convert(json.loads(json.dumps(document)), Manifest)
    draft = with_coverage(draft, rows)
    (directory / manifest.FILE_NAME).write_bytes(manifest.encode(draft))
    return directory


def _prune(spec: Spec) -> dict[str, Any]:
    """The plan by which experts are dropped, if any are."""
    layers = []
    for layer, bank in spec.layers.items():
        if bank.dropped:
            numbers = range(len(bank.records) + len(bank.dropped))
            layers.append({"layer": layer, "keep": spelled([n for n in numbers if n not in bank.dropped])})
    return {"prune": {"blake3": "ab" * 32, "made": None, "lossless_codec": None, "layers": layers}} if layers else {}


def with_coverage(draft: Manifest, rows: list[IndexRow]) -> Manifest:
    """``draft`` with the coverage (but for ``omitted``) and the count of source tensors that its lists give."""
    sources = {info.layer: [row.source_expert for row in rows if row.layer == info.layer] for info in draft.layers}
    copied = sum(tensor.codec == "raw" for tensor in draft.tensors)
    a_expert = sum(len(templates) for templates in draft.experts.tensors.values())
    packed = len(draft.tensors) - copied + a_expert * len(rows)
    dropped = len(draft.dropped) + a_expert * sum(len(info.dropped_experts) for info in draft.layers)
    names = manifest.names_digest(manifest.covered_names(draft, sources))
    coverage = msgspec.structs.replace(
        draft.coverage, packed=packed, copied=copied, dropped=dropped, names_blake3=names
    )
    tensors = packed + copied + dropped + coverage.omitted
    return msgspec.structs.replace(
        draft, coverage=coverage, source=msgspec.structs.replace(draft.source, tensors=tensors)
    )


def random_record(
    rng: np.random.Generator, layer: int, expert: int, source_expert: int, parameters: Any, shapes: Any
) -> tuple[bytes, RecordHeader]:
    """A record of random weights that its codec allows, and its header."""
    codec = _CODECS[type(parameters)]
    expected = codecs.record_sections(codec, parameters, shapes)
    contents = [_random_section(rng, parameters, kind, shapes[matrix % 3], length) for kind, matrix, length in expected]
    offsets = codecs.section_offsets([len(content) for content in contents])
    sections = tuple(
        Section(kind, matrix, offset, len(content), blake3(content).digest())
        for (kind, matrix, _), offset, content in zip(expected, offsets, contents, strict=True)
    )
    payload = offsets[-1] + len(contents[-1])
    lossless = codec in (Codec.MXFP4, Codec.RAW)
    errors = np.zeros(4, np.float32) if lossless else rng.uniform(0.01, 0.3, 4).astype(np.float32)
    matrices = [
        MatrixEntry(rows, cols, 0, float(error), rng.bytes(32))
        for (rows, cols), error in zip(shapes, errors[:3], strict=True)
    ]
    header = RecordHeader(
        layer,
        expert,
        source_expert,
        codec,
        parameters.pack(),
        layout.align(payload, layout.PAGE),
        payload,
        float(errors[3]),
        (matrices[0], matrices[1], matrices[2]),
        sections,
    )
    record = bytearray(layout.pack_record_header(header).ljust(header.record_bytes, b"\0"))
    for offset, content in zip(offsets, contents, strict=True):
        record[offset : offset + len(content)] = content
    return bytes(record), header


def index_row(record: bytes, header: RecordHeader, offset: int) -> IndexRow:
    """The row that belongs to a record at ``offset`` of its bank."""
    gate, up, down = header.matrices
    return IndexRow(
        header.layer,
        header.expert,
        header.source_expert,
        header.codec,
        offset,
        header.record_bytes,
        blake3(record).digest(),
        (gate.rel_error, up.rel_error, down.rel_error),
        header.rel_error,
        header.parameters,
    )


def _random_section(
    rng: np.random.Generator, parameters: Any, kind: SectionKind, shape: tuple[int, int], length: int
) -> bytes:
    rows, cols = shape
    if kind == SectionKind.CODEBOOKS:
        return rng.normal(size=length // 2).astype("<f2").tobytes()
    if isinstance(parameters, mxfp4.Parameters):
        return rng.integers(110, 130, length, np.uint8).tobytes() if kind == SectionKind.SCALES else rng.bytes(length)
    if kind == SectionKind.SCALES:
        return rng.uniform(0.01, 1.0, length // 2).astype("<f2").tobytes()
    if isinstance(parameters, rvq.Parameters):
        codes = rng.integers(0, parameters.entries, (rows, -(-cols // 8), parameters.stages)).astype(np.uint8)
        return rvq.pack_codes(codes)
    if isinstance(parameters, raw.Parameters):
        return _random_raw(rng, parameters, length)
    return rng.bytes(length)  # group_int with an even number of columns: every byte is legal


def _random_raw(rng: np.random.Generator, parameters: raw.Parameters, length: int) -> bytes:
    values = rng.normal(size=length // parameters.itemsize).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2").tobytes() if parameters.dtype == "BF16" else values.tobytes()


def _trunk(rng: np.random.Generator, spec: Spec) -> tuple[bytes, list[dict[str, Any]], list[dict[str, Any]]]:
    """The bytes of trunk.bin, its segments and the entries of its tensors."""
    data = bytearray(layout.TRUNK_HEADER_BYTES)
    segments: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    for tensor in spec.tensors:
        if not segments or segments[-1]["name"] != tensor.segment:
            data.extend(bytes(-len(data) % layout.PAGE))
            segments.append({"name": tensor.segment, "offset": len(data), "bytes": 0})
        data.extend(bytes(-len(data) % layout.LINE))
        codec = _CODECS[type(tensor.parameters)]
        offset = len(data)
        for part in codecs.trunk_sections(codec, tensor.parameters, tensor.shape, where=tensor.name):
            extents = codecs.tensor_extents(tensor.shape)
            data.extend(bytes(offset + part.offset - len(data)))
            data.extend(_random_section(rng, tensor.parameters, part.kind, extents, part.bytes))
        stored = bytes(data[offset:])
        lossy = codec == Codec.GROUP_INT
        tensors.append(
            {
                "name": tensor.name,
                "role": tensor.role,
                "layer": tensor.layer,
                "dtype": "BF16" if lossy else tensor.parameters.dtype,
                "shape": tensor.shape,
                "codec": codec.label,
                "parameters": dataclasses.asdict(tensor.parameters) if lossy else {},
                "scale_exponent": 0,
                "offset": offset,
                "bytes": len(stored),
                "blake3": blake3(stored).hexdigest(),
                "source_blake3": blake3(stored).hexdigest(),
                "rel_error": 0.0065 if lossy else 0.0,
            }
        )
        segments[-1]["bytes"] = layout.align(len(data), layout.PAGE) - segments[-1]["offset"]
    data.extend(bytes(-len(data) % layout.PAGE))
    data[: layout.TRUNK_HEADER_BYTES] = layout.pack_trunk_header(len(data))
    return bytes(data), segments, tensors


def seal(body: bytes) -> bytes:
    """A manifest file of ``body`` (everything up to the seal), with the right container id behind it."""
    return body + b'"container_id":"' + blake3(body).hexdigest().encode() + b'"}\n'


class Forge:
    """A container taken apart. Change its parts, then ``save``: every digest above the change is made right again.

    Attributes:
        document: the manifest, plain JSON values without the seal.
        index: the bytes of index.bin.
        banks: layer to the bytes of its bank.
        trunk: the bytes of trunk.bin.
        assets: path to bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = json.loads((path / manifest.FILE_NAME).read_bytes())
        del self.document["container_id"]
        self.index = bytearray((path / manifest.INDEX_NAME).read_bytes())
        self.banks = {info["layer"]: bytearray((path / info["file"]).read_bytes()) for info in self.document["layers"]}
        self.trunk = bytearray((path / manifest.TRUNK_NAME).read_bytes())
        self.assets = {info["path"]: (path / info["path"]).read_bytes() for info in self.document["assets"]}
        self._rows = unpack_index_rows(bytes(self.index[INDEX_ROW_BYTES:]), where="forge")

    def layer(self, layer: int) -> dict[str, Any]:
        """The manifest's entry of a layer."""
        return next(info for info in self.document["layers"] if info["layer"] == layer)

    def tensor(self, name: str) -> dict[str, Any]:
        """The manifest's entry of a trunk tensor."""
        return next(info for info in self.document["tensors"] if info["name"] == name)

    def row(self, layer: int, expert: int) -> IndexRow:
        """A row as it was when the container was opened."""
        return next(row for row in self._rows if (row.layer, row.expert) == (layer, expert))

    def row_at(self, layer: int, expert: int) -> int:
        """Where in ``index`` a row stands."""
        return INDEX_ROW_BYTES * (1 + self._rows.index(self.row(layer, expert)))

    def patch_row(self, layer: int, expert: int, at: int, form: str, value: Any) -> None:
        """Write a field of an index row; ``form`` is a struct format such as ``<I``."""
        struct.pack_into(form, self.index, self.row_at(layer, expert) + at, value)

    def patch_record(self, layer: int, expert: int, at: int, form: str, value: Any) -> None:
        """Write a field of a record, ``at`` counted from its start."""
        struct.pack_into(form, self.banks[layer], self.row(layer, expert).offset + at, value)

    def header(self, layer: int, expert: int) -> RecordHeader:
        """The header of a record as it is now."""
        start = self.row(layer, expert).offset
        data = bytes(self.banks[layer][start : start + layout.RECORD_HEADER_BYTES])
        return layout.unpack_record_header(data, where="forge")

    def save(self, *, keep: tuple[str, ...] = ()) -> Path:
        """Write everything back.

        Args:
            keep: digests to leave as they are, of ``records``, ``layers``, ``index``, ``tensors``, ``assets``.
        """
        if "records" not in keep:
            for row in self._rows:
                bank = self.banks[row.layer]
                at = self.row_at(row.layer, row.expert) + 32
                self.index[at : at + 32] = blake3(bytes(bank[row.offset : row.offset + row.bytes])).digest()
        if "layers" not in keep:
            for info in self.document["layers"]:
                start = INDEX_ROW_BYTES * (1 + info["first_row"])
                rows = self.index[start : start + INDEX_ROW_BYTES * info["records"]]
                info["index_blake3"] = blake3(bytes(rows)).hexdigest()
        if "index" not in keep:
            self.document["index"]["blake3"] = blake3(bytes(self.index)).hexdigest()
        if "tensors" not in keep:
            for info in self.document["tensors"]:
                stored = bytes(self.trunk[info["offset"] : info["offset"] + info["bytes"]])
                info["blake3"] = blake3(stored).hexdigest()
        if "assets" not in keep:
            for info in self.document["assets"]:
                info["blake3"] = blake3(self.assets.get(info["path"], b"")).hexdigest()
        (self.path / manifest.INDEX_NAME).write_bytes(self.index)
        (self.path / manifest.TRUNK_NAME).write_bytes(self.trunk)
        for layer, data in self.banks.items():
            (self.path / manifest.bank_name(layer)).write_bytes(data)
        for name, data in self.assets.items():
            (self.path / name).write_bytes(data)
        return self.save_manifest()

    def save_manifest(self) -> Path:
        """Seal and write the manifest alone."""
        body = json.dumps(self.document, indent=0).encode().removesuffix(b"\n}") + b",\n"
        (self.path / manifest.FILE_NAME).write_bytes(seal(body))
        return self.path
