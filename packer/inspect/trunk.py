"""Looking into a container's trunk: its tensors as the manifest describes them. Reads the manifest and no weights."""

from __future__ import annotations

from pathlib import Path

from formats.container import open_container
from formats.manifest import Manifest
from formats.manifest_types import TensorInfo
from packer.inspect.views import TrunkView


def inspect_trunk(path: Path | str) -> TrunkView:
    """All tensors of the trunk.

    Raises:
        FormatError: not a container, or damaged.
    """
    with open_container(path) as container:
        trunk = container.manifest.trunk
        return TrunkView(trunk.file, trunk.bytes, stored_tensors(container.manifest))


def stored_tensors(manifest: Manifest, layer: int | None = None) -> tuple[TensorInfo, ...]:
    """The trunk's tensors in the order in which they are stored, all of them or those of one layer."""
    chosen = [tensor for tensor in manifest.tensors if layer is None or tensor.layer == layer]
    return tuple(sorted(chosen, key=lambda tensor: tensor.offset))
