"""The manifest and the index: first as a draft that the plan alone decides, then filled in with what packing found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3

from formats import layout
from formats.checkpoint import Checkpoint
from formats.families import Model
from formats.index import INDEX_ROW_BYTES, IndexRow, pack_index, pack_index_row
from formats.manifest import (
    ASSETS_DIR,
    BLANK_DIGEST,
    FORMAT_NAME,
    FORMAT_REVISION,
    INDEX_NAME,
    TRUNK_NAME,
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
    covered_names,
    names_digest,
    rounded_error,
)
from formats.trunk import parameter_fields
from packer.planning.layout_plan import LayerPlan, SegmentPlan
from packer.recipe.recipe import Recipe, plain
from packer.storage.journal import RecordDone, TensorDone
from packer.version import VERSION


def draft_manifest(
    checkpoint: Checkpoint,
    model: Model,
    recipe: Recipe,
    *,
    layers: Sequence[LayerPlan],
    segments: Sequence[SegmentPlan],
    dropped: Sequence[Dropped],
    partial: Partial | None,
    shards: Sequence[tuple[str, int]],
    assets: Sequence[tuple[str, int]],
    fitting: Fitting,
    repository: str | None,
    commit: str | None,
) -> Manifest:
    """The manifest of a planned container, with blank digests and zero errors.

    Args:
        checkpoint, model, recipe: what the plan is for.
        layers, segments: where everything will lie.
        dropped: trunk tensors that a rule leaves out.
        partial: the selection, or None for a whole model.
        shards: (name, bytes) of the source files that are read, sorted by name.
        assets: (name in the source, bytes) of the files that go along, sorted by name.
        fitting: how lossy codes will be chosen.
        repository, commit: the source's name and revision, if the user states them.
    """
    arch = model.architecture
    tensors = tuple(
        TensorInfo(
            name=tensor.name,
            role=tensor.role,
            layer=tensor.layer,
            dtype=tensor.dtype,
            shape=tensor.shape,
            codec=tensor.codec.label,
            parameters=parameter_fields(tensor.parameters),
            scale_exponent=0,
            offset=tensor.offset,
            bytes=tensor.bytes,
            blake3=BLANK_DIGEST,
            source_blake3=BLANK_DIGEST,
            rel_error=0.0,
        )
        for segment in segments
        for tensor in segment.tensors
    )
    first_row = 0
    infos = []
    for layer in layers:
        infos.append(
            LayerInfo(
                layer=layer.layer,
                file=bank_name(layer.layer),
                bytes=layer.bytes,
                records=len(layer.records),
                experts=arch.experts - len(layer.dropped),
                source_experts=arch.experts,
                dropped_experts=layer.dropped,
                first_row=first_row,
                index_blake3=BLANK_DIGEST,
            )
        )
        first_row += len(layer.records)
    copied = sum(tensor.codec == "raw" for tensor in tensors)
    per_expert = sum(len(names) for names in model.expert_templates.values())
    packed = first_row * per_expert + len(tensors) - copied
    left_out = len(dropped) + per_expert * sum(len(layer.dropped) for layer in layers)
    weights = first_row * sum(rows * cols for rows, cols in arch.expert_shapes)
    end = segments[-1].offset + segments[-1].bytes if segments else layout.TRUNK_HEADER_BYTES
    draft = Manifest(
        format=FORMAT_NAME,
        format_version=layout.FORMAT_VERSION,
        format_revision=FORMAT_REVISION,
        tool=Tool(name="moepack", version=VERSION),
        architecture=ArchitectureInfo(
            family=arch.family,
            name=arch.name,
            hidden_layers=arch.hidden_layers,
            moe_layers=arch.moe_layers,
            experts=arch.experts,
            experts_per_token=arch.experts_per_token,
            hidden_size=arch.hidden_size,
        ),
        source=SourceInfo(
            repository=repository,
            commit=commit,
            tensors=model.tensor_count,
            bytes=model.source_bytes,
            scale_bias=recipe.source.mxfp4_bias,
            nonfinite="refuse",
            shards=tuple(ShardInfo(name=name, bytes=length, sha256=BLANK_DIGEST) for name, length in shards),
        ),
        coverage=Coverage(
            packed=packed,
            copied=copied,
            dropped=left_out,
            omitted=model.tensor_count - packed - copied - left_out,
            names_blake3=BLANK_DIGEST,
        ),
        dropped=tuple(dropped),
        recipe=plain(recipe),
        fitting=fitting,
        partial=partial,
        experts=ExpertsInfo(
            count=first_row,
            bytes=sum(info.bytes for info in infos),
            weights=weights,
            shapes=arch.expert_shapes,
            tensors={matrix: tuple(names) for matrix, names in model.expert_templates.items()},
        ),
        layers=tuple(infos),
        index=IndexInfo(file=INDEX_NAME, bytes=INDEX_ROW_BYTES * (1 + first_row), rows=first_row, blake3=BLANK_DIGEST),
        trunk=TrunkInfo(
            file=TRUNK_NAME,
            bytes=end,
            segments=tuple(Segment(name=item.name, offset=item.offset, bytes=item.bytes) for item in segments),
        ),
        tensors=tensors,
        assets=tuple(AssetInfo(path=f"{ASSETS_DIR}/{name}", bytes=size, blake3=BLANK_DIGEST) for name, size in assets),
    )
    names = covered_names(draft, {item.layer: [record.source_expert for record in item.records] for item in layers})
    return msgspec.structs.replace(
        draft, coverage=msgspec.structs.replace(draft.coverage, names_blake3=names_digest(names))
    )


def index_rows(layers: Sequence[LayerPlan], done: Mapping[tuple[int, int], RecordDone]) -> list[IndexRow]:
    """All rows of the index, in order; ``done`` has what packing found, by layer and expert."""
    return [
        IndexRow(
            layer.layer,
            record.expert,
            record.source_expert,
            record.codec,
            record.offset,
            record.bytes,
            bytes.fromhex(done[layer.layer, record.expert].digest),
            done[layer.layer, record.expert].matrix_errors,
            done[layer.layer, record.expert].rel_error,
            record.parameters.pack(),
        )
        for layer in layers
        for record in layer.records
    ]


def complete_manifest(
    draft: Manifest,
    rows: Sequence[IndexRow],
    *,
    tensors: Mapping[str, TensorDone],
    shards: Mapping[str, str],
    assets: Mapping[str, str],
) -> Manifest:
    """The draft with every digest, error and exponent filled in.

    Args:
        draft: from :func:`draft_manifest`.
        rows: all rows of the index.
        tensors: what packing found for each trunk tensor.
        shards: SHA-256 of each source file.
        assets: BLAKE3 of each asset, by its path in the container.
    """
    replace = msgspec.structs.replace
    by_layer = [rows[info.first_row : info.first_row + info.records] for info in draft.layers]
    return replace(
        draft,
        source=replace(
            draft.source, shards=tuple(replace(shard, sha256=shards[shard.name]) for shard in draft.source.shards)
        ),
        layers=tuple(
            replace(info, index_blake3=blake3(b"".join(map(pack_index_row, part))).hexdigest())
            for info, part in zip(draft.layers, by_layer, strict=True)
        ),
        index=replace(draft.index, blake3=blake3(pack_index(rows)).hexdigest()),
        tensors=tuple(
            replace(
                info,
                blake3=tensors[info.name].digest,
                source_blake3=tensors[info.name].source_digest,
                rel_error=rounded_error(tensors[info.name].rel_error),
                scale_exponent=tensors[info.name].scale_exponent,
            )
            for info in draft.tensors
        ),
        assets=tuple(replace(info, blake3=assets[info.path]) for info in draft.assets),
    )


def blank_manifest(manifest: Manifest) -> Manifest:
    """A finished manifest turned back into its draft: equal to a plan's draft if and only if that plan made it."""
    replace = msgspec.structs.replace
    return replace(
        manifest,
        source=replace(
            manifest.source,
            shards=tuple(replace(shard, sha256=BLANK_DIGEST) for shard in manifest.source.shards),
        ),
        layers=tuple(replace(info, index_blake3=BLANK_DIGEST) for info in manifest.layers),
        index=replace(manifest.index, blake3=BLANK_DIGEST),
        tensors=tuple(
            replace(info, blake3=BLANK_DIGEST, source_blake3=BLANK_DIGEST, rel_error=0.0, scale_exponent=0)
            for info in manifest.tensors
        ),
        assets=tuple(replace(info, blake3=BLANK_DIGEST) for info in manifest.assets),
    )
