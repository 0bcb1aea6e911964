"""Two small models, each as a checkpoint and as a container, for tests of the runtime; and packing by recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.planning.selection import parse_selection
from packer.recipe.recipe import load_recipe, override
from tests.support.model_checkpoints import SHAPES, Shape, write_model

SMALL = SHAPES["k3"]
# Experts large enough for codebooks, all kinds of layers, more experts than a token uses.
ENCODED = Shape(replace(SMALL.spec, seed=140, latent=256, moe_width=320, experts=5, per_token=2))


@dataclass(frozen=True)
class Small:
    """A model: its shape, the checkpoint, and a container that was packed from it."""

    shape: Shape
    checkpoint: Path
    container: Path


def make_small(directory: Path) -> Small:
    """A model and its lossless container."""
    source = write_model(directory / "checkpoint", SMALL)
    return Small(SMALL, source, pack_lossless(source, directory / "lossless.moepack"))


def make_encoded(directory: Path) -> Small:
    """A model and the container that the usual recipe makes of it."""
    source = write_model(directory / "checkpoint", ENCODED)
    return Small(ENCODED, source, pack_usual(source, directory / "encoded.moepack"))


def pack_with(source: Path, out: Path, recipe: str, *, settings: Sequence[str] = (), layers: str | None = None) -> Path:
    """Pack with a bundled recipe, whose name is the family's and ``recipe``, and return the container."""
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        chosen = override(load_recipe(model.architecture.family.replace("_", "-") + recipe), settings)
        selection = parse_selection(layers, None, model.architecture)
        pack(checkpoint, model, make_plan(checkpoint, model, chosen, selection=selection), out, jobs=1)
    return out


def pack_lossless(source: Path, out: Path) -> Path:
    """A container with the source's own weights."""
    return pack_with(source, out, "-lossless")


def pack_usual(source: Path, out: Path) -> Path:
    """A container with encoded weights, as the family's usual recipe makes it in little time."""
    return pack_with(source, out, "", settings=["fitting.effort=fast"])
