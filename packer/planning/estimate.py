"""What packing needs besides the container: memory, by jobs, the journal's space, and time.

Memory and space are upper bounds, kept by tests; time is an estimate that names its basis.

Memory has a fixed part, the program and the names of all tensors, and a part for each job, which follows the largest
expert or one block of rows of a trunk tensor and never the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from formats.codecs import rvq, trunk_sections
from formats.dtypes import by_name
from formats.families import Model
from formats.layout import Codec, SectionKind
from formats.manifest import Manifest
from packer.encoding.encode import peak_bytes
from packer.encoding.encode_trunk import BLOCK_BYTES
from packer.planning.layout_plan import LayerPlan, SegmentPlan, TensorPlan
from packer.storage.journal import RESERVE_BYTES

PROGRAM_BYTES = 72 << 20  # interpreter, libraries, and buffers for copying, hashing and reading back
TENSOR_BYTES = 800  # a source tensor: its name, its entries in the index and the headers, and their parsing
RECORD_BYTES = 1000  # an expert record: its place in the plan, its journal entry, its index row
ELEMENT_BYTES = 60  # an element of a block that is quantised: source, float32, codes, decoded, float64 for the error
COPY_BLOCKS = 4  # blocks of a tensor that is copied

# Processor time of the compiled kernels, measured on one core with AVX-512; others take 1.3 to 20 times as long.
TIME_BASIS = "measured on AVX-512 cores, jobs on cores of their own, disks not the limit"
FIT_SECONDS: Mapping[str, float] = MappingProxyType({"fast": 0.07, "default": 0.51, "max": 3.9})  # an expert
RVQ_SECONDS: Mapping[str, float] = MappingProxyType({"fast": 28e-9, "default": 95e-9, "max": 260e-9})  # a weight
WEIGHTED: Mapping[str, float] = MappingProxyType({"fast": 2.5, "default": 1.6, "max": 1.4})  # times that, by columns
# A weight of other codecs: decoding the source, measuring the error, hashing.
WEIGHT_SECONDS: Mapping[Codec, float] = MappingProxyType({Codec.MXFP4: 5e-9, Codec.GROUP_INT: 30e-9, Codec.RAW: 5e-9})
TRUNK_SECONDS: Mapping[Codec, float] = MappingProxyType({Codec.GROUP_INT: 35e-9, Codec.RAW: 2.5e-9})


@dataclass(frozen=True)
class Memory:
    """Bytes that packing takes: ``fixed``, and ``per_job`` for each unit that runs at a time."""

    fixed: int
    per_job: int

    def with_jobs(self, jobs: int) -> int:
        """The upper bound for ``jobs`` units at a time."""
        return self.fixed + jobs * self.per_job


def memory_of(model: Model, layers: Sequence[LayerPlan], segments: Sequence[SegmentPlan]) -> Memory:
    """The memory of a pack.

    fixed = 72 MiB + 800 bytes a source tensor + 1,000 bytes a record.

    per job = the larger of what ``packer.encoding.encode.peak_bytes`` states for an expert (its source bytes, two
    copies of its record, three float32 copies of its largest matrix, 48 MiB), and of what the largest trunk tensor
    takes: 60 bytes an element of a block of rows (8 MiB of source, or one row if that is longer) and its scales twice,
    or four blocks where it is only copied. K3 in the bundled recipe: about 0.52 GiB and 0.27 GiB a job.
    """
    shapes, source = model.architecture.expert_shapes, model.expert_bytes_in_source
    kinds = {(record.codec, record.parameters) for layer in layers for record in layer.records}
    experts = [peak_bytes(codec, parameters, shapes, source) for codec, parameters in kinds]
    tensors = [_tensor_peak(tensor) for segment in segments for tensor in segment.tensors]
    records = sum(len(layer.records) for layer in layers)
    return Memory(
        fixed=PROGRAM_BYTES + TENSOR_BYTES * model.tensor_count + RECORD_BYTES * records,
        per_job=max([0, *experts, *tensors]),
    )


def _tensor_peak(tensor: TensorPlan) -> int:
    if tensor.codec != Codec.GROUP_INT:
        return COPY_BLOCKS * min(tensor.source_bytes, BLOCK_BYTES)
    sections = trunk_sections(tensor.codec, tensor.parameters, tensor.shape, where=tensor.name)
    scales = sum(section.bytes for section in sections if section.kind == SectionKind.SCALES)
    rows, cols = tensor.shape
    itemsize = by_name(tensor.dtype, where=tensor.name).itemsize
    elements = min(rows * cols, max(BLOCK_BYTES // itemsize, cols))
    return ELEMENT_BYTES * elements + 2 * scales


def seconds_of(
    model: Model, layers: Sequence[LayerPlan], segments: Sequence[SegmentPlan], effort: str, *, weighted: bool = False
) -> float:
    """Processor seconds of a pack, on the basis of ``TIME_BASIS``; reading and writing are not counted.

    Codebooks are fitted to samples, so that their time hardly depends on the size of an expert; the search is linear
    in weights, stages and entries, and its figures are those of three stages of 256. ``weighted`` says that statistics
    weigh the columns, which are then searched one position of the rows at a time.
    """
    weights = sum(rows * cols for rows, cols in model.architecture.expert_shapes)
    kinds = Counter((record.codec, record.parameters) for layer in layers for record in layer.records)
    seconds = 0.0
    for (codec, parameters), count in kinds.items():
        if isinstance(parameters, rvq.Parameters):
            share = parameters.stages * parameters.entries / (3 * 256)
            fits = 1 if parameters.scope == "expert" else 3
            factor = share * (WEIGHTED[effort] if weighted else 1.0)
            seconds += count * factor * (fits * FIT_SECONDS[effort] + weights * RVQ_SECONDS[effort])
        else:
            seconds += count * weights * WEIGHT_SECONDS[codec]
    for segment in segments:
        seconds += sum(math.prod(tensor.shape) * TRUNK_SECONDS[tensor.codec] for tensor in segment.tensors)
    return seconds


def journal_bytes(identity: Mapping[str, Any], units: int, draft: Manifest) -> int:
    """Upper bound of the journal's length, and its reserve: a line a unit, three a file, three a shard."""
    text = sum(len(tensor.name.encode()) * 2 + 250 for tensor in draft.tensors) + 250 * draft.experts.count
    files = len(draft.layers) + len(draft.assets) + 3
    lines = (
        200 * (units + 4 * files) + 1000 * len(draft.source.shards) + sum(4 * len(item.path) for item in draft.assets)
    )
    return len(msgspec.json.encode(dict(identity))) + text + lines + RESERVE_BYTES
