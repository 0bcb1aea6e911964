"""What a configuration promises, and the comparison of that promise with the names, dtypes and shapes that are there.

A family writes the promise (:class:`Inventory`); :func:`bind_inventory` compares. Nothing here knows a model's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from formats import dtypes
from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.families.model import (
    MATRICES,
    Architecture,
    BoundTensor,
    ExpertTensor,
    Model,
    Role,
    expert_name_pattern,
)

FLOATS = ("BF16", "F16", "F32")
_SHOWN = 10
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class Expected:
    """One tensor that the configuration promises.

    Attributes:
        name: in full.
        role: what it is for.
        shape: as the release ships it.
        dtype: what it is taken for when no header says.
        other_dtype: what it may be instead, if the index's total size says so.
        heads: for per-head vectors, how many entries count: any longer vector and [1, 1, heads, 1] are accepted.
        optional: may be absent.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    heads: int | None = None
    optional: bool = False
    other_dtype: str | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape keeps the promise."""
        if self.heads is None:
            return shape == self.shape
        return shape == (1, 1, self.heads, 1) or (len(shape) == 1 and shape[0] >= self.heads)


@dataclass(frozen=True)
class Inventory:
    """The promise of one configuration.

    Attributes:
        architecture: with the expert format that the configuration announces.
        trunk: text tower, in the order that the forward pass needs it.
        towers: (name prefix, role kind) of parts whose names are taken as they come.
        tower_tensors: what the configuration suggests for them; authoritative only without headers.
        expert_tensors: for gate, up and down.
        rival_templates: how expert tensors would be called in the format that is not announced.
        layer_marks: (layer, promised kind, template-free names whose presence shows another kind).
        contradiction: of names that nothing here promises, one that another configuration would promise, and the member
            that would have to say so; or None.
    """

    architecture: Architecture
    trunk: tuple[Expected, ...]
    towers: tuple[tuple[str, str], ...]
    tower_tensors: tuple[Expected, ...]
    expert_tensors: dict[str, tuple[ExpertTensor, ...]]
    rival_templates: tuple[str, ...]
    layer_marks: tuple[tuple[int, str, tuple[tuple[str, str], ...]], ...]
    contradiction: Callable[[Collection[str]], tuple[str, str] | None]


def bind_inventory(inventory: Inventory, checkpoint: Checkpoint) -> Model:
    """Compare ``inventory`` with ``checkpoint`` and give every source tensor its role.

    Raises:
        FormatError: a promised tensor is missing, has another dtype or shape, or names and configuration disagree.
    """
    _check_layer_marks(inventory, checkpoint)
    _check_expert_format(inventory, checkpoint)
    inventory = _with_expert_dtype(inventory, checkpoint)
    _check_missing(inventory, checkpoint)
    rest = _bind_rest(inventory, checkpoint)
    trunk = [_bind(expected, checkpoint) for expected in inventory.trunk if expected.name in checkpoint.weight_map]
    trunk += rest
    _check_experts(inventory, checkpoint)
    _check_float8(trunk, checkpoint)
    model = _model(inventory, trunk, checkpoint)
    if checkpoint.has_headers or checkpoint.total_size in (None, model.source_bytes):
        return model
    others = {item.name: item.other_dtype for item in inventory.trunk if item.other_dtype is not None}
    second = _model(inventory, [_as_dtype(tensor, others.get(tensor.name)) for tensor in trunk], checkpoint)
    return second if second.source_bytes == checkpoint.total_size else model


def _model(inventory: Inventory, trunk: list[BoundTensor], checkpoint: Checkpoint) -> Model:
    architecture = inventory.architecture
    experts = len(architecture.moe_layers) * architecture.experts
    expert_bytes = sum(tensor.bytes for tensors in inventory.expert_tensors.values() for tensor in tensors)
    source_bytes = sum(tensor.bytes for tensor in trunk) + experts * expert_bytes
    return Model(architecture, tuple(trunk), inventory.expert_tensors, len(checkpoint.weight_map), source_bytes)


def _as_dtype(tensor: BoundTensor, dtype: str | None) -> BoundTensor:
    return tensor if dtype is None else replace(tensor, dtype=dtype, bytes=tensor_bytes(tensor.shape, dtype))


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtypes.by_name(dtype).itemsize


def _check_layer_marks(inventory: Inventory, checkpoint: Checkpoint) -> None:
    for layer, promised, marks in inventory.layer_marks:
        for kind, name in marks:
            if kind != promised and name in checkpoint.weight_map:
                raise FormatError(
                    f"layer {layer} (counted from zero) is of another kind than its tensors",
                    where=checkpoint.index_name,
                    expected=f"{promised}, says the configuration",
                    found=f"{kind}, says {name}",
                )


def _check_expert_format(inventory: Inventory, checkpoint: Checkpoint) -> None:
    """Experts stored in the format that the configuration does not announce are a contradiction, not a gap."""
    architecture = inventory.architecture
    for layer in architecture.moe_layers:
        for template in inventory.rival_templates:
            name = template.replace("{layer}", str(layer)).replace("{expert}", "0")
            if name in checkpoint.weight_map:
                raise FormatError(
                    "experts are stored in another form than the configuration announces",
                    where=checkpoint.index_name,
                    expected=f"{architecture.expert_format} experts",
                    found=name,
                )


def _with_expert_dtype(inventory: Inventory, checkpoint: Checkpoint) -> Inventory:
    """Dense experts may be BF16, F16 or F32: the first one's header decides, all others must agree."""
    architecture = inventory.architecture
    if architecture.expert_format != "dense" or not architecture.moe_layers or not checkpoint.has_headers:
        return inventory
    first = inventory.expert_tensors["gate"][0].name(architecture.moe_layers[0], 0)
    tensor = checkpoint.tensors.get(first)
    if tensor is None or tensor.dtype == architecture.expert_dtype:
        return inventory
    if tensor.dtype not in FLOATS:
        raise _wrong_dtype(first, tensor.dtype, tensor.shard, checkpoint)
    tensors = {
        matrix: tuple(replace(item, dtype=tensor.dtype, bytes=tensor_bytes(item.shape, tensor.dtype)) for item in items)
        for matrix, items in inventory.expert_tensors.items()
    }
    return replace(inventory, architecture=replace(architecture, expert_dtype=tensor.dtype), expert_tensors=tensors)


def _promised(inventory: Inventory) -> Iterator[str]:
    for expected in inventory.trunk:
        if not expected.optional:
            yield expected.name
    for name, _ in _expert_grid(inventory):
        yield name


def _expert_grid(inventory: Inventory) -> Iterator[tuple[str, ExpertTensor]]:
    """Every expert tensor by name. The layer's number is filled in once a layer: K3 has half a million names."""
    architecture = inventory.architecture
    tensors = [tensor for matrix in MATRICES for tensor in inventory.expert_tensors[matrix]]
    for layer in architecture.moe_layers:
        parts = [(tensor.template.replace("{layer}", str(layer)).partition("{expert}"), tensor) for tensor in tensors]
        for expert in range(architecture.experts):
            for (head, _, tail), tensor in parts:
                yield f"{head}{expert}{tail}", tensor


def _check_missing(inventory: Inventory, checkpoint: Checkpoint) -> None:
    """Every promised name is there. The walk is bounded by the names that are there, not by the configuration."""
    missing = 0
    first: list[str] = []
    for name in _promised(inventory):
        if name not in checkpoint.weight_map:
            missing += 1
            if len(first) < _SHOWN:
                first.append(name)
            if missing > len(checkpoint.weight_map) + _SHOWN:
                break
    if missing:
        raise FormatError(
            f"{missing} tensors that the configuration promises are missing",
            where=checkpoint.index_name,
            expected=", ".join(first) + (", ..." if missing > len(first) else ""),
            found=f"{len(checkpoint.weight_map)} other names",
        )


def _bind(expected: Expected, checkpoint: Checkpoint) -> BoundTensor:
    shard = checkpoint.weight_map[expected.name]
    dtype, shape = expected.dtype, expected.shape
    tensor = checkpoint.tensors.get(expected.name)
    if tensor is not None:
        if tensor.dtype not in FLOATS:
            raise _wrong_dtype(expected.name, tensor.dtype, shard, checkpoint)
        if not expected.accepts(tensor.shape):
            raise FormatError(
                "tensor has another shape than the configuration promises",
                where=f"{shard}: {expected.name}",
                expected=list(expected.shape),
                found=list(tensor.shape),
            )
        dtype, shape = tensor.dtype, tensor.shape
    return BoundTensor(expected.name, expected.role, dtype, shape, tensor_bytes(shape, dtype), shard)


def _wrong_dtype(name: str, dtype: str, shard: str, checkpoint: Checkpoint) -> FormatError:
    where = f"{shard}: {name}"
    if dtype in _FP8:
        scaled = any(name + suffix in checkpoint.weight_map for suffix in _SCALE_SUFFIXES)
        what = "FP8 weight with a scale, which this family is not read with" if scaled else "FP8 weight without a scale"
        return FormatError(what, where=where, expected=" or ".join(FLOATS), found=dtype)
    return FormatError(
        "tensor has a dtype that its role cannot have", where=where, expected=" or ".join(FLOATS), found=dtype
    )


def _check_experts(inventory: Inventory, checkpoint: Checkpoint) -> None:
    if not checkpoint.has_headers:
        return
    for name, item in _expert_grid(inventory):
        tensor = checkpoint.tensors[name]
        if tensor.dtype == item.dtype and tensor.shape == item.shape:
            continue
        if tensor.dtype != item.dtype and tensor.dtype in _FP8:
            raise _wrong_dtype(tensor.name, tensor.dtype, tensor.shard, checkpoint)
        raise FormatError(
            "expert tensor has another dtype or shape than the configuration promises",
            where=f"{tensor.shard}: {tensor.name}",
            expected=f"{item.dtype} {list(item.shape)}",
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )


def _bind_rest(inventory: Inventory, checkpoint: Checkpoint) -> list[BoundTensor]:
    """Towers and unknown names: first what the configuration suggests, in its order, then the others by name."""
    known = {expected.name for expected in inventory.trunk}
    suggested = {expected.name: expected for expected in inventory.tower_tensors}
    order = {name: number for number, name in enumerate(suggested)}
    experts = expert_name_pattern(inventory.expert_tensors)
    count = inventory.architecture.experts
    moe_layers = frozenset(inventory.architecture.moe_layers)
    loose: list[tuple[int, str, str]] = []
    for name in checkpoint.weight_map:
        if name in known:
            continue
        match = experts.pattern.fullmatch(name)
        if match is not None:
            layer, number = int(match[1]), int(match[2])
            if layer in moe_layers and number < count:
                continue
            if layer < inventory.architecture.hidden_layers:
                raise FormatError(
                    "an expert that the configuration does not have",
                    where=checkpoint.index_name,
                    expected=f"experts 0 to {count - 1} in each MoE layer",
                    found=name,
                )
        rank, kind = next(
            ((rank, kind) for rank, (prefix, kind) in enumerate(inventory.towers) if name.startswith(prefix)),
            (len(inventory.towers), "unknown"),
        )
        loose.append((rank, kind, name))
    _check_contradiction(inventory, frozenset(name for _, kind, name in loose if kind == "unknown"), checkpoint)
    loose.sort(key=lambda item: (item[0], order.get(item[2], len(order)), _natural(item[2])))
    return [_bind_loose(name, kind, suggested.get(name), checkpoint) for _, kind, name in loose]


def _check_contradiction(inventory: Inventory, unknown: Collection[str], checkpoint: Checkpoint) -> None:
    """A name that the family knows, in a place where the configuration has none: not to be taken for a stranger."""
    found = inventory.contradiction(unknown) if unknown else None
    if found is not None:
        name, member = found
        raise FormatError(
            "tensor that the configuration does not have",
            where=checkpoint.index_name,
            expected=f"no such tensor, says {member}",
            found=name,
        )


def _bind_loose(name: str, kind: str, suggested: Expected | None, checkpoint: Checkpoint) -> BoundTensor:
    shard = checkpoint.weight_map[name]
    tensor = checkpoint.tensors.get(name)
    if tensor is not None:
        dtype, shape = tensor.dtype, tensor.shape
    elif suggested is not None:
        dtype, shape = suggested.dtype, suggested.shape
    else:
        raise FormatError(
            "shape of a tensor that the configuration does not describe is unknown without its shard",
            where=f"{shard}: {name}",
            hint="fetch the shards, their headers are enough",
        )
    return BoundTensor(name, Role(kind, part=name), dtype, shape, tensor_bytes(shape, dtype), shard)


def _check_float8(tensors: Iterable[BoundTensor], checkpoint: Checkpoint) -> None:
    """Not even a copy of unscaled FP8 is let through: whoever reads it would be off by thousands."""
    for tensor in tensors:
        if tensor.dtype in _FP8 and not any(
            tensor.name + suffix in checkpoint.weight_map for suffix in _SCALE_SUFFIXES
        ):
            raise _wrong_dtype(tensor.name, tensor.dtype, tensor.shard, checkpoint)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key in which block 2 comes before block 10."""
    return tuple(
        (len(piece.lstrip("0")), piece) if piece[:1].isdecimal() and piece.isascii() else (-1, piece)
        for piece in re.split(r"([0-9]+)", name)
        if piece
    )
