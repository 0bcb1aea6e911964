"""What is to be run: configuration and naming of a model, and proof that everything it needs is there in its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from formats import strict_json
from formats.assets import MAX_ASSET_BYTES
from formats.checkpoint import CONFIG_NAME, MAX_CONFIG_BYTES, Checkpoint
from formats.container import Container
from formats.errors import FormatError
from formats.families import Model, Release, TextConfig, read_text_model
from formats.families.inventory import Expected
from formats.families.kimi import text_tensors
from formats.manifest import ASSETS_DIR, FILE_NAME, LayerInfo
from formats.spelling import spelled
from runtime.assets import read_asset

_SHOWN = 3  # absent tensors listed in a message


@dataclass(frozen=True)
class Description:
    """A model whose weights are all there.

    Attributes:
        release: naming habits of its family.
        config: the text tower's configuration.
        layer_experts: routed experts of each layer, 0 for dense ones; fewer than configured where some were dropped.
    """

    release: Release
    config: TextConfig
    layer_experts: tuple[int, ...]


def describe_checkpoint(checkpoint: Checkpoint, model: Model) -> Description:
    """The description of a bound checkpoint; binding has compared all names and shapes."""
    release, config = read_text_model(checkpoint.config, CONFIG_NAME)
    moe = frozenset(model.architecture.moe_layers)
    experts = tuple(config.experts if layer in moe else 0 for layer in range(config.hidden_layers))
    return Description(release, config, experts)


def describe_container(container: Container) -> Description:
    """The description of an open container.

    Raises:
        FormatError: no or a wrong configuration among the assets; a layer, expert or tensor that the forward pass needs
            is absent or has another shape.
        IntegrityError: the configuration was changed.
    """
    release, config = read_text_model(_configuration(container), CONFIG_NAME)
    layers = {info.layer: info for info in container.manifest.layers}
    _check_architecture(container, config, release)
    _check_layers(container, config, layers)
    if config.moe_layers and container.manifest.experts.shapes != config.expert_shapes:
        raise FormatError(
            "experts have other shapes than the configuration says",
            where=FILE_NAME,
            expected=config.expert_shapes,
            found=container.manifest.experts.shapes,
        )
    experts = tuple(layers[layer].experts if layer in layers else 0 for layer in range(config.hidden_layers))
    _check_tensors(container, text_tensors(config, release), experts)
    return Description(release, config, experts)


def _configuration(container: Container) -> Mapping[str, object]:
    path = f"{ASSETS_DIR}/{CONFIG_NAME}"
    info = next((asset for asset in container.manifest.assets if asset.path == path), None)
    if info is None:
        raise FormatError("container has no configuration among its assets", where=container.path, expected=path)
    limit = min(MAX_CONFIG_BYTES, MAX_ASSET_BYTES)
    if not 0 < info.bytes <= limit:
        raise FormatError("file has an impossible length", where=path, expected=f"1 to {limit}", found=info.bytes)
    return strict_json.parse_object(read_asset(container, info), where=path)


def _check_architecture(container: Container, config: TextConfig, release: Release) -> None:
    """The manifest's figures are those of the configuration: either alone would run, and mean another model."""
    stated = container.manifest.architecture
    pairs = {
        "family": (release.family, stated.family),
        "hidden_layers": (config.hidden_layers, stated.hidden_layers),
        "hidden_size": (config.hidden_size, stated.hidden_size),
        "moe_layers": (config.moe_layers, stated.moe_layers),
        "experts": (config.experts, stated.experts),
        "experts_per_token": (config.experts_per_token, stated.experts_per_token),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise FormatError(
                "manifest disagrees with the configuration",
                where=f"{FILE_NAME}: architecture.{name}",
                expected=expected,
                found=found,
            )


def _check_layers(container: Container, config: TextConfig, layers: Mapping[int, LayerInfo]) -> None:
    """Every layer that routes has a bank, and every bank all experts that its router chooses from."""
    absent = [layer for layer in config.moe_layers if layer not in layers]
    if absent:
        raise FormatError(
            f"container is partial: it has no experts of layers {spelled(absent)}",
            where=container.path,
            hint="pack the whole model to run it",
        )
    for layer in config.moe_layers:
        info = layers[layer]
        if info.records != info.experts or info.experts < config.experts_per_token:
            raise FormatError(
                f"container is partial: layer {layer} has not all of its experts",
                where=container.path,
                expected=max(info.experts, config.experts_per_token),
                found=info.records,
                hint="pack the whole model to run it",
            )


def _check_tensors(container: Container, promised: tuple[Expected, ...], layer_experts: tuple[int, ...]) -> None:
    """Every tensor of the forward pass is there, in the shape that the configuration gives it."""
    shapes = {info.name: info.shape for info in container.manifest.tensors}
    absent = [item.name for item in promised if item.name not in shapes and not item.optional]
    if absent:
        raise FormatError(
            f"container is partial: {len(absent)} tensors of the trunk are absent: {', '.join(absent[:_SHOWN])}"
            + (", ..." if len(absent) > _SHOWN else ""),
            where=container.path,
            hint="pack the whole model to run it",
        )
    names = {item.name for item in promised}
    for info in container.manifest.tensors:
        if info.layer is not None and info.role != "unknown" and info.name not in names:
            raise FormatError(
                "tensor belongs to another configuration than the container's",
                where=f"{FILE_NAME}: {info.name}",
                expected="no such tensor",
            )
    for item in promised:
        found = shapes.get(item.name)
        expected = _with_kept_experts(item, layer_experts)
        if found is not None and not expected.accepts(found):
            raise FormatError(
                "tensor has another shape than the configuration says",
                where=f"{FILE_NAME}: {item.name}",
                expected=expected.shape,
                found=found,
            )


def _with_kept_experts(item: Expected, layer_experts: tuple[int, ...]) -> Expected:
    """A router's tensors have a row for each expert that the layer has here."""
    if item.role.kind in ("router", "router_bias") and item.role.layer is not None:
        return replace(item, shape=(layer_experts[item.role.layer], *item.shape[1:]))
    return item
