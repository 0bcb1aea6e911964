"""Which model a calibration is of, and how much of the text goes through it at a time."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from formats import strict_json
from formats.checkpoint import CONFIG_NAME
from formats.errors import UsageError
from formats.families import TextConfig, read_text_model
from packer.statistics.types import SampledModel
from runtime.assets import read_config_bytes
from runtime.budget import STREAMED
from runtime.opening import Options, Weights, open_weights

MOST_TOKENS = 4096  # that go through a layer's experts together: more would hardly save reads, for all experts are used


def sampled_model(path: Path) -> tuple[SampledModel, TextConfig]:
    """The stamp of a model, and its configuration.

    Raises:
        UsageError: no such directory, or the model has no routed experts.
        FormatError: no or a malformed configuration.
    """
    data = read_config_bytes(path)
    release, config = read_text_model(strict_json.parse_object(data, where=CONFIG_NAME), CONFIG_NAME)
    if not config.moe_layers:
        raise UsageError("the model has no routed experts", where=path)
    stamp = SampledModel(
        family=release.family,
        hidden_layers=config.hidden_layers,
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        config_blake3=blake3(data).hexdigest(),
        source=str(path),
    )
    return stamp, config


def open_for_pass(
    path: Path, config: TextConfig, window: int, options: Options, closing: ExitStack
) -> tuple[Weights, int]:
    """Open a model so that as many tokens as fit into the budget go through a layer's experts together.

    Args:
        window: tokens that attend to each other.
        options: budget, threads and the like; context, chunk and trunk are chosen here.

    Returns:
        The weights, and how many tokens.

    Raises:
        UsageError: the budget is too small even for one window, or experts were dropped from the model.
    """
    group = max(window, MOST_TOKENS // window * window)
    while True:
        wish = replace(
            options,
            context=window,
            chunk=group,
            trunk=STREAMED,
            look_ahead=False,
            reserved=options.reserved + carried_bytes(config, group),
        )
        try:
            with ExitStack() as attempt:
                weights = open_weights(path, wish, attempt)
                closing.push(attempt.pop_all())
            break
        except UsageError:
            if group == window:
                raise
            group = max(window, group // 2 // window * window)
    if any(count not in (0, config.experts) for count in weights.store.layer_experts):
        raise UsageError(
            "experts were dropped from this container", where=path, hint="calibrate the model that it was made from"
        )
    return weights, group


def carried_bytes(config: TextConfig, tokens: int) -> int:
    """What the states of so many tokens take between layers: read from disk, and joined behind the attention."""
    blocks = 0 if config.residual_blocks is None else -(-config.hidden_layers // config.residual_blocks)
    return 2 * 4 * tokens * config.hidden_size * (blocks + 1)
