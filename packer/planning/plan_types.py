"""The shape of a plan: what a pack will write, and the units of work that write it.

A plan is what a dry run prints, what the units of packing work obey, and what an unfinished pack is compared with.
``packer.planning.plan`` makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from formats.codecs import Parameters
from formats.container import expected_files
from formats.errors import UsageError
from formats.manifest import FILE_NAME, TRUNK_NAME, Dropped, Manifest, bank_name
from packer.planning.estimate import TIME_BASIS, Memory
from packer.planning.layout_plan import LayerPlan, RecordPlan, SegmentPlan, TensorPlan
from packer.planning.selection import Selection
from packer.recipe.pruned import Prune
from packer.recipe.recipe import Recipe, plain
from packer.statistics.file import Statistics

MAX_JOBS = 1024
BLOCK_BYTES = 4096  # of a file system
OTHER_NAMES = 12  # manifest, index, trunk, journal, reserve, lock, temporaries, and the four directories


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of packing work: a run of one layer's records, or a segment of the trunk.

    Attributes:
        name: how the journal calls it.
        label: how people read it.
        file: the file of the container that it is part of.
        layer: decoder layer, or None for a segment.
        first, last: places in the layer's records, both included; 0 for a segment.
        segment: name of the segment, else empty.
        bytes: of output.
    """

    name: str
    label: str
    file: str
    layer: int | None
    first: int
    last: int
    segment: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A planned container.

    Attributes:
        recipe: resolved; every key explicit.
        selection: what the container is limited to, or None for all of the model.
        layers: one bank each, ascending.
        segments: of the trunk, in order.
        dropped: trunk tensors that a rule leaves out, with its number.
        omitted: trunk tensors outside of the selection.
        draft: the manifest as it will be, but for digests, errors and scale exponents.
        units: all work, file by file.
        identity: everything that decides the container's bytes, as JSON values; the journal begins with it.
        notes: what people should be told.
        memory: upper bound of memory, by jobs.
        jobs: units that run at a time.
        manifest_bytes: length of the manifest.
        journal_bytes: upper bound of the journal and its reserve; they are deleted when the container is complete.
        work_seconds: estimate of the processor time of all units together.
        staging_bytes: what shards may take in a staging folder at a time; 0 without one.
        staging_other_bytes: small files and headers of shards in it.
        staging_apart: whether that is on another file system than the output.
        relief_bytes: by how much less the output needs at its fullest moment because shards on its file system go.
        statistics: what weighs the columns of experts, or None.
    """

    recipe: Recipe
    selection: Selection | None
    layers: tuple[LayerPlan, ...]
    segments: tuple[SegmentPlan, ...]
    dropped: tuple[Dropped, ...]
    omitted: tuple[str, ...]
    draft: Manifest
    units: tuple[Unit, ...]
    identity: Mapping[str, Any]
    notes: tuple[str, ...]
    memory: Memory
    jobs: int
    manifest_bytes: int
    journal_bytes: int
    work_seconds: float
    staging_bytes: int = 0
    staging_other_bytes: int = 0
    staging_apart: bool = False
    relief_bytes: int = 0
    statistics: Statistics | None = None
    file_lengths: Mapping[str, int] = field(init=False, repr=False, compare=False)
    shard_lengths: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _layers: Mapping[int, LayerPlan] = field(init=False, repr=False, compare=False)
    _segments: Mapping[str, SegmentPlan] = field(init=False, repr=False, compare=False)
    _units: Mapping[str, Unit] = field(init=False, repr=False, compare=False)
    _units_of: Mapping[str, tuple[Unit, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_file: dict[str, list[Unit]] = {}
        for unit in self.units:
            by_file.setdefault(unit.file, []).append(unit)
        set_field = object.__setattr__  # derived tables of a frozen object
        lengths = expected_files(self.draft) | {FILE_NAME: self.manifest_bytes}
        set_field(self, "file_lengths", MappingProxyType(lengths))
        set_field(
            self, "shard_lengths", MappingProxyType({shard.name: shard.bytes for shard in self.draft.source.shards})
        )
        set_field(self, "_layers", MappingProxyType({item.layer: item for item in self.layers}))
        set_field(self, "_segments", MappingProxyType({item.name: item for item in self.segments}))
        set_field(self, "_units", MappingProxyType({unit.name: unit for unit in self.units}))
        set_field(self, "_units_of", MappingProxyType({name: tuple(units) for name, units in by_file.items()}))

    @property
    def experts(self) -> int:
        """Expert records in all."""
        return sum(len(layer.records) for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """All banks."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def trunk_bytes(self) -> int:
        """``trunk.bin``, its header page included."""
        return self.draft.trunk.bytes

    @property
    def other_bytes(self) -> int:
        """Index, manifest and assets."""
        return self.draft.index.bytes + self.manifest_bytes + sum(asset.bytes for asset in self.draft.assets)

    @property
    def container_bytes(self) -> int:
        """All files of the container together."""
        return self.expert_bytes + self.trunk_bytes + self.other_bytes

    @property
    def expert_record_bytes(self) -> int | None:
        """Length of an expert record; None if there is none, or if they differ."""
        lengths = {record.bytes for layer in self.layers for record in layer.records}
        return lengths.pop() if len(lengths) == 1 else None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits that an expert weight takes, headers, scales, codebooks and padding included; None without experts."""
        weights = self.draft.experts.weights
        return 8 * self.expert_bytes / weights if weights else None

    @property
    def peak_memory_bytes(self) -> int:
        """Upper bound of the memory that packing takes with :attr:`jobs` jobs."""
        return self.memory.with_jobs(self.jobs)

    @property
    def peak_disk_bytes(self) -> int:
        """What the output's file system must hold at the fullest moment.

        The container, the journal with its reserve, once more the largest of the files that are replaced whole when a
        pack is repeated, and a block for the last, partly filled one of each file and for each directory. Banks and
        the trunk are written once, under a temporary name. A staging folder on the same file system counts with all
        that it may hold; shards on it that are released count once they are gone.
        """
        staging = 0 if self.staging_apart else self.staging_bytes + self.staging_other_bytes
        return self.output_disk_bytes + staging - self.relief_bytes

    @property
    def output_disk_bytes(self) -> int:
        """The same for the output alone."""
        assets = self.draft.assets
        replaced = [self.draft.index.bytes, self.manifest_bytes, *(asset.bytes for asset in assets)]
        blocks = BLOCK_BYTES * (len(self.layers) + 2 * len(assets) + OTHER_NAMES)
        return self.container_bytes + self.journal_bytes + max(replaced) + blocks

    @property
    def estimated_seconds(self) -> float:
        """How long packing may take with :attr:`jobs` jobs, on the basis that ``to_dict`` names."""
        return self.work_seconds / self.jobs

    @property
    def unit_files(self) -> tuple[str, ...]:
        """The files that units are written into: banks, then the trunk."""
        return (*(bank_name(layer.layer) for layer in self.layers), TRUNK_NAME)

    def file_bytes(self, name: str) -> int:
        """The length of one of the container's files."""
        return self.file_lengths[name]

    def units_of(self, name: str) -> tuple[Unit, ...]:
        """The units of one file, in order."""
        return self._units_of.get(name, ())

    def unit(self, name: str) -> Unit | None:
        """The unit of that name, or None."""
        return self._units.get(name)

    def layer(self, number: int) -> LayerPlan:
        """The bank of one layer."""
        return self._layers[number]

    def segment(self, name: str) -> SegmentPlan:
        """One segment of the trunk."""
        return self._segments[name]

    def records_of(self, unit: Unit) -> tuple[RecordPlan, ...]:
        """The records that a unit makes; none for a segment."""
        return () if unit.layer is None else self._layers[unit.layer].records[unit.first : unit.last + 1]

    def tensors_of(self, unit: Unit) -> tuple[TensorPlan, ...]:
        """The trunk tensors that a unit makes; none for a run of experts."""
        return self._segments[unit.segment].tensors if unit.layer is None else ()

    def contents(self, unit: Unit) -> tuple[list[int], list[str]]:
        """Numbers of the experts and names of the tensors that a unit makes."""
        return [item.expert for item in self.records_of(unit)], [item.name for item in self.tensors_of(unit)]

    def with_jobs(self, jobs: int) -> Plan:
        """The same container, packed by another number of jobs."""
        return dataclasses.replace(self, jobs=checked_jobs(jobs))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, sizes in bytes; the keys that other tools read come first."""
        return {
            "container_bytes": self.container_bytes,
            "expert_bytes": self.expert_bytes,
            "trunk_bytes": self.trunk_bytes,
            "other_bytes": self.other_bytes,
            "experts": self.experts,
            "layers": len(self.layers),
            "expert_record_bytes": self.expert_record_bytes,
            "bits_per_weight": self.bits_per_weight,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_disk_bytes": self.peak_disk_bytes,
            "staging_bytes": self.staging_bytes,
            "staging_other_bytes": self.staging_other_bytes,
            "staging_apart": self.staging_apart,
            "jobs": self.jobs,
            "estimated_seconds": round(self.estimated_seconds, 1),
            "estimate_basis": TIME_BASIS,
            "source_bytes": self.draft.source.bytes,
            "source_tensors": self.draft.source.tensors,
            "index_bytes": self.draft.index.bytes,
            "manifest_bytes": self.manifest_bytes,
            "assets": {asset.path: asset.bytes for asset in self.draft.assets},
            "architecture": _json(self.draft.architecture),
            "recipe": plain(self.recipe),
            "prune": self.recipe.prune.blake3 if isinstance(self.recipe.prune, Prune) else None,
            "statistics": None if self.statistics is None else self.statistics.blake3,
            "partial": _json(self.draft.partial),
            "coverage": _json(self.draft.coverage),
            "banks": [_bank(layer) for layer in self.layers],
            "segments": [
                {"name": item.name, "offset": item.offset, "bytes": item.bytes, "tensors": len(item.tensors)}
                for item in self.segments
            ],
            "tensors": [_tensor(tensor) for segment in self.segments for tensor in segment.tensors],
            "dropped": [_json(item) for item in self.dropped],
            "omitted": list(self.omitted),
            "units": len(self.units),
            "notes": list(self.notes),
        }


def checked_jobs(jobs: int) -> int:
    """``jobs`` if it makes sense.

    Raises:
        UsageError: it does not.
    """
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError("number of jobs makes no sense", where="--jobs", expected=f"1 to {MAX_JOBS}", found=jobs)
    return jobs


def _json(value: Any) -> Any:
    """A struct as JSON would carry it, lists included."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _bank(layer: LayerPlan) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "file": bank_name(layer.layer),
        "bytes": layer.bytes,
        "dropped_experts": list(layer.dropped),
        "records": [
            {
                "experts": [run[0].expert, run[-1].expert],
                "source_experts": [run[0].source_expert, run[-1].source_expert],
                "codec": run[0].codec.label,
                "parameters": _parameters(run[0].parameters),
                "offset": run[0].offset,
                "record_bytes": run[0].bytes,
            }
            for run in _runs(layer.records)
        ],
    }


def _runs(records: Sequence[RecordPlan]) -> Iterator[list[RecordPlan]]:
    """Neighbouring experts that are stored alike."""
    run: list[RecordPlan] = []
    for record in records:
        if run and (
            record.expert != run[-1].expert + 1
            or record.source_expert - record.expert != run[-1].source_expert - run[-1].expert
            or (record.codec, record.parameters, record.bytes) != (run[-1].codec, run[-1].parameters, run[-1].bytes)
        ):
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _tensor(tensor: TensorPlan) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "role": tensor.role,
        "layer": tensor.layer,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "codec": tensor.codec.label,
        "parameters": _parameters(tensor.parameters),
        "offset": tensor.offset,
        "bytes": tensor.bytes,
    }


def _parameters(parameters: Parameters) -> dict[str, Any]:
    return dataclasses.asdict(parameters)
