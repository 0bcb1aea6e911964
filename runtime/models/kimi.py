"""The decoder of Kimi K3 (text tower) and Kimi-Linear, over any weight store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from formats.families import TextConfig
from runtime.models import kda, mla
from runtime.models.arithmetic import rms_norm
from runtime.models.mlp import activation, apply_mlp
from runtime.models.moe import MoeBlock, Routes, route, scores
from runtime.models.residual import mix
from runtime.store import Tensors, WeightStore
from runtime.threads import Workers

Single = NDArray[np.float32]
Whole = NDArray[np.int64]
LayerState = kda.KdaState | mla.MlaState

_FLOAT = 4  # bytes of a float32


class Observer(Protocol):
    """Who wants to see what happens in the layers; arrays are not to be changed."""

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        """What a layer hands on (for K3 the running sum): float32 [n, hidden] of the tokens from ``first`` on."""

    def routes(self, layer: int, first: int, chosen: Whole, weights: Single) -> None:
        """Experts int64 [n, k], ascending in each row, and their weights float32 [n, k]."""


@dataclass
class State:
    """A conversation: how many tokens were fed, and what each layer remembers of them."""

    context: int
    layers: tuple[LayerState, ...]
    position: int = field(default=0)


def new_state(store: WeightStore, context: int) -> State:
    """The state before the first token, for ``context`` tokens."""
    config = store.config
    return State(
        context,
        tuple(kda.new_state(config) if kind == "kda" else mla.new_state(config, context) for kind in config.attention),
    )


@dataclass(frozen=True)
class Decoder:
    """The forward pass.

    Attributes:
        store: weights.
        workers: threads for products.
        look_ahead: experts of the next layer, a token, that are asked for early; 0 for none.
    """

    store: WeightStore
    workers: Workers
    look_ahead: int

    def step(self, ids: Sequence[int], state: State, observer: Observer | None = None) -> Single:
        """Feed the next tokens and return their last states, normed: float32 [n, hidden], for ``trunk.head``.

        ``state`` moves on by these tokens; if an error is raised it is spoilt.
        """
        first = state.position
        hidden = self.store.trunk.embed(np.asarray(ids, dtype=np.int64))
        if self.store.config.residual_blocks is None:
            hidden = self._plain(hidden, state, observer)
        else:
            hidden = self._with_residuals(hidden, state, observer)
        state.position = first + len(ids)
        norm = self.store.trunk.output().vectors["norm.weight"]
        return rms_norm(hidden, norm, self._epsilon)

    @property
    def _epsilon(self) -> float:
        return self.store.config.arithmetic.norm_epsilon

    def _plain(self, hidden: Single, state: State, observer: Observer | None) -> Single:
        """Pre-norm residuals, as Kimi-Linear has them."""
        for layer in range(self.store.config.hidden_layers):
            tensors = self.store.trunk.layer(layer)
            hidden = hidden + self._attention(layer, tensors, hidden, state)
            hidden = hidden + self._feed_forward(layer, tensors, hidden, state, observer)
            if observer is not None:
                observer.layer_output(layer, state.position, hidden)
        return hidden

    def _with_residuals(self, hidden: Single, state: State, observer: Observer | None) -> Single:
        """Attention residuals, as Kimi K3 has them: ``total`` is the running sum since the last block state."""
        block, total = self.store.config.residual_blocks, hidden
        assert block is not None
        blocks: list[Single] = []
        for layer in range(self.store.config.hidden_layers):
            tensors = self.store.trunk.layer(layer)
            mixed = mix(tensors, "self_attention_res", [*blocks, total], self._epsilon) if blocks else total
            attended = self._attention(layer, tensors, mixed, state)
            if layer % block == 0:
                blocks.append(total)
                total = attended
            else:
                total = total + attended
            mixed = mix(tensors, "mlp_res", [*blocks, total], self._epsilon)
            total = total + self._feed_forward(layer, tensors, mixed, state, observer)
            if observer is not None:
                observer.layer_output(layer, state.position, total)
        return mix(self.store.trunk.output(), "output_attn_res", [*blocks, total], self._epsilon)

    def _attention(self, layer: int, tensors: Tensors, hidden: Single, state: State) -> Single:
        x = rms_norm(hidden, tensors.vectors["input_layernorm.weight"], self._epsilon)
        memory, config = state.layers[layer], self.store.config
        if isinstance(memory, kda.KdaState):
            return kda.attend(config, tensors, x, memory, self.workers)
        return mla.attend(config, tensors, x, memory, state.position, self.workers)

    def _feed_forward(
        self, layer: int, tensors: Tensors, hidden: Single, state: State, observer: Observer | None
    ) -> Single:
        config = self.store.config
        x = rms_norm(hidden, tensors.vectors["post_attention_layernorm.weight"], self._epsilon)
        if not self.store.layer_experts[layer]:
            return apply_mlp(tensors, "mlp", x, activation(config.arithmetic), self.workers)
        routes = route(config, tensors, scores(config, tensors, x, self.workers))
        if observer is not None:
            observer.routes(layer, state.position, routes.chosen, routes.weights)
        block = MoeBlock(config, layer, self.store.experts, self.workers)
        return block.apply(tensors, x, routes, lambda: self._look_ahead(layer + 1, hidden))

    def _look_ahead(self, layer: int, hidden: Single) -> None:
        """Ask for the experts that the next layer will probably choose, judging by this layer's input."""
        config = self.store.config
        if not self.look_ahead or layer >= config.hidden_layers or not self.store.layer_experts[layer]:
            return
        tensors = self.store.trunk.router(layer)
        if tensors is None:
            return
        x = rms_norm(hidden, tensors.vectors["post_attention_layernorm.weight"], self._epsilon)
        scored = scores(config, tensors, x, self.workers)
        self.store.experts.expect(layer, _likely(route(config, tensors, scored), scored, self.look_ahead))


def _likely(routes: Routes, scored: Single, count: int) -> list[int]:
    """The ``count`` best experts of each token, those of the most tokens first, then by score."""
    kept = np.take_along_axis(scored, routes.chosen, axis=-1)
    ranks = np.argsort(-kept, axis=-1, kind="stable")[:, :count]
    best = np.take_along_axis(routes.chosen, ranks, axis=-1)
    values, counts = np.unique(best, return_counts=True)
    strength = np.array([scored[:, value].max() for value in values])
    order = np.lexsort((values, -strength, -counts))
    return [int(values[place]) for place in order]


def state_bytes(config: TextConfig, context: int) -> tuple[int, int]:
    """Bytes of the kda states, which any number of tokens share, and of the mla caches of ``context`` tokens."""
    kinds = config.attention
    recurrent = sum(math.prod(shape) for shape in kda.state_shapes(config)) * kinds.count("kda")
    cached = sum(math.prod(shape) for shape in mla.state_shapes(config, context)) * kinds.count("mla")
    return _FLOAT * recurrent, _FLOAT * cached


def activation_bytes(config: TextConfig, chunk: int, context: int, threads: int) -> int:
    """At most what a step of ``chunk`` tokens holds besides weights and states, logits included.

    Counts the arrays that live at the same time in each block of a layer, and takes the largest block.
    """
    wide = chunk * config.hidden_size
    blocks = 0 if config.residual_blocks is None else -(-config.hidden_layers // config.residual_blocks)
    stream = (blocks + 14) * wide  # block states, running sum, mix, norms in float64
    attention = 0
    if "kda" in config.attention:
        attention = 26 * (chunk + config.conv_width) * config.kda_heads * config.kda_dim
    if "mla" in config.attention:
        width = config.nope_dim + config.rope_dim + config.kv_lora_rank + config.value_dim
        scores = max(mla.SCORES_AT_ONCE, chunk * context)
        attention = max(attention, 5 * chunk * config.heads * width + 6 * threads * scores)
    narrow = chunk * config.expert_input
    expert = threads * (6 * chunk * config.expert_width + 4 * narrow)
    shared = 6 * chunk * config.expert_width * config.shared_experts
    moe = (config.experts_per_token + 6) * narrow + expert + shared + 8 * chunk * config.experts
    dense = 6 * chunk * config.dense_width
    return _FLOAT * (stream + max(attention, moe, dense) + chunk * config.vocab_size)
