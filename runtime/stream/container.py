"""Weights of a container: a record with one aligned read, a trunk segment with one aligned read."""

from __future__ import annotations

from functools import lru_cache

from blake3 import blake3

from formats.container import Container
from formats.encoded import Placement, placement, record_matrices
from formats.errors import FormatError, IntegrityError
from formats.layout import PAGE, RECORD_HEADER_BYTES, Codec, align, record_name
from runtime.budget import StoreNeeds
from runtime.description import Description
from runtime.store import Expert
from runtime.stream.direct import DirectReads
from runtime.stream.needs import store_needs
from runtime.stream.segments import Segment, container_segments

ROWS_AT_HAND = 256  # index rows; each is asked for several times while its record is read
PART_BYTES = 12 << 20  # of a record, read at a time: long reads cost the processors less; Kimi K3's at 3 bits are one


class ContainerExperts:
    """Loads experts of a container. Safe to use from several threads.

    A record is proved against its digest, and its values are looked at, when it is read for the first time. Later reads
    bring the same bytes for as long as the bank has the stamp that it had when it was opened; of one that was touched
    since, every read is proved.

    Attributes:
        layer_experts: how many each layer has, 0 for dense layers.
        slot_bytes: the longest record.
        part_bytes: the longest part of one that is read at a time.
    """

    def __init__(
        self, container: Container, reads: DirectReads, *, check: bool = True, part_bytes: int = PART_BYTES
    ) -> None:
        """Open all banks, and prove the index.

        Args:
            container: stays open as long as this is used.
            reads: how to read; has the files and stays open likewise.
            check: prove records; otherwise all count as proved.
            part_bytes: how much of a record is read at a time at the most, whole pages.
        """
        self._container, self._check = container, check
        counts = {info.layer: info.experts for info in container.manifest.layers}
        self.layer_experts = tuple(
            counts.get(layer, 0) for layer in range(container.manifest.architecture.hidden_layers)
        )
        self.slot_bytes = slot_bytes(container)
        self.part_bytes = equal_part(self.slot_bytes, part_bytes)
        self._files = {
            info.layer: reads.open(container.open_again(info.file), info.file) for info in container.manifest.layers
        }
        self._stamps = {layer: file.stamp() for layer, file in self._files.items()}
        self._touched: set[int] = set()  # layers
        self._proved = {info.layer: bytearray(info.experts) for info in container.manifest.layers}
        self._sound = {info.layer: bytearray(info.experts) for info in container.manifest.layers}
        self._placements: dict[tuple[Codec, bytes], Placement | None] = {}
        self._row = lru_cache(ROWS_AT_HAND)(container.row)

    def parts(self, layer: int, expert: int) -> int:
        """How many reads bring an expert in."""
        return -(-self._row(layer, expert).bytes // self.part_bytes)

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        """Read a part of an expert's record into a slot of ``slot_bytes`` bytes with one aligned read; its length.

        Raises:
            UsageError: there is no such expert.
            FormatError: the bank ends early, or the device does not deliver.
            EnvironmentProblem: reading failed.
        """
        row, file = self._row(layer, expert), self._files[layer]
        first = part * self.part_bytes
        stop = min(first + self.part_bytes, row.bytes)
        file.read(row.offset + first, slot[first:stop], where=f"{file.where}: {record_name(layer, expert)}")
        if file.stamp() != self._stamps[layer]:
            self._touched.add(layer)
        return stop - first

    def is_proved(self, layer: int, expert: int) -> bool:
        """Whether an expert, of which all parts have been read, needs no proof."""
        return not self._check or self._is_known(self._proved, layer, expert)

    def prove(self, layer: int, expert: int, slot: memoryview) -> None:
        """Prove a record that was read into a slot.

        Raises:
            IntegrityError: its bytes are not those that were recorded.
        """
        row = self._row(layer, expert)
        found = blake3(slot[: row.bytes]).digest()
        if found != row.digest:
            self._touched.add(layer)  # whatever was found of its bytes need not hold for the next ones
            raise IntegrityError(
                f"record of {record_name(layer, expert)} was changed",
                where=self._files[layer].where,
                offset=row.offset,
                expected=row.digest.hex(),
                found=found.hex(),
            )
        self._proved[layer][expert] = True

    def view(self, layer: int, expert: int, slot: memoryview) -> Expert:
        """The expert that was read into a slot, of which its matrices are views.

        Raises:
            FormatError: the record is malformed or not the one that its index row describes.
        """
        row = self._row(layer, expert)
        data = slot[: row.bytes].toreadonly()
        kind = (row.codec, row.parameters)
        if self._is_known(self._proved, layer, expert) and self._is_known(self._sound, layer, expert):
            known = self._placements[kind]
            if known is not None:
                return Expert(layer, expert, *known.matrices(data))
        self._sound[layer][expert] = False
        header = self._container.checked_header(bytes(data[:RECORD_HEADER_BYTES]), row)
        matrices = record_matrices(header, data)
        if kind not in self._placements:
            self._placements[kind] = placement(matrices, data)
        self._sound[layer][expert] = True
        return Expert(layer, expert, *matrices)

    def _is_known(self, known: dict[int, bytearray], layer: int, expert: int) -> bool:
        """Whether something was found of a record's bytes, and they are still the same."""
        return bool(known[layer][expert]) and layer not in self._touched


def slot_bytes(container: Container) -> int:
    """What the longest record of a container takes, whole pages."""
    return max((container.largest_record(info.layer) for info in container.manifest.layers), default=0)


def equal_part(longest: int, most: int) -> int:
    """The length of one of the fewest equal parts, of whole pages and at most ``most`` bytes, of ``longest`` bytes."""
    longest = max(longest, PAGE)  # there may be no records
    return align(-(-longest // -(-longest // most)), PAGE)


class ContainerTrunk:
    """Reads a container's trunk. Safe to use from several threads.

    Attributes:
        segments: what there is.
        check: whether tensors are to be proved against their digests.
        where: the file, for messages.
    """

    def __init__(
        self, container: Container, reads: DirectReads, description: Description, *, check: bool = True
    ) -> None:
        """Open the trunk; container and ``reads`` stay open as long as this is used.

        Raises:
            FormatError: it is not what the description says.
        """
        self.segments = container_segments(container.manifest, description)
        self.check = check
        self.where = container.manifest.trunk.file
        self._file = reads.open(container.open_again(self.where), self.where)
        self._stamp = self._file.stamp()

    def read(self, segment: Segment, start: int, stop: int, target: memoryview) -> int:
        """Read a range with whole pages around it; see :class:`runtime.stream.tensors.TrunkSource`."""
        first = start // PAGE * PAGE
        length = align(stop, PAGE) - first
        self._file.read(segment.start + first, target[:length], where=f"{self.where}: segment {segment.name}")
        if self._file.stamp() != self._stamp:  # what was proved once and is read again must be the same
            raise FormatError("file changed while it was in use", where=self.where, hint="start again")
        return start - first


def container_needs(container: Container, description: Description) -> StoreNeeds:
    """What serving a container's weights takes.

    Raises:
        FormatError: the index or the trunk is not what it should be.
    """
    experts = container.manifest.experts.count
    return store_needs(slot_bytes(container), experts, container_segments(container.manifest, description))
