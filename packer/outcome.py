"""What is done so far: the journal's entries applied to a plan, and how far that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from formats.errors import FormatError
from formats.manifest import TRUNK_NAME, bank_name
from packer.journal import (
    Entry,
    FileBegun,
    FileDone,
    FileIntent,
    RecordDone,
    ShardSeen,
    TensorDone,
    UnitDone,
)
from packer.plan import Plan


@dataclass
class Outcome:
    """The state of one pack, owned by the one thread that writes the journal.

    Attributes:
        units: names of the units that are durable.
        records: what they found, by (layer, expert).
        tensors: by name.
        files: (bytes, BLAKE3) of the files that have their final name, or are about to.
        intents: those of them whose rename was announced but not confirmed.
        shards: source files whose digest is known.
    """

    units: set[str] = field(default_factory=set)
    records: dict[tuple[int, int], RecordDone] = field(default_factory=dict)
    tensors: dict[str, TensorDone] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    shards: dict[str, ShardSeen] = field(default_factory=dict)

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
        """Take one entry in, whichever kind it is."""
        match entry:
            case UnitDone():
                self.add(plan, entry)
            case ShardSeen():
                self.shards[entry.name] = entry
            case FileBegun():
                self.forget(plan, entry.name)
            case FileIntent():
                self.files[entry.name] = (entry.bytes, entry.blake3)
                self.intents.add(entry.name)
            case FileDone():
                self.files[entry.name] = (entry.bytes, entry.blake3)
                self.intents.discard(entry.name)

    def forget(self, plan: Plan, name: str, *, keep_units: bool = False) -> None:
        """The file ``name`` has to be made again, with all its units unless they are still in its temporary."""
        self.files.pop(name, None)
        self.intents.discard(name)
        if not keep_units:
            self.units -= {unit.name for unit in plan.units_of(name)}

    def durable_bytes(self, plan: Plan) -> int:
        """Bytes of the container that need not be written again."""
        whole = sum(length for length, _ in self.files.values())
        names = {name for name in plan.unit_files if name not in self.files}
        return whole + sum(unit.bytes for name in names for unit in plan.units_of(name) if unit.name in self.units)

    def extents(self, plan: Plan, name: str) -> list[tuple[int, int, bytes]]:
        """(offset, bytes, BLAKE3) of every record or tensor of a finished file, in order."""
        if name == TRUNK_NAME:
            return [
                (tensor.offset, tensor.bytes, bytes.fromhex(self.tensors[tensor.name].digest))
                for segment in plan.segments
                for tensor in segment.tensors
            ]
        return [
            (record.offset, record.bytes, bytes.fromhex(self.records[layer.layer, record.expert].digest))
            for layer in plan.layers
            if bank_name(layer.layer) == name
            for record in layer.records
        ]


def read_outcome(entries: Iterable[Entry], plan: Plan) -> Outcome:
    """Apply the entries of a journal in order."""
    outcome = Outcome()
    for entry in entries:
        outcome.apply(plan, entry)
    return outcome
