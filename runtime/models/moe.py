"""The mixture of experts: a router, the chosen experts in a narrower latent, shared experts at full width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError
from formats.families.kimi_config import Arithmetic, TextConfig
from runtime.models.arithmetic import rms_norm, sigmoid, softmax
from runtime.models.mlp import activation, apply_expert, apply_mlp
from runtime.models.observer import ExpertUse, Watch
from runtime.store import Expert, Experts, Tensors
from runtime.threads import Workers, multiply_rows

Single = NDArray[np.float32]
Whole = NDArray[np.int64]

BLOCK = "block_sparse_moe"


@dataclass(frozen=True)
class Routes:
    """Which experts each token uses.

    Attributes:
        chosen: int64 [n, k], ascending in each row.
        weights: float32 [n, k], what their outputs count.
    """

    chosen: Whole
    weights: Single


def scores(config: TextConfig, tensors: Tensors, x: Single, workers: Workers) -> Single:
    """The router's score of every expert: float32 [n, experts] of normed inputs [n, hidden]."""
    logits = multiply_rows(workers, tensors.matrices[f"{BLOCK}.gate.weight"], x)
    return sigmoid(logits) if config.arithmetic.scoring == "sigmoid" else softmax(logits)


def route(config: TextConfig, layer: int, tensors: Tensors, scored: Single) -> Routes:
    """Choose experts by score plus correction bias; their weights are the scores alone (lowest index among equals).

    Raises:
        FormatError: a score is no number: the choice, and all after it, would look sound and mean nothing.
    """
    arithmetic = config.arithmetic
    biased = scored + tensors.vectors[f"{BLOCK}.gate.e_score_correction_bias"]
    if not np.isfinite(biased).all():
        raise FormatError(
            "the router's scores are not finite: the model's weights are not sound", where=f"layer {layer}"
        )
    ranked = np.argsort(-_restricted(arithmetic, biased), axis=-1, kind="stable")
    chosen = np.sort(ranked[:, : config.experts_per_token], axis=-1).astype(np.int64)
    weights = np.take_along_axis(scored, chosen, axis=-1)
    if arithmetic.renormalize:
        sums = np.add.reduce(weights.astype(np.float64), axis=-1, keepdims=True) + 1e-20
        weights = (weights / sums).astype(np.float32)
    return Routes(chosen, weights * np.float32(arithmetic.routed_scale))


def _restricted(arithmetic: Arithmetic, biased: Single) -> Single:
    """Scores with minus infinity outside the best groups, where experts are chosen by groups.

    A group counts as the sum of its two best biased scores.
    """
    groups, kept = arithmetic.expert_groups, arithmetic.groups_per_token
    if not arithmetic.grouped or not groups > kept > 0:
        return biased
    split = biased.reshape(biased.shape[0], groups, -1)
    best = np.sort(split, axis=-1)[:, :, -2:]
    totals = np.add.reduce(best.astype(np.float64), axis=-1)
    ranks = np.argsort(-totals, axis=-1, kind="stable")[:, :kept]
    keep = np.zeros(totals.shape, dtype=bool)
    np.put_along_axis(keep, ranks, True, axis=-1)
    restricted = np.where(keep[:, :, None], split, np.float32(-np.inf))
    return restricted.reshape(biased.shape)


@dataclass(frozen=True)
class MoeBlock:
    """A layer's mixture, ready to be applied to chunks of tokens."""

    config: TextConfig
    layer: int
    experts: Experts
    workers: Workers

    def apply(
        self,
        tensors: Tensors,
        x: Single,
        routes: Routes,
        look_ahead: Callable[[Single | None], None],
        watch: Watch | None = None,
    ) -> Single:
        """Routed and shared experts of normed inputs.

        Args:
            tensors: of the layer.
            x: float32 [n, hidden].
            routes: of these tokens.
            look_ahead: called with what the shared experts give, if there are any, once all of the layer's reads are
                asked for.
            watch: is told what happens.

        Returns:
            float32 [n, hidden].
        """
        config, act = self.config, activation(self.config.arithmetic)
        latent = config.latent_size is not None
        narrow = self._product(tensors, "routed_expert_down_proj", x) if latent else x
        if watch is not None:
            watch.routed(routes.chosen, routes.weights, narrow)
        parts = np.empty((*routes.chosen.shape, narrow.shape[1]), np.float32)

        def work(expert: Expert) -> None:
            tokens, places = np.nonzero(routes.chosen == expert.expert)
            inputs = narrow[tokens]
            with np.errstate(all="ignore"):  # as in the thread that waits; what is not finite shows in the logits
                activated, outputs = apply_expert(expert, inputs, act, self.workers)
            parts[tokens, places] = outputs
            if watch is not None:
                weights = routes.weights[tokens, places]
                watch.expert(ExpertUse(expert.expert, tokens, weights, inputs, activated, outputs))

        shared: list[Single] = []

        def meanwhile() -> None:
            if config.shared_experts:
                shared.append(apply_mlp(tensors, f"{BLOCK}.shared_experts", x, act, self.workers))
            look_ahead(shared[0] if shared else None)

        self.experts.compute(self.layer, [int(e) for e in np.unique(routes.chosen)], work, meanwhile)
        parts *= routes.weights[:, :, None]
        total = parts[:, 0]
        for place in range(1, parts.shape[1]):  # in the order of the experts, whichever came first
            total = total + parts[:, place]
        norm = tensors.vectors.get(f"{BLOCK}.routed_expert_norm.weight")
        if config.latent_norm and norm is not None:
            total = rms_norm(total, norm, config.arithmetic.norm_epsilon)
        if latent:
            total = self._product(tensors, "routed_expert_up_proj", total)
        return total + shared[0] if shared else total

    def _product(self, tensors: Tensors, name: str, x: Single) -> Single:
        return multiply_rows(self.workers, tensors.matrices[f"{BLOCK}.{name}.weight"], x)
