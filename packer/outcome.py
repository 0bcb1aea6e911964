"""What is done so far: the journal's entries applied to a plan, and how far that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from formats.errors import FormatError
from formats.layout import pack_trunk_header
from formats.manifest import TRUNK_NAME
from packer.planning.plan import Plan, Unit
from packer.storage.journal import (
    Entry,
    FileBegun,
    FileDone,
    FileIntent,
    RecordDone,
    ShardReleased,
    ShardReleasing,
    ShardSeen,
    TensorDone,
    UnitDone,
)


@dataclass
class Outcome:
    """The state of one pack, owned by the one thread that writes the journal.

    Attributes:
        units: names of the units that are durable.
        records: what they found, by (layer, expert).
        tensors: by name.
        files: (bytes, BLAKE3) of the files that have their final name, or are about to.
        intents: those of them whose rename was announced but not confirmed.
        begun: files whose temporary this journal made; a temporary of any other origin is not continued.
        shards: source files whose digest is known.
        releasing: those of them whose deletion was announced and not confirmed.
        released: those that are gone, as everything made from them was durable.
        proven: units that were read back past the cache in this run, while their file was not complete.
    """

    units: set[str] = field(default_factory=set)
    records: dict[tuple[int, int], RecordDone] = field(default_factory=dict)
    tensors: dict[str, TensorDone] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    shards: dict[str, ShardSeen] = field(default_factory=dict)
    releasing: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)

    def add(self, plan: Plan, done: UnitDone) -> None:
        """Take a unit in.

        Raises:
            FormatError: the plan has no such unit, or it holds other records or tensors.
        """
        unit = plan.unit(done.unit)
        found = [record.expert for record in done.records], [tensor.name for tensor in done.tensors]
        if unit is None or found != plan.contents(unit):
            raise FormatError("journal has a unit that is not of this plan", where=done.unit)
        self.units.add(done.unit)
        if unit.layer is not None:
            self.records |= {(unit.layer, record.expert): record for record in done.records}
        for tensor in done.tensors:
            self.tensors[tensor.name] = tensor

    def apply(self, plan: Plan, entry: Entry) -> None:
        """Take one entry in, whichever kind it is.

        A journal is input like any other: a name in it reaches the file system only if the plan has it too.

        Raises:
            FormatError: a unit, file or shard that is not of this plan, or of another length.
        """
        match entry:
            case UnitDone():
                self.add(plan, entry)
            case ShardSeen():
                _check_known("shard", entry.name, entry.bytes, plan.shard_lengths)
                self.shards[entry.name] = entry
                self.releasing.discard(entry.name)
                self.released.discard(entry.name)
            case ShardReleasing():
                _check_known("shard", entry.name, entry.bytes, plan.shard_lengths)
                self.releasing.add(entry.name)
            case ShardReleased():
                _check_known("shard", entry.name, None, plan.shard_lengths)
                self.releasing.discard(entry.name)
                self.released.add(entry.name)
            case FileBegun():
                _check_known("file", entry.name, None, plan.file_lengths)
                self.forget(plan, entry.name)
                self.begun.add(entry.name)
            case FileIntent():
                _check_known("file", entry.name, entry.bytes, plan.file_lengths)
                self.files[entry.name] = (entry.bytes, entry.blake3)
                self.intents.add(entry.name)
            case FileDone():
                _check_known("file", entry.name, entry.bytes, plan.file_lengths)
                self.files[entry.name] = (entry.bytes, entry.blake3)
                self.intents.discard(entry.name)

    def forget(self, plan: Plan, name: str, *, keep_units: bool = False) -> None:
        """The file ``name`` has to be made again, with all its units unless they are still in its temporary."""
        self.files.pop(name, None)
        self.intents.discard(name)
        if not keep_units:
            self.begun.discard(name)
            lost = {unit.name for unit in plan.units_of(name)}
            self.units -= lost
            self.proven -= lost

    def durable_bytes(self, plan: Plan) -> int:
        """Bytes of the container that need not be written again."""
        whole = sum(length for length, _ in self.files.values())
        names = {name for name in plan.unit_files if name not in self.files}
        return whole + sum(unit.bytes for name in names for unit in plan.units_of(name) if unit.name in self.units)

    def unit_extents(self, plan: Plan, unit: Unit) -> list[tuple[int, int, bytes]]:
        """(offset, bytes, BLAKE3) of what a finished unit wrote into its file, by offset."""
        if unit.layer is None:
            return [
                (tensor.offset, tensor.bytes, bytes.fromhex(self.tensors[tensor.name].digest))
                for tensor in plan.tensors_of(unit)
            ]
        return [
            (record.offset, record.bytes, bytes.fromhex(self.records[unit.layer, record.expert].digest))
            for record in plan.records_of(unit)
        ]

    def extents(self, plan: Plan, name: str) -> list[tuple[int, int, bytes]]:
        """(offset, bytes, BLAKE3) of every byte of a finished unit file: contents, header page and zeros between."""
        known = []
        if name == TRUNK_NAME:
            header = pack_trunk_header(plan.file_bytes(name))
            known.append((0, len(header), blake3(header).digest()))
        for unit in plan.units_of(name):
            known += self.unit_extents(plan, unit)
        filled: list[tuple[int, int, bytes]] = []
        end = 0
        for offset, length, digest in [*known, (plan.file_bytes(name), 0, b"")]:
            if offset > end:
                filled.append((end, offset - end, blake3(bytes(offset - end)).digest()))
            if length:
                filled.append((offset, length, digest))
            end = offset + length
        return filled


def _check_known(kind: str, name: str, length: int | None, known: Mapping[str, int]) -> None:
    if name not in known:
        raise FormatError(f"journal has a {kind} that is not of this plan", where=name)
    if length is not None and length != known[name]:
        raise FormatError(f"journal has a {kind} of another length", where=name, expected=known[name], found=length)


def read_outcome(entries: Iterable[Entry], plan: Plan) -> Outcome:
    """Apply the entries of a journal in order."""
    outcome = Outcome()
    for entry in entries:
        outcome.apply(plan, entry)
    return outcome
