"""Kimi K3: the text tower of Kimi-Linear under ``language_model.``, with a vision tower and a projector beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import FormatError
from formats.families.fields import Fields
from formats.families.inventory import Expected, Inventory
from formats.families.kimi import Release, build
from formats.families.kimi_config import TextConfig, read_text_config
from formats.families.model import Role

RELEASE = Release(
    "kimi_k3", "KimiK3ForConditionalGeneration", prefix="language_model.", padded_decay=True, float32_state=True
)
TOWERS = (("vision_tower.", "vision"), ("mm_projector.", "projector"))

_CHANNELS = 3  # of a picture
_MAX_BLOCKS = 1 << 12


def inventory(config: Mapping[str, Any], where: str) -> Inventory:
    """What ``config`` promises."""
    text = text_config(config, where)
    return build(text, RELEASE, TOWERS, _tower_tensors(Fields(config, where).inner("vision_config"), text.dtype))


def text_config(config: Mapping[str, Any], where: str) -> TextConfig:
    """The text tower's part of ``config``."""
    outer = Fields(config, where)
    inner = outer.inner("text_config")
    if inner is None:
        raise FormatError("text_config is absent", where=where, expected="the text tower's configuration")
    return read_text_config(inner, outer)


def _tower_tensors(vision: Fields | None, dtype: str) -> tuple[Expected, ...]:
    """Vision tower and projector as the release ships them; needed only where shard headers are absent."""
    if vision is None:
        return ()
    width, inner = vision.whole("vt_hidden_size"), vision.whole("vt_intermediate_size")
    attention = vision.whole("qkv_hidden_size", default=width)
    blocks = vision.whole("vt_num_hidden_layers", high=_MAX_BLOCKS)
    patch = vision.whole("patch_size")
    grid = vision.whole("init_pos_emb_height"), vision.whole("init_pos_emb_width")
    merge = vision.wholes("merge_kernel_size", low=1, high=1 << 10, most=2)
    merged = vision.whole("mm_hidden_size", default=width) * (merge[0] * merge[1] if len(merge) == 2 else 1)
    text = vision.whole("text_hidden_size")
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("vision_tower.patch_embed.proj.weight", (width, _CHANNELS, patch, patch)),
        ("vision_tower.patch_embed.pos_emb.weight", (*grid, width)),
    ]
    for block in range(blocks):
        base = f"vision_tower.encoder.blocks.{block}."
        shapes += [
            (base + "norm0.weight", (width,)),
            (base + "wqkv.weight", (3 * attention, width)),
            (base + "wo.weight", (width, attention)),
            (base + "norm1.weight", (width,)),
            (base + "mlp.fc0.weight", (inner, width)),
            (base + "mlp.fc1.weight", (width, inner)),
        ]
    shapes += [
        ("vision_tower.encoder.final_layernorm.weight", (width,)),
        ("mm_projector.proj.0.weight", (merged, merged)),
        ("mm_projector.proj.2.weight", (text, merged)),
        ("mm_projector.post_norm.weight", (text,)),
    ]
    kinds = dict(TOWERS)
    return tuple(
        Expected(name, Role(kinds[name.partition(".")[0] + "."], part=name), shape, dtype) for name, shape in shapes
    )
