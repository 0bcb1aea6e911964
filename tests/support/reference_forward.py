"""The forward pass once more, in float64 and with plain loops: what the runtime is compared with.

Written from the page on the architecture alone and without the runtime, so that the two can disagree. It reads
``config.json`` by itself and knows no state: every token sees all tokens before it, again and again. Slow, and meant
for models of a few hundred thousand weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from formats.checkpoint import open_checkpoint
from formats.container import open_container
from formats.layout import Matrix

Double = NDArray[np.float64]

_DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": "<f2", "F32": "<f4"}
_LORA_EPSILON = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever the configuration says
_SCALE_BIAS = 127
_GROUP = 32


@dataclass(frozen=True)
class Result:
    """What a forward pass gave.

    Attributes:
        logits: [tokens, vocab].
        outputs: of each layer, [tokens, hidden]; with attention residuals the running sum that a layer hands on.
        chosen: MoE layer -> experts of each token, ascending, int64 [tokens, per token].
        weights: MoE layer -> their weights, [tokens, per token].
        margin: smallest distance between the score of a chosen expert (or group) and that of the best one left out;
            an implementation in float32 may choose otherwise where it is below its rounding error.
    """

    logits: Double
    outputs: tuple[Double, ...]
    chosen: dict[int, NDArray[np.int64]]
    weights: dict[int, Double]
    margin: float


class Weights(Mapping[str, Double]):
    """Tensors by name without prefix, made float64 when they are asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], Double]]) -> None:
        self._readers = readers
        self._known: dict[str, Double] = {}

    def __getitem__(self, name: str) -> Double:
        if name not in self._known:
            self._known[name] = self._readers[name]()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Model:
    """Weights, and the text tower's object of ``config.json``."""

    config: Mapping[str, Any]
    weights: Mapping[str, Double]

    def get(self, name: str, default: Any = None) -> Any:
        """A member of the configuration; ``null`` counts as absent."""
        value = self.config.get(name)
        return default if value is None else value


def load(directory: Path) -> Model:
    """The model of a checkpoint."""
    config = text_config(directory)
    wide = config.get("routed_expert_hidden_size") or config["hidden_size"]
    with open_checkpoint(directory) as checkpoint:

        def dense(name: str) -> Double:
            tensor = checkpoint.tensors[name]
            data = np.frombuffer(checkpoint.read(name), _DTYPES[tensor.dtype])
            return data.astype(np.float64).reshape(tensor.shape)

        def packed(name: str) -> Double:
            codes, scales = checkpoint.tensors[name + "_packed"], checkpoint.tensors[name + "_scale"]
            return decode_mxfp4(
                np.frombuffer(checkpoint.read(codes.name), np.uint8).reshape(codes.shape),
                np.frombuffer(checkpoint.read(scales.name), np.uint8).reshape(scales.shape),
                config["moe_intermediate_size"] if name.endswith("w2.weight") else wide,
            )

        readers: dict[str, Callable[[], Double]] = {}
        for name in checkpoint.tensors:
            short = name.removeprefix("language_model.")
            if name.endswith(".weight_packed"):
                readers[short.removesuffix("_packed")] = lambda name=name: packed(name.removesuffix("_packed"))
            elif not name.endswith(".weight_scale"):
                readers[short] = lambda name=name: dense(name)
        return Model(config, Weights(readers))


def load_container(path: Path) -> Model:
    """The model of a container: the weights that its records and tensors decode to."""
    with open_container(path) as container:
        readers: dict[str, Callable[[], Double]] = {}
        for info in container.manifest.tensors:
            values = container.tensor_values(info).astype(np.float64)
            readers[info.name.removeprefix("language_model.")] = lambda values=values: values
        for layer in container.manifest.layers:
            for row in container.rows(layer.layer):
                record = container.record(layer.layer, row.expert)
                base = f"model.layers.{layer.layer}.block_sparse_moe.experts.{row.expert}."
                for matrix, name in ((Matrix.GATE, "w1"), (Matrix.UP, "w3"), (Matrix.DOWN, "w2")):
                    values = record.matrix(matrix).astype(np.float64)
                    readers[f"{base}{name}.weight"] = lambda values=values: values
    return Model(text_config(path / "assets"), Weights(readers))


def text_config(directory: Path) -> dict[str, Any]:
    """The text tower's object of ``config.json``, with what may stand around it."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config", config)
    return inner | {"tie_word_embeddings": bool(config.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))}


def decode_mxfp4(codes: NDArray[np.uint8], scales: NDArray[np.uint8], columns: int) -> Double:
    """Codes uint8 [rows, columns / 2], the even column in the low nibble, and scales uint8 [rows, columns / 32].

    Both quotients are rounded up.
    """
    nibbles = np.empty((codes.shape[0], codes.shape[1] * 2), np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = codes & 15, codes >> 4
    values = nibbles[:, :columns].astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exponents = scales.astype(np.int64).repeat(_GROUP, axis=1)[:, :columns] - _SCALE_BIAS
    return np.ldexp(values, exponents)


def forward(model: Model, ids: Sequence[int]) -> Result:
    """All tokens of one sequence, from its beginning."""
    weights, layers = model.weights, model.config["num_hidden_layers"]
    block_size = model.get("attn_res_block_size")
    chosen: dict[int, NDArray[np.int64]] = {}
    route_weights: dict[int, Double] = {}
    outputs: list[Double] = []
    margins = [math.inf]
    running: Double | None = weights["model.embed_tokens.weight"][list(ids)]
    blocks: list[Double] = []
    for layer in range(layers):
        base = f"model.layers.{layer}."
        assert running is not None
        hidden = _mix(model, base + "self_attention_res", running, blocks) if blocks else running
        if block_size and layer % block_size == 0:
            blocks.append(running)
            running = None
        normed = _norm(hidden, weights[base + "input_layernorm.weight"], _epsilon(model))
        attention = _kda if _is_kda(model, layer) else _mla
        update = attention(model, base + "self_attn.", normed)
        running = update if running is None else running + update
        hidden = _mix(model, base + "mlp_res", running, blocks) if block_size else running
        normed = _norm(hidden, weights[base + "post_attention_layernorm.weight"], _epsilon(model))
        if _is_moe(model, layer):
            update, chosen[layer], route_weights[layer], margin = _moe(model, base + "block_sparse_moe.", normed)
            margins.append(margin)
        else:
            update = _mlp(model, base + "mlp.{}_proj.weight", ("gate", "up", "down"), normed)
        running = running + update
        outputs.append(running)
    assert running is not None
    hidden = _mix(model, "model.output_attn_res", running, blocks) if block_size else running
    normed = _norm(hidden, weights["model.norm.weight"], _epsilon(model))
    head = "model.embed_tokens.weight" if model.config.get("tie_word_embeddings") else "lm_head.weight"
    return Result(normed @ weights[head].T, tuple(outputs), chosen, route_weights, min(margins))


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens, each the one with the largest logit after all before it."""
    known = list(ids)
    for _ in range(count):
        known.append(int(forward(model, known).logits[-1].argmax()))
    return known[len(ids) :]


def _epsilon(model: Model) -> float:
    return float(model.get("rms_norm_eps", 1e-6))


def _is_kda(model: Model, layer: int) -> bool:
    return layer + 1 in (model.get("linear_attn_config") or {}).get("kda_layers", ())


def _is_moe(model: Model, layer: int) -> bool:
    first, frequency = model.get("first_k_dense_replace", 0), model.get("moe_layer_freq", 1)
    return bool(model.get("num_experts")) and layer >= first and layer % frequency == 0


def _sigmoid(values: Double) -> Double:
    return 0.5 * (1 + np.tanh(0.5 * values))  # never overflows


def _silu(values: Double) -> Double:
    return values * _sigmoid(values)


def _softmax(values: Double) -> Double:
    """Over the last axis."""
    raised = np.exp(values - values.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def _norm(values: Double, weight: Double, epsilon: float) -> Double:
    """RMS norm over the last axis."""
    return weight * values / np.sqrt((values * values).mean(axis=-1, keepdims=True) + epsilon)


def _mix(model: Model, name: str, running: Double, blocks: list[Double]) -> Double:
    """Attention over the block states and the running sum, token by token: [tokens, hidden]."""
    norm, projection = model.weights[name + "_norm.weight"], model.weights[name + "_proj.weight"].reshape(-1)
    states = [*blocks, running]
    scores = [(_norm(state, norm, _epsilon(model)) * projection).sum(axis=-1) for state in states]
    shares = _softmax(np.stack(scores, axis=-1))
    return sum(shares[:, number, None] * state for number, state in enumerate(states))  # type: ignore[return-value]


def _mlp(model: Model, template: str, names: tuple[str, str, str], inputs: Double) -> Double:
    gate, up, down = (model.weights[template.format(name)] for name in names)
    g, u = inputs @ gate.T, inputs @ up.T
    if model.get("hidden_act", "silu") == "silu":
        return (_silu(g) * u) @ down.T
    beta, linear_beta = model.config["activation_situ_beta"], model.get("activation_situ_linear_beta")
    if linear_beta is not None:
        u = linear_beta * np.tanh(u / linear_beta)
    return (beta * np.tanh(g / beta) * _sigmoid(g) * u) @ down.T


def _moe(model: Model, base: str, inputs: Double) -> tuple[Double, NDArray[np.int64], Double, float]:
    """Output [tokens, hidden], chosen experts, their weights, and the smallest margin of the choice."""
    weights = model.weights
    latent = model.get("routed_expert_hidden_size")
    narrow = inputs @ weights[base + "routed_expert_down_proj.weight"].T if latent else inputs
    chosen, shares, margin = _route(model, base + "gate.", inputs)
    output = np.zeros_like(narrow)
    for token in range(len(inputs)):
        for expert, share in zip(chosen[token], shares[token], strict=True):
            template = base + f"experts.{expert}." + "{}.weight"
            output[token] += share * _mlp(model, template, ("w1", "w3", "w2"), narrow[token])
    if model.get("latent_moe_use_norm", False):
        output = _norm(output, weights[base + "routed_expert_norm.weight"], _epsilon(model))
    if latent:
        output = output @ weights[base + "routed_expert_up_proj.weight"].T
    if model.get("num_shared_experts", 0):
        output = output + _mlp(model, base + "shared_experts.{}_proj.weight", ("gate", "up", "down"), inputs)
    return output, chosen, shares, margin


def _route(model: Model, base: str, inputs: Double) -> tuple[NDArray[np.int64], Double, float]:
    logits = inputs @ model.weights[base + "weight"].T
    sigmoid = model.get("moe_router_activation_func", "sigmoid") == "sigmoid"
    scores = _sigmoid(logits) if sigmoid else _softmax(logits)
    biased = scores + model.weights[base + "e_score_correction_bias"]
    groups, kept = model.get("num_expert_group", 1), model.get("topk_group", 1)
    margin = math.inf
    if groups > kept > 0:
        members = biased.reshape(len(inputs), groups, -1)
        group_scores = np.sort(members, axis=2)[:, :, -2:].sum(axis=2)
        best, margin = _largest(group_scores, kept)
        allowed = np.zeros(members.shape, bool)
        for token in range(len(inputs)):
            allowed[token, best[token]] = True
        biased = np.where(allowed.reshape(biased.shape), biased, -np.inf)
    chosen, gap = _largest(biased, model.config["num_experts_per_token"])
    shares = np.take_along_axis(scores, chosen, axis=1)
    if model.get("moe_renormalize", True):
        shares = shares / (shares.sum(axis=1, keepdims=True) + 1e-20)
    return chosen, shares * model.get("routed_scaling_factor", 1.0), min(margin, gap)


def _largest(values: Double, count: int) -> tuple[NDArray[np.int64], float]:
    """Columns of the ``count`` largest values of each row, ascending, and the smallest gap to the next value."""
    order = np.argsort(-values, axis=1, kind="stable")
    if count == values.shape[1]:
        return np.sort(order, axis=1), math.inf
    ranked = np.take_along_axis(values, order, axis=1)
    return np.sort(order[:, :count], axis=1), float((ranked[:, count - 1] - ranked[:, count]).min())


def _kda(model: Model, base: str, inputs: Double) -> Double:
    """Kimi delta attention, one state a head, token after token."""
    linear, weights = model.config["linear_attn_config"], model.weights
    heads, dim, bound = linear["num_heads"], linear["head_dim"], linear.get("gate_lower_bound")
    tokens = len(inputs)

    def project(*names: str) -> Double:
        values = inputs
        for name in names:
            values = values @ weights[f"{base}{name}.weight"].T
        return values

    def by_head(values: Double) -> Double:
        return values.reshape(tokens, heads, dim)

    q, k, v = (
        by_head(_silu(_convolve(project(f"{name}_proj"), weights[f"{base}{name}_conv1d.weight"]))) for name in "qkv"
    )
    q, k = (values / np.sqrt((values * values).sum(axis=2, keepdims=True) + 1e-6) for values in (q, k))
    q = q / math.sqrt(dim)
    rate = np.exp(weights[base + "A_log"].reshape(-1)[:heads])[:, None]
    z = by_head(project("f_a_proj", "f_b_proj") + weights[base + "dt_bias"])
    log_decay = -rate * np.logaddexp(0, z) if bound is None else bound * _sigmoid(rate * z)
    beta = _sigmoid(project("b_proj"))
    gate = by_head(project("g_proj") if linear.get("use_full_rank_gate") else project("g_a_proj", "g_b_proj"))
    output = np.zeros((tokens, heads, dim))
    for head in range(heads):
        state = np.zeros((dim, dim))  # keys x values
        for token in range(tokens):
            key = k[token, head]
            state = np.exp(log_decay[token, head])[:, None] * state
            error = v[token, head] - state.T @ key
            state = state + np.outer(key, beta[token, head] * error)
            output[token, head] = state.T @ q[token, head]
    normed = _norm(output, weights[base + "o_norm.weight"], _epsilon(model)) * _sigmoid(gate)
    return normed.reshape(tokens, heads * dim) @ weights[base + "o_proj.weight"].T


def _convolve(values: Double, kernel: Double) -> Double:
    """Causal depthwise convolution: [tokens, width] with [width, 1, taps], the last tap on the token itself."""
    taps = kernel.shape[2]
    output = np.zeros_like(values)
    for token in range(len(values)):
        for tap in range(taps):
            source = token - (taps - 1) + tap
            if source >= 0:
                output[token] += kernel[:, 0, tap] * values[source]
    return output


def _mla(model: Model, base: str, inputs: Double) -> Double:
    """Latent attention without rotary embedding, keys and values written out."""
    weights, tokens = model.weights, len(inputs)
    heads, nope, rope = (model.config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    value_dim, rank = model.config["v_head_dim"], model.config["kv_lora_rank"]
    if model.get("q_lora_rank") is None:
        q = inputs @ weights[base + "q_proj.weight"].T
    else:
        low = _norm(inputs @ weights[base + "q_a_proj.weight"].T, weights[base + "q_a_layernorm.weight"], _LORA_EPSILON)
        q = low @ weights[base + "q_b_proj.weight"].T
    q = q.reshape(tokens, heads, nope + rope)
    compressed = inputs @ weights[base + "kv_a_proj_with_mqa.weight"].T
    latent = _norm(compressed[:, :rank], weights[base + "kv_a_layernorm.weight"], _LORA_EPSILON)
    shared = compressed[:, rank:]
    expanded = (latent @ weights[base + "kv_b_proj.weight"].T).reshape(tokens, heads, nope + value_dim)
    output = np.zeros((tokens, heads, value_dim))
    for head in range(heads):
        keys, values = expanded[:, head, :nope], expanded[:, head, nope:]
        for token in range(tokens):
            scores = keys[: token + 1] @ q[token, head, :nope] + shared[: token + 1] @ q[token, head, nope:]
            output[token, head] = _softmax(scores / math.sqrt(nope + rope)) @ values[: token + 1]
    mixed = output.reshape(tokens, heads * value_dim)
    if model.get("mla_use_output_gate", False):
        mixed = mixed * _sigmoid(inputs @ weights[base + "g_proj.weight"].T)
    return mixed @ weights[base + "o_proj.weight"].T
