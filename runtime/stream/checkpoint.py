"""Weights of a source checkpoint, as they stand there. Its tensors lie anywhere in its shards, so reads are buffered.

A checkpoint holds no digests: what is read is what there is, but for values that are no numbers, which are refused.
"""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from formats.codecs import mxfp4
from formats.encoded import EncodedMatrix, source_matrix
from formats.families import Model
from formats.families.model import MATRICES
from formats.layout import LINE, PAGE, align, record_name
from formats.source import SourceMatrix
from runtime.budget import StoreNeeds
from runtime.description import Description
from runtime.store import Expert
from runtime.stream.needs import store_needs
from runtime.stream.segments import Segment, checkpoint_segments


class CheckpointExperts:
    """Loads experts of a checkpoint. Safe to use from several threads.

    Attributes:
        layer_experts: how many each layer has, 0 for dense layers.
        slot_bytes: what an expert takes.
        part_bytes: what its largest matrix takes.
    """

    def __init__(self, checkpoint: Checkpoint, model: Model, *, bias: int = mxfp4.DEFAULT_BIAS) -> None:
        """``bias`` is that of MXFP4 scales; other formats have none."""
        self._checkpoint, self._model, self._bias = checkpoint, model, bias
        architecture = model.architecture
        moe = frozenset(architecture.moe_layers)
        self.layer_experts = tuple(
            architecture.experts if layer in moe else 0 for layer in range(architecture.hidden_layers)
        )
        self.slot_bytes = slot_bytes(model)
        self.part_bytes = max(sum(tensor.bytes for tensor in model.expert_tensors[matrix]) for matrix in MATRICES)

    def parts(self, layer: int, expert: int) -> int:
        """How many reads bring an expert in: one a matrix."""
        return len(MATRICES)

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        """Read a matrix of an expert into a slot of ``slot_bytes`` bytes; its length.

        Raises:
            UsageError: there is no such expert.
            FormatError: the shard changed or ends early.
            EnvironmentProblem: reading failed.
        """
        places = self._places(layer, expert, slot)[part]
        for name, place in places:
            self._checkpoint.read_into(name, place)
        return sum(len(place) for _, place in places)

    def is_proved(self, layer: int, expert: int) -> bool:
        """Nothing can be proved."""
        return True

    def prove(self, layer: int, expert: int, slot: memoryview) -> None:
        """There are no digests."""

    def view(self, layer: int, expert: int, slot: memoryview) -> Expert:
        """The expert that was read into a slot, of which its matrices are views.

        Raises:
            FormatError: a weight is no number.
        """
        matrices: list[EncodedMatrix] = []
        for number, places in enumerate(self._places(layer, expert, slot)):
            rows, cols = self._model.architecture.expert_shapes[number]
            where = f"{record_name(layer, expert)} {MATRICES[number]}"
            parts = tuple((name, place.toreadonly()) for name, place in places)
            source = SourceMatrix(rows, cols, parts, self._format, b"", where)
            matrices.append(source_matrix(source, self._bias))
        return Expert(layer, expert, *matrices)

    def _places(self, layer: int, expert: int, slot: memoryview) -> list[list[tuple[str, memoryview]]]:
        """Where each tensor of an expert stands in its slot, matrix by matrix."""
        names = self._model.expert_names(layer, expert)
        at = 0
        found: list[list[tuple[str, memoryview]]] = []
        for matrix in MATRICES:
            found.append([])
            for name, tensor in zip(names[matrix], self._model.expert_tensors[matrix], strict=True):
                found[-1].append((name, slot[at : at + tensor.bytes]))
                at = align(at + tensor.bytes, LINE)
        return found

    @property
    def _format(self) -> str:
        architecture = self._model.architecture
        return "mxfp4" if architecture.expert_format == "mxfp4" else architecture.expert_dtype


def slot_bytes(model: Model) -> int:
    """What an expert of a checkpoint takes, each tensor on a line, whole pages."""
    tensors = [tensor for matrix in MATRICES for tensor in model.expert_tensors[matrix]]
    return align(sum(align(tensor.bytes, LINE) for tensor in tensors), PAGE)


class CheckpointTrunk:
    """Reads a checkpoint's trunk. Safe to use from several threads.

    Attributes:
        segments: what there is.
        check: False, since there are no digests.
        where: what names the tensors, for messages.
    """

    check = False

    def __init__(self, checkpoint: Checkpoint, description: Description) -> None:
        self.segments = checkpoint_segments(checkpoint, description)
        self.where = checkpoint.index_name
        self._checkpoint = checkpoint

    def read(self, segment: Segment, start: int, stop: int, target: memoryview) -> int:
        """Read a range, tensor by tensor; see :class:`runtime.stream.tensors.TrunkSource`."""
        for placed in segment.tensors.values():
            first, end = max(start, placed.offset), min(stop, placed.end)
            if first < end:
                self._checkpoint.read_into(placed.info.name, target[first - start : end - start], first - placed.offset)
        return 0


def checkpoint_needs(checkpoint: Checkpoint, model: Model, description: Description) -> StoreNeeds:
    """What serving a checkpoint's weights takes.

    Raises:
        FormatError: a tensor has a dtype that nothing is computed with.
    """
    return store_needs(slot_bytes(model), model.expert_count, checkpoint_segments(checkpoint, description))
