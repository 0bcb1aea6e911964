"""The trunk in segments: what is read together, and where each tensor lies in it.

A segment is a run of bytes with tensors at fixed places, whether it lies so in a file (a container) or is put together
while reading (a checkpoint). What a model needs is what its configuration promises, and that alone; a
:class:`~runtime.description.Description` is the proof that all of it is there in its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from formats.checkpoint import Checkpoint, SourceTensor
from formats.errors import FormatError
from formats.families.inventory import FLOATS, Expected
from formats.families.kimi import text_tensors
from formats.layout import LINE, Codec, align
from formats.manifest_types import Manifest, TensorInfo
from formats.manifest_types import Segment as SegmentInfo
from runtime.description import Description

# Kinds of roles whose tensors are no linear maps, whatever their shape.
_VECTOR_KINDS = frozenset({"norm", "residual", "conv", "decay", "router_bias"})
_OUTER = "model."  # before the names of what belongs to no layer


@dataclass(frozen=True)
class Placed:
    """A tensor and where it stands.

    Attributes:
        name: within its segment.
        kind: of its role.
        info: as a manifest describes it; ``blake3`` is empty where no digest is known.
        offset: of its bytes from the start of the segment.
        heads: how many entries count, for A_log.
    """

    name: str
    kind: str
    info: TensorInfo
    offset: int
    heads: int | None = None

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.offset + self.info.bytes

    @property
    def is_matrix(self) -> bool:
        """Whether it is a linear map."""
        return self.kind not in _VECTOR_KINDS


@dataclass(frozen=True)
class Segment:
    """A run of bytes that is read together.

    Attributes:
        name: ``embedding``, ``layer.N`` or ``output``, as in a container.
        start: where it starts in the file, 0 where it is in none.
        bytes: its length.
        tensors: by their names in it.
    """

    name: str
    start: int
    bytes: int
    tensors: Mapping[str, Placed]

    def of_kind(self, kind: str) -> Placed | None:
        """Its first tensor of that kind."""
        return next((tensor for tensor in self.tensors.values() if tensor.kind == kind), None)


@dataclass(frozen=True)
class Segments:
    """All of a trunk that a forward pass needs; ``output`` has final norm, output mix and head."""

    embedding: Segment
    layers: tuple[Segment, ...]
    output: Segment

    @property
    def embedding_tensor(self) -> Placed:
        """The embedding."""
        return next(iter(self.embedding.tensors.values()))

    @property
    def head(self) -> tuple[Segment, Placed]:
        """The head and its segment; those of the embedding if the two are tied."""
        own = self.output.of_kind("head")
        return (self.embedding, self.embedding_tensor) if own is None else (self.output, own)

    def __iter__(self) -> Iterator[Segment]:
        return iter((self.embedding, *self.layers, self.output))


Found = Sequence[tuple[Expected, TensorInfo]]


def container_segments(manifest: Manifest, description: Description) -> Segments:
    """The trunk as a container holds it.

    Raises:
        FormatError: a tensor lies elsewhere than it should, or has a dtype that nothing is computed with.
    """
    infos = {info.name: info for info in manifest.tensors}
    extents = {extent.name: extent for extent in manifest.trunk.segments}

    def place(name: str, found: Found) -> Segment:
        extent = extents.get(name)
        if extent is None:
            raise FormatError("trunk has no such segment", where=manifest.trunk.file, expected=name)
        return _placed(name, extent.offset, extent.bytes, [(*pair, _within(pair[1], extent)) for pair in found])

    return _segments(description, infos.get, place)


def checkpoint_segments(checkpoint: Checkpoint, description: Description) -> Segments:
    """The trunk of a checkpoint, its tensors put one after another as a container would have them.

    Raises:
        FormatError: a tensor has a dtype that nothing is computed with.
    """

    def find(name: str) -> TensorInfo | None:
        tensor = checkpoint.tensors.get(name)
        return None if tensor is None else _described(tensor)

    def place(name: str, found: Found) -> Segment:
        placed, end = [], 0
        for expected, info in found:
            placed.append((expected, info, align(end, LINE)))
            end = placed[-1][2] + info.bytes
        return _placed(name, 0, end, placed)

    return _segments(description, find, place)


def _described(tensor: SourceTensor) -> TensorInfo:
    """A tensor of a checkpoint as a manifest would describe its unchanged bytes; no digest is known."""
    return TensorInfo(
        name=tensor.name,
        role="",
        layer=None,
        dtype=tensor.dtype,
        shape=tensor.shape,
        codec=Codec.RAW.label,
        parameters={},
        scale_exponent=0,
        offset=0,
        bytes=tensor.bytes,
        blake3="",
        source_blake3="",
        rel_error=0.0,
    )


def _segments(
    description: Description, find: Callable[[str], TensorInfo | None], place: Callable[[str, Found], Segment]
) -> Segments:
    """Look up everything that is promised and group it by segment.

    Args:
        find: a tensor by its full name; None for optional ones that are absent.
        place: makes a segment of its tensors.
    """
    layers = range(description.config.hidden_layers)
    groups: dict[str, list[tuple[Expected, TensorInfo]]] = {
        name: [] for name in ("embedding", *(f"layer.{layer}" for layer in layers), "output")
    }
    for expected in text_tensors(description.config, description.release):
        info, role = find(expected.name), expected.role
        if info is None:
            continue
        if info.dtype not in FLOATS:
            raise FormatError(
                "tensor has a dtype that nothing is computed with",
                where=info.name,
                expected=" or ".join(FLOATS),
                found=info.dtype,
            )
        group = role.kind if role.kind in groups else "output" if role.layer is None else f"layer.{role.layer}"
        groups[group].append((expected, info))
    placed = {name: place(name, found) for name, found in groups.items()}
    return Segments(placed["embedding"], tuple(placed[f"layer.{layer}"] for layer in layers), placed["output"])


def _within(info: TensorInfo, extent: SegmentInfo) -> int:
    """Where a tensor starts in its segment."""
    if not extent.offset <= info.offset <= info.offset + info.bytes <= extent.offset + extent.bytes:
        raise FormatError("tensor lies in another segment", where=info.name, expected=extent.name)
    return info.offset - extent.offset


def _placed(name: str, start: int, length: int, found: Sequence[tuple[Expected, TensorInfo, int]]) -> Segment:
    tensors = {}
    for expected, info, offset in found:
        role = expected.role
        local = (role.part or expected.name).removeprefix("" if role.layer is not None else _OUTER)
        tensors[local] = Placed(local, role.kind, info, offset, expected.heads)
    return Segment(name, start, length, MappingProxyType(tensors))
