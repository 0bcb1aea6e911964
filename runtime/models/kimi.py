"""The decoder of Kimi K3 (text tower) and Kimi-Linear, over any weight store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from formats.families import TextConfig
from runtime.models import kda, mla
from runtime.models.arithmetic import rms_norm
from runtime.models.mlp import activation, apply_mlp
from runtime.models.moe import MoeBlock, Routes, route, scores
from runtime.models.observer import Observer, Watch
from runtime.models.residual import mix
from runtime.store import Tensors, WeightStore
from runtime.threads import Workers

Single = NDArray[np.float32]
Whole = NDArray[np.int64]
LayerState = kda.KdaState | mla.MlaState

_FLOAT = 4  # bytes of a float32


@dataclass
class State:
    """A conversation: how many tokens were fed, and what each layer remembers of them."""

    context: int
    layers: tuple[LayerState, ...]
    position: int = field(default=0)

    def clear(self) -> None:
        """Forget all tokens; no memory is taken or given back."""
        self.position = 0  # from which on mla caches are written anew, and nothing behind it is read
        for layer in self.layers:
            if isinstance(layer, kda.KdaState):
                layer.conv.fill(0)
                layer.matrix.fill(0)


@dataclass(frozen=True)
class Carry:
    """Tokens between two layers.

    Attributes:
        total: float32 [n, hidden], the residual stream; with attention residuals the running sum since the last block
            state.
        blocks: block states, float32 [n, hidden] each; none without attention residuals.
    """

    total: Single
    blocks: tuple[Single, ...]


def new_layer_state(config: TextConfig, layer: int, context: int) -> LayerState:
    """What a layer remembers before the first token, with room for ``context`` of them."""
    return kda.new_state(config) if config.attention[layer] == "kda" else mla.new_state(config, context)


def new_state(config: TextConfig, context: int) -> State:
    """The state before the first token, for ``context`` tokens."""
    return State(context, tuple(new_layer_state(config, layer, context) for layer in range(config.hidden_layers)))


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
        carry = self.begin(ids)
        for layer, memory in enumerate(state.layers):
            tensors = self.store.trunk.layer(layer)
            carry = self.attend(layer, tensors, carry, memory, state.position)
            carry = self.feed_forward(layer, tensors, carry, state.position, observer)
        state.position += len(ids)
        return self.finish(carry)

    def begin(self, ids: Sequence[int]) -> Carry:
        """The embeddings of tokens, on their way to layer 0."""
        return Carry(self.store.trunk.embed(np.asarray(ids, dtype=np.int64)), ())

    def attend(self, layer: int, tensors: Tensors, carry: Carry, memory: LayerState, position: int) -> Carry:
        """The attention half of a layer; ``memory`` takes in these tokens, the next ones of one sequence.

        With attention residuals the running sum starts anew at the first layer of each block, and what it was so far
        becomes a block state.
        """
        block = self.store.config.residual_blocks
        if block is None:
            return Carry(carry.total + self._attention(layer, tensors, carry.total, memory, position), ())
        if carry.blocks:
            mixed = mix(tensors, "self_attention_res", [*carry.blocks, carry.total], self._epsilon)
        else:
            mixed = carry.total
        attended = self._attention(layer, tensors, mixed, memory, position)
        if layer % block == 0:
            return Carry(attended, (*carry.blocks, carry.total))
        return Carry(carry.total + attended, carry.blocks)

    def feed_forward(
        self, layer: int, tensors: Tensors, carry: Carry, first: int, observer: Observer | None = None
    ) -> Carry:
        """The other half of a layer: a dense MLP or a mixture of experts. Tokens are independent here."""
        total = carry.total + self._mlp_or_moe(layer, tensors, carry, first, observer)
        if observer is not None:
            observer.layer_output(layer, first, total)
        return Carry(total, carry.blocks)

    def finish(self, carry: Carry) -> Single:
        """The normed states behind the last layer: float32 [n, hidden]."""
        tensors, hidden = self.store.trunk.output(), carry.total
        if self.store.config.residual_blocks is not None:
            hidden = mix(tensors, "output_attn_res", [*carry.blocks, hidden], self._epsilon)
        return rms_norm(hidden, tensors.vectors["norm.weight"], self._epsilon)

    @property
    def _epsilon(self) -> float:
        return self.store.config.arithmetic.norm_epsilon

    def _attention(self, layer: int, tensors: Tensors, hidden: Single, memory: LayerState, position: int) -> Single:
        x = rms_norm(hidden, tensors.vectors["input_layernorm.weight"], self._epsilon)
        if isinstance(memory, kda.KdaState):
            return kda.attend(self.store.config, tensors, x, memory, self.workers)
        return mla.attend(self.store.config, tensors, x, memory, position, self.workers)

    def _mlp_input(self, tensors: Tensors, carry: Carry) -> Single:
        """What the feed-forward half of a layer reads, normed; with attention residuals a mix of states."""
        hidden = carry.total
        if self.store.config.residual_blocks is not None:
            hidden = mix(tensors, "mlp_res", [*carry.blocks, carry.total], self._epsilon)
        return rms_norm(hidden, tensors.vectors["post_attention_layernorm.weight"], self._epsilon)

    def _mlp_or_moe(self, layer: int, tensors: Tensors, carry: Carry, first: int, observer: Observer | None) -> Single:
        config = self.store.config
        x = self._mlp_input(tensors, carry)
        if not self.store.layer_experts[layer]:
            return apply_mlp(tensors, "mlp", x, activation(config.arithmetic), self.workers)
        routes = route(config, layer, tensors, scores(config, tensors, x, self.workers))
        watch = None if observer is None else Watch(observer, layer, first)
        block = MoeBlock(config, layer, self.store.experts, self.workers)
        return block.apply(tensors, x, routes, partial(self._look_ahead, layer + 1, carry), watch)

    def _look_ahead(self, layer: int, carry: Carry, shared: Single | None) -> None:
        """Ask for the experts that the next layer will probably choose, judging by what is known by now.

        Its router reads what it would read if neither this layer's routed experts nor the attention in between changed
        anything. With attention residuals that is the layer's own mix of states: this layer's input alone, mixed in its
        own way, names 61 to 66 % of the bundled model's experts, and this 84 to 85 % (``benchmarks/hit_rates.py``).

        Args:
            layer: the next one.
            carry: between attention and experts of this layer.
            shared: what this layer's shared experts give; None if it has none.
        """
        config, experts = self.store.config, self.store.experts
        if not self.look_ahead or experts.complete:
            return
        if layer >= config.hidden_layers or not self.store.layer_experts[layer]:
            return
        tensors = self.store.trunk.router(layer)
        if tensors is None:
            return
        total = carry.total if shared is None else carry.total + shared
        x = self._mlp_input(tensors, Carry(total, carry.blocks))  # where a block ends, too: its sum becomes a state
        scored = scores(config, tensors, x, self.workers)
        experts.expect(layer, _likely(route(config, layer, tensors, scored), scored, self.look_ahead))


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
