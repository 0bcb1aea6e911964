"""Kimi-Linear: names without a prefix, a flat configuration, no vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.families.fields import Fields
from formats.families.inventory import Inventory
from formats.families.kimi import Release, build
from formats.families.kimi_config import TextConfig, read_text_config

RELEASE = Release("kimi_linear", "KimiLinearForCausalLM", prefix="", padded_decay=False, float32_state=False)


def inventory(config: Mapping[str, Any], where: str) -> Inventory:
    """What ``config`` promises."""
    return build(text_config(config, where), RELEASE)


def text_config(config: Mapping[str, Any], where: str) -> TextConfig:
    """``config`` as it stands."""
    return read_text_config(Fields(config, where))
