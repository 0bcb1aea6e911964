"""What a bound checkpoint is, whatever its family: roles, architecture, tensors of the trunk, names of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from formats.errors import UsageError

MATRICES = ("gate", "up", "down")

TRUNK_KINDS = (
    "embedding",
    "head",
    "norm",
    "residual",
    "attention",
    "attention_gate",
    "conv",
    "decay",
    "router",
    "router_bias",
    "latent",
    "shared_expert",
    "dense_mlp",
    "vision",
    "projector",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is for. No two tensors of a model have the same role.

    Attributes:
        kind: one of ``TRUNK_KINDS``, or ``expert``.
        layer: decoder layer, counted from zero, or None outside of the layers.
        expert: number of the routed expert, for ``expert``.
        matrix: ``gate``, ``up`` or ``down``, for ``expert``.
        part: for ``expert`` one of ``weight``, ``packed``, ``scale``; else the tensor's name within its layer.
    """

    kind: str
    layer: int | None = None
    expert: int | None = None
    matrix: str | None = None
    part: str | None = None


@dataclass(frozen=True)
class Architecture:
    """The figures of a model that packing needs, read from its configuration and checked against its tensors.

    Attributes:
        family: ``kimi_k3`` or ``kimi_linear``.
        name: the class that the configuration names.
        hidden_layers: decoder layers, dense ones included.
        moe_layers: those with routed experts, ascending, counted from zero.
        experts: routed experts a MoE layer.
        experts_per_token: how many of them a token uses.
        hidden_size: width of the residual stream.
        expert_shapes: (rows, columns) of gate, up and down.
        expert_format: ``mxfp4`` or ``dense``.
        expert_dtype: element type of dense expert weights; ``U8`` for mxfp4.
        group_size: columns that share a scale in mxfp4, else None.
        vocab_size: rows of embedding and head.
        latent_size: width in which experts work if it is not ``hidden_size``, else None.
        attention: ``kda`` or ``mla`` for each layer.
        decay_heads: heads of the kda layers, that is how many values of A_log count.
        tied_embeddings: whether the head may be the embedding.
    """

    family: str
    name: str
    hidden_layers: int
    moe_layers: tuple[int, ...]
    experts: int
    experts_per_token: int
    hidden_size: int
    expert_shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    expert_format: str
    expert_dtype: str
    group_size: int | None
    vocab_size: int
    latent_size: int | None
    attention: tuple[str, ...]
    decay_heads: int
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A source tensor with its role. Without shard headers dtype and shape are what the configuration promises."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shard: str


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of an expert matrix, alike for all experts: a name with ``{layer}`` and ``{expert}`` to fill in.

    Attributes:
        template: the source name with both placeholders.
        part: ``weight``, ``packed`` or ``scale``.
        dtype: element type.
        shape: as stored, so packed columns are halved.
        bytes: of one such tensor.
    """

    template: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    def name(self, layer: int, expert: int) -> str:
        """The source name for one expert."""
        return self.template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


@dataclass(frozen=True)
class Model:
    """A checkpoint whose every tensor has a role.

    Attributes:
        architecture: its figures.
        trunk: everything but the routed experts, in the order that the forward pass needs it: embedding, layers,
            final norm, head, vision tower, projector, and last what the family does not know.
        expert_tensors: for gate, up and down the tensors that make up the matrix.
        tensor_count: all source tensors.
        source_bytes: of all source tensors.
    """

    architecture: Architecture
    trunk: tuple[BoundTensor, ...]
    expert_tensors: Mapping[str, tuple[ExpertTensor, ...]]
    tensor_count: int
    source_bytes: int
    _by_name: Mapping[str, BoundTensor] = field(init=False, repr=False, compare=False)
    _by_role: Mapping[Role, str] = field(init=False, repr=False, compare=False)
    _experts: ExpertNames = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # derived tables of a frozen object
        set_field(self, "_by_name", MappingProxyType({tensor.name: tensor for tensor in self.trunk}))
        set_field(self, "_by_role", MappingProxyType({tensor.role: tensor.name for tensor in self.trunk}))
        set_field(self, "_experts", expert_name_pattern(self.expert_tensors))

    @property
    def expert_templates(self) -> Mapping[str, tuple[str, ...]]:
        """For gate, up and down the source names with ``{layer}`` and ``{expert}``."""
        return MappingProxyType(
            {matrix: tuple(tensor.template for tensor in tensors) for matrix, tensors in self.expert_tensors.items()}
        )

    @property
    def expert_count(self) -> int:
        """Routed experts in all layers together."""
        return len(self.architecture.moe_layers) * self.architecture.experts

    @property
    def expert_bytes_in_source(self) -> int:
        """Bytes of one expert in the checkpoint, all three matrices."""
        return sum(tensor.bytes for tensors in self.expert_tensors.values() for tensor in tensors)

    @property
    def trunk_bytes_in_source(self) -> int:
        """Bytes of everything else."""
        return sum(tensor.bytes for tensor in self.trunk)

    def expert_names(self, layer: int, expert: int) -> dict[str, tuple[str, ...]]:
        """The source tensors of one expert, for gate, up and down.

        Raises:
            UsageError: the model has no such expert.
        """
        if layer not in self.architecture.moe_layers or not 0 <= expert < self.architecture.experts:
            raise UsageError("no such expert", where=f"layer {layer} expert {expert}")
        return {
            matrix: tuple(tensor.name(layer, expert) for tensor in tensors)
            for matrix, tensors in self.expert_tensors.items()
        }

    def names(self) -> Iterator[str]:
        """Every source tensor: the trunk in its order, then layer by layer and expert by expert."""
        for tensor in self.trunk:
            yield tensor.name
        for layer in self.architecture.moe_layers:
            for expert in range(self.architecture.experts):
                for names in self.expert_names(layer, expert).values():
                    yield from names

    def role(self, name: str) -> Role | None:
        """The role of a source tensor, or None if the model has no tensor of that name."""
        bound = self._by_name.get(name)
        if bound is not None:
            return bound.role
        role = self._experts.parse(name)
        return role if role is not None and self.name_of(role) is not None else None

    def name_of(self, role: Role) -> str | None:
        """The source tensor with that role, or None if there is none."""
        if role.kind != "expert":
            return self._by_role.get(role)
        layer, expert = role.layer, role.expert
        if layer not in self.architecture.moe_layers or expert is None or not 0 <= expert < self.architecture.experts:
            return None
        for tensor in self.expert_tensors.get(role.matrix or "", ()):
            if tensor.part == role.part:
                return tensor.name(layer, expert)
        return None


@dataclass(frozen=True)
class ExpertNames:
    """Recognises the names of routed experts' tensors, all of which differ only after the expert's number."""

    pattern: re.Pattern[str]
    tails: Mapping[str, tuple[str, str]]  # what follows the number -> (matrix, part)

    def parse(self, name: str) -> Role | None:
        """The role that ``name`` spells, or None; whether the model has such an expert is not looked at."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        layer, expert, tail = match.groups()
        return Role("expert", int(layer), int(expert), *self.tails[tail])


def expert_name_pattern(tensors: Mapping[str, tuple[ExpertTensor, ...]]) -> ExpertNames:
    """For the templates of ``tensors``. Numbers have no leading zeros and at most nine digits."""
    split = [
        (*item.template.partition("{expert}"), matrix, item.part) for matrix in tensors for item in tensors[matrix]
    ]
    (head,) = {head for head, _, _, _, _ in split}  # families name their experts so
    number = "(0|[1-9][0-9]{0,8})"
    tails = "|".join(re.escape(tail) for _, _, tail, _, _ in split)
    before, _, after = head.partition("{layer}")
    pattern = re.compile(f"{re.escape(before)}{number}{re.escape(after)}{number}({tails})")
    return ExpertNames(pattern, MappingProxyType({tail: (matrix, part) for _, _, tail, matrix, part in split}))
