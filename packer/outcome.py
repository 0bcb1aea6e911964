"""What is done so far: the journal's entries applied to a plan, and how far that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from formats.errors import FormatError
from formats.layout import pack_trunk_header
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
        begun: files whose temporary this journal made; a temporary of any other origin is not continued.
        shards: source files whose digest is known.
    """

    units: set[str] = field(default_factory=set)
    records: dict[tuple[int, int], RecordDone] = field(default_factory=dict)
    tensors: dict[str, TensorDone] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
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
            self.units -= {unit.name for unit in plan.units_of(name)}

    def durable_bytes(self, plan: Plan) -> int:
        """Bytes of the container that need not be written again."""
        whole = sum(length for length, _ in self.files.values())
        names = {name for name in plan.unit_files if name not in self.files}
        return whole + sum(unit.bytes for name in names for unit in plan.units_of(name) if unit.name in self.units)

    def extents(self, plan: Plan, name: str) -> list[tuple[int, int, bytes]]:
        """(offset, bytes, BLAKE3) of every byte of a finished unit file: contents, header page and zeros between."""
        if name == TRUNK_NAME:
            header = pack_trunk_header(plan.file_bytes(name))
            known = [(0, len(header), blake3(header).digest())]
            known += [
                (tensor.offset, tensor.bytes, bytes.fromhex(self.tensors[tensor.name].digest))
                for segment in plan.segments
                for tensor in segment.tensors
            ]
        else:
            known = [
                (record.offset, record.bytes, bytes.fromhex(self.records[layer.layer, record.expert].digest))
                for layer in plan.layers
                if bank_name(layer.layer) == name
                for record in layer.records
            ]
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
