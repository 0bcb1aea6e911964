"""Model families: from tensor names to roles and back. The only place that knows a model's names.

:func:`bind` reads a configuration, writes down every tensor that it promises, and compares that with what the
checkpoint's index and shard headers hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from formats.checkpoint import CONFIG_NAME, Checkpoint
from formats.errors import FormatError
from formats.families import kimi_k3, kimi_linear
from formats.families.fields import Fields
from formats.families.inventory import bind_inventory
from formats.families.kimi import Release, check_decay
from formats.families.kimi_config import TextConfig
from formats.families.model import MATRICES, TRUNK_KINDS, Architecture, BoundTensor, ExpertTensor, Model, Role

__all__ = [
    "MATRICES",
    "TRUNK_KINDS",
    "Architecture",
    "BoundTensor",
    "ExpertTensor",
    "Model",
    "Release",
    "Role",
    "TextConfig",
    "bind",
    "check_decay",
    "read_text_model",
]

_FAMILIES: tuple[ModuleType, ...] = (kimi_k3, kimi_linear)


def bind(checkpoint: Checkpoint) -> Model:
    """Give every tensor of ``checkpoint`` a role.

    Raises:
        FormatError: an unknown family, a configuration with wrong types or contradictions, promised tensors that
            are missing or have another dtype or shape.
    """
    config = checkpoint.config
    return bind_inventory(_family_of(config, CONFIG_NAME).inventory(config, CONFIG_NAME), checkpoint)


def read_text_model(config: Mapping[str, Any], where: str) -> tuple[Release, TextConfig]:
    """The text tower that a ``config.json`` describes, and the naming habits of its family.

    Raises:
        FormatError: an unknown family, or a configuration with wrong types or contradictions.
    """
    family = _family_of(config, where)
    return family.RELEASE, family.text_config(config, where)


def _family_of(config: Mapping[str, Any], where: str) -> ModuleType:
    fields = Fields(config, where)
    names, kind = fields.strings("architectures", most=16), fields.text("model_type")
    for family in _FAMILIES:
        if kind == family.RELEASE.family or family.RELEASE.name in names:
            return family
    raise FormatError(
        "model family is not known",
        where=where,
        expected=" or ".join(family.RELEASE.family for family in _FAMILIES),
        found=f"model_type {kind}, architectures {', '.join(names)}"[:200],
    )
