"""Model families: from tensor names to roles and back. The only place that knows a model's names.

:func:`bind` reads a configuration, writes down every tensor that it promises, and compares that with what the
checkpoint's index and shard headers hold.
"""

from __future__ import annotations

from formats.checkpoint import CONFIG_NAME, Checkpoint
from formats.errors import FormatError
from formats.families import kimi_k3, kimi_linear
from formats.families.fields import Fields
from formats.families.inventory import bind_inventory
from formats.families.kimi import check_decay
from formats.families.model import MATRICES, TRUNK_KINDS, Architecture, BoundTensor, ExpertTensor, Model, Role

__all__ = [
    "MATRICES",
    "TRUNK_KINDS",
    "Architecture",
    "BoundTensor",
    "ExpertTensor",
    "Model",
    "Role",
    "bind",
    "check_decay",
]

_FAMILIES = (kimi_k3, kimi_linear)


def bind(checkpoint: Checkpoint) -> Model:
    """Give every tensor of ``checkpoint`` a role.

    Raises:
        FormatError: an unknown family, a configuration with wrong types or contradictions, promised tensors that
            are missing or have another dtype or shape.
    """
    config = checkpoint.config
    names = Fields(config, CONFIG_NAME).strings("architectures", most=16)
    kind = Fields(config, CONFIG_NAME).text("model_type")
    for family in _FAMILIES:
        if kind == family.RELEASE.family or family.RELEASE.name in names:
            return bind_inventory(family.inventory(config, CONFIG_NAME), checkpoint)
    raise FormatError(
        "model family is not known",
        where=CONFIG_NAME,
        expected=" or ".join(family.RELEASE.family for family in _FAMILIES),
        found=f"model_type {kind}, architectures {', '.join(names)}"[:200],
    )
