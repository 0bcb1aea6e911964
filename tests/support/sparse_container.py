"""A container of any size without its weights: manifest, index and record headers are real, payloads are holes.

Built with ``formats`` alone. Level ``structure`` of a verification passes on it: lengths, order, headers, zero padding
and coverage are right. Digests of records and tensors are made up, except for the few that get contents; those are
complete and pass every check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from formats import codecs, layout, manifest
from formats.codecs import group_int, raw, rvq
from formats.families import Model
from formats.index import IndexRow, pack_index, pack_index_row
from formats.layout import Codec, MatrixEntry, RecordHeader, Section
from formats.manifest import Manifest
from tests.support.containers import Tensor, index_row, random_record, with_coverage

VARIANTS = 64  # different errors, so that a summary has something to sum up


@dataclass(frozen=True)
class Blueprint:
    """What to build: one bank a layer, all records alike in codec, parameters and shapes.

    Attributes:
        family, name, hidden_layers, hidden_size, per_token: of the architecture.
        layers: those with experts.
        experts: records a layer.
        shapes: (rows, columns) of gate, up and down.
        codec, parameters: of all records.
        templates: source names of an expert's tensors, by matrix.
        tensors: of the trunk, in order; their segments follow each other.
        recipe: what the manifest says about it.
        source_bytes: of all source tensors.
        shards: (name, bytes) of the source's files.
        assets: name to contents.
    """

    family: str
    name: str
    hidden_layers: int
    hidden_size: int
    per_token: int
    layers: tuple[int, ...]
    experts: int
    shapes: tuple[tuple[int, int], ...]
    codec: Codec
    parameters: Any
    templates: dict[str, tuple[str, ...]]
    tensors: tuple[Tensor, ...]
    recipe: dict[str, Any]
    source_bytes: int = 0
    shards: tuple[tuple[str, int], ...] = ()
    assets: dict[str, bytes] = field(default_factory=dict)

    @property
    def record_bytes(self) -> int:
        """Length of each record."""
        return codecs.record_bytes(self.codec, self.parameters, self.shapes)


def model_blueprint(
    model: Model, *, recipe: dict[str, Any], trunk: Callable[[str, str], Any], **more: Any
) -> Blueprint:
    """A whole model with three-stage codebooks, as the bundled recipes have it.

    Args:
        model: from ``formats.families.bind``.
        recipe: for the manifest.
        trunk: role and dtype of a trunk tensor to the parameters that it is stored with.
        more: other members of the blueprint.
    """
    architecture = model.architecture
    tensors = tuple(
        Tensor(
            bound.name,
            bound.role.kind,
            bound.role.layer,
            _segment(bound.role.kind, bound.role.layer),
            bound.shape,
            trunk(bound.role.kind, bound.dtype),
        )
        for bound in model.trunk
    )
    return Blueprint(
        architecture.family,
        architecture.name,
        architecture.hidden_layers,
        architecture.hidden_size,
        architecture.experts_per_token,
        architecture.moe_layers,
        architecture.experts,
        architecture.expert_shapes,
        Codec.RVQ,
        rvq.Parameters(stages=3, entries=256, scope="expert"),
        {matrix: tuple(names) for matrix, names in model.expert_templates.items()},
        tensors,
        recipe,
        source_bytes=model.source_bytes,
        **more,
    )


def make_container(
    directory: Path,
    blueprint: Blueprint,
    *,
    records: Collection[tuple[int, int]] = (),
    trunk: Collection[str] = (),
    seed: int = 0,
) -> dict[str, bytes]:
    """Make the container in ``directory``, which must not exist.

    Args:
        records: (layer, expert) of records that get contents and true digests.
        trunk: names of raw tensors that get contents and true digests.
        seed: decides contents and errors.

    Returns:
        The contents of these tensors, by name.
    """
    (directory / manifest.EXPERTS_DIR).mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows: list[IndexRow] = []
    for layer in blueprint.layers:
        rows += _bank(directory / manifest.bank_name(layer), blueprint, layer, records, rng)
    (directory / manifest.INDEX_NAME).write_bytes(pack_index(rows))
    contents, segments, tensors = _trunk(directory / manifest.TRUNK_NAME, blueprint, trunk, rng)
    for name, data in blueprint.assets.items():
        path = directory / manifest.ASSETS_DIR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    draft = with_coverage(_draft(directory, blueprint, rows, segments, tensors), rows)
    (directory / manifest.FILE_NAME).write_bytes(manifest.encode(draft))
    return contents


def _bank(
    path: Path, blueprint: Blueprint, layer: int, whole: Collection[tuple[int, int]], rng: np.random.Generator
) -> list[IndexRow]:
    """A bank of headers, and its index rows."""
    rows = []
    length = blueprint.record_bytes
    with path.open("wb") as file:
        file.truncate(length * blueprint.experts)
        for header in _headers(blueprint, layer, rng):
            offset = header.expert * length
            if (layer, header.expert) in whole:
                record, header = random_record(
                    rng, layer, header.expert, header.expert, blueprint.parameters, blueprint.shapes
                )
                os.pwrite(file.fileno(), record, offset)
                rows.append(index_row(record, header, offset))
                continue
            os.pwrite(file.fileno(), layout.pack_record_header(header), offset)
            gate, up, down = header.matrices
            rows.append(
                IndexRow(
                    layer,
                    header.expert,
                    header.source_expert,
                    header.codec,
                    offset,
                    length,
                    blake3(b"%d %d" % (layer, header.expert)).digest(),
                    (gate.rel_error, up.rel_error, down.rel_error),
                    header.rel_error,
                    header.parameters,
                )
            )
    return rows


def _headers(blueprint: Blueprint, layer: int, rng: np.random.Generator) -> Iterator[RecordHeader]:
    """The headers of one layer, by expert: everything but errors and numbers is the same in all of them."""
    expected = codecs.record_sections(blueprint.codec, blueprint.parameters, blueprint.shapes)
    offsets = codecs.section_offsets([length for _, _, length in expected])
    sections = tuple(
        Section(kind, matrix, offset, length, rng.bytes(32))
        for (kind, matrix, length), offset in zip(expected, offsets, strict=True)
    )
    errors = np.zeros((VARIANTS, 4), np.float32)
    if blueprint.codec == Codec.RVQ:
        errors = rng.uniform(0.15, 0.2, (VARIANTS, 4)).astype(np.float32)
    matrices = [
        [
            MatrixEntry(rows, cols, 0, float(error), rng.bytes(32))
            for (rows, cols), error in zip(blueprint.shapes, variant[:3], strict=True)
        ]
        for variant in errors
    ]
    payload = codecs.payload_bytes(blueprint.codec, blueprint.parameters, blueprint.shapes)
    parameters = blueprint.parameters.pack()
    for expert in range(blueprint.experts):
        gate, up, down = matrices[expert % VARIANTS]
        yield RecordHeader(
            layer,
            expert,
            expert,
            blueprint.codec,
            parameters,
            blueprint.record_bytes,
            payload,
            float(errors[expert % VARIANTS, 3]),
            (gate, up, down),
            sections,
        )


def _trunk(
    path: Path, blueprint: Blueprint, whole: Collection[str], rng: np.random.Generator
) -> tuple[dict[str, bytes], list[dict[str, Any]], list[dict[str, Any]]]:
    """Writes the file; the contents that were asked for, the segments and the entries of the tensors."""
    contents: dict[str, bytes] = {}
    places: list[tuple[int, str]] = []
    segments: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    end = layout.TRUNK_HEADER_BYTES
    for tensor in blueprint.tensors:
        if not segments or segments[-1]["name"] != tensor.segment:
            end = layout.align(end, layout.PAGE)
            segments.append({"name": tensor.segment, "offset": end, "bytes": 0})
        offset = layout.align(end, layout.LINE)
        lossy = isinstance(tensor.parameters, group_int.Parameters)
        codec = Codec.GROUP_INT if lossy else Codec.RAW
        length = codecs.trunk_bytes(codec, tensor.parameters, tensor.shape, where=tensor.name)
        digest = source_digest = blake3(tensor.name.encode()).hexdigest()
        if tensor.name in whole:
            assert isinstance(tensor.parameters, raw.Parameters), tensor.name
            contents[tensor.name] = rng.bytes(length)
            places.append((offset, tensor.name))
            digest = source_digest = blake3(contents[tensor.name]).hexdigest()
        tensors.append(
            {
                "name": tensor.name,
                "role": tensor.role,
                "layer": tensor.layer,
                "dtype": "BF16" if lossy else tensor.parameters.dtype,
                "shape": tensor.shape,
                "codec": codec.label,
                "parameters": {"bits": tensor.parameters.bits, "group": tensor.parameters.group} if lossy else {},
                "scale_exponent": 0,
                "offset": offset,
                "bytes": length,
                "blake3": digest,
                "source_blake3": source_digest,
                "rel_error": 0.0065 if lossy else 0.0,
            }
        )
        end = offset + length
        segments[-1]["bytes"] = layout.align(end, layout.PAGE) - segments[-1]["offset"]
    end = layout.align(end, layout.PAGE)
    with path.open("wb") as file:
        file.write(layout.pack_trunk_header(end))
        file.truncate(end)
        for offset, name in places:
            os.pwrite(file.fileno(), contents[name], offset)
    return contents, segments, tensors


def _draft(
    directory: Path,
    blueprint: Blueprint,
    rows: list[IndexRow],
    segments: list[dict[str, Any]],
    tensors: list[dict[str, Any]],
) -> Manifest:
    layers = []
    for number, layer in enumerate(blueprint.layers):
        first = number * blueprint.experts
        part = b"".join(map(pack_index_row, rows[first : first + blueprint.experts]))
        layers.append(
            {
                "layer": layer,
                "file": manifest.bank_name(layer),
                "bytes": blueprint.record_bytes * blueprint.experts,
                "records": blueprint.experts,
                "experts": blueprint.experts,
                "source_experts": blueprint.experts,
                "dropped_experts": [],
                "first_row": first,
                "index_blake3": blake3(part).hexdigest(),
            }
        )
    index = pack_index(rows)
    document = {
        "format": manifest.FORMAT_NAME,
        "format_version": layout.FORMAT_VERSION,
        "format_revision": manifest.FORMAT_REVISION,
        "tool": {"name": "moepack", "version": "0.1.0"},
        "architecture": {
            "family": blueprint.family,
            "name": blueprint.name,
            "hidden_layers": blueprint.hidden_layers,
            "moe_layers": blueprint.layers,
            "experts": blueprint.experts,
            "experts_per_token": blueprint.per_token,
            "hidden_size": blueprint.hidden_size,
        },
        "source": {
            "repository": None,
            "commit": None,
            "tensors": 0,
            "bytes": blueprint.source_bytes,
            "scale_bias": 127,
            "nonfinite": "refuse",
            "shards": [{"name": name, "bytes": size, "sha256": "ab" * 32} for name, size in blueprint.shards],
        },
        "coverage": {"packed": 0, "copied": 0, "dropped": 0, "omitted": 0, "names_blake3": manifest.BLANK_DIGEST},
        "dropped": [],
        "recipe": blueprint.recipe,
        "fitting": {"method": "residual k-means, effort default", "seed": 0, "kernel": "numpy"},
        "partial": None,
        "experts": {
            "count": len(rows),
            "bytes": blueprint.record_bytes * len(rows),
            "weights": len(rows) * sum(height * width for height, width in blueprint.shapes),
            "shapes": blueprint.shapes,
            "tensors": blueprint.templates,
        },
        "layers": layers,
        "index": {
            "file": manifest.INDEX_NAME,
            "bytes": len(index),
            "rows": len(rows),
            "blake3": blake3(index).hexdigest(),
        },
        "trunk": {
            "file": manifest.TRUNK_NAME,
            "bytes": (directory / manifest.TRUNK_NAME).stat().st_size,
            "segments": segments,
        },
        "tensors": tensors,
        "assets": [
            {"path": f"{manifest.ASSETS_DIR}/{name}", "bytes": len(data), "blake3": blake3(data).hexdigest()}
            for name, data in sorted(blueprint.assets.items())
        ],
    }
    return msgspec.convert(document, Manifest)


def _segment(kind: str, layer: int | None) -> str:
    """The segment of a role (SPEC section 7)."""
    if kind in ("embedding", "vision", "projector"):
        return kind
    return "output" if layer is None else f"layer.{layer}"
