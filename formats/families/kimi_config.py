"""The text configuration that Kimi K3 and Kimi-Linear share, read with exact types.

Layers are counted from zero here and in names; the configuration's lists count from one and are converted once,
in :func:`read_text_config`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from formats.errors import FormatError
from formats.families.fields import Fields
from formats.families.quantization import Quantization, read_quantization

MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Arithmetic:
    """What the forward pass does beyond multiplying matrices. Absent members have the released code's defaults.

    Attributes:
        activation: ``silu`` or ``situ``.
        situ_beta, situ_linear_beta: of ``situ``; None where the configuration has none.
        norm_epsilon: of RMS norms.
        scoring: ``sigmoid`` or ``softmax``, of the router's logits.
        renormalize: whether the weights of a token's experts are divided by their sum.
        routed_scale: factor on these weights.
        grouped: whether experts are chosen by groups.
        expert_groups, groups_per_token: how many groups there are, and how many of them a token may use.
        decay_bound: lower bound of the kda decay, None for the form without one.
    """

    activation: str
    situ_beta: float | None
    situ_linear_beta: float | None
    norm_epsilon: float
    scoring: str
    renormalize: bool
    routed_scale: float
    grouped: bool
    expert_groups: int
    groups_per_token: int
    decay_bound: float | None


@dataclass(frozen=True)
class TextConfig:
    """The text tower's configuration. Widths are counts of elements.

    Attributes:
        attention: ``kda`` or ``mla`` for each layer.
        q_lora_rank: None if queries are projected directly.
        residual_blocks: layers a block of attention residuals, None for plain pre-norm.
        latent_size: width in which experts work, None for ``hidden_size``.
        experts: 0 if there are none.
        shared_experts: fused into one MLP of so many times ``expert_width``; 0 for none.
        dtype: of dense tensors whose header is not there.
        quantization: None if experts are dense.
        arithmetic: what no tensor's shape depends on.
    """

    where: str
    vocab_size: int
    hidden_size: int
    dense_width: int
    hidden_layers: int
    attention: tuple[str, ...]
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    mla_gate: bool
    kda_heads: int
    kda_dim: int
    conv_width: int
    full_rank_gate: bool
    residual_blocks: int | None
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_width: int
    first_dense: int
    moe_frequency: int
    latent_size: int | None
    latent_norm: bool
    tied_embeddings: bool
    dtype: str
    quantization: Quantization | None
    arithmetic: Arithmetic

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        if not self.experts:
            return ()
        return tuple(
            layer
            for layer in range(self.hidden_layers)
            if layer >= self.first_dense and layer % self.moe_frequency == 0
        )

    @property
    def expert_input(self) -> int:
        """Width of an expert's input and output."""
        return self.latent_size or self.hidden_size

    @property
    def expert_shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(rows, columns) of gate, up and down."""
        wide, narrow = (self.expert_width, self.expert_input), (self.expert_input, self.expert_width)
        return wide, wide, narrow


def read_text_config(text: Fields, outer: Fields | None = None) -> TextConfig:
    """Read the text tower's configuration with exact types.

    Args:
        text: its object.
        outer: the object around it, if any: ``quantization_config`` and ``tie_word_embeddings`` may stand there.

    Raises:
        FormatError: naming member, expected and found.
    """
    layers = text.whole("num_hidden_layers", high=MAX_LAYERS)
    linear = text.inner("linear_attn_config")
    attention = _attention_kinds(linear, layers)
    has_mla, has_kda = "mla" in attention, linear is not None and "kda" in attention
    experts = text.whole_or_none("num_experts", "n_routed_experts", low=0, high=MAX_EXPERTS) or 0
    per_token = text.whole("num_experts_per_token", "num_experts_per_tok", high=MAX_EXPERTS) if experts else 0
    if per_token > experts:
        raise FormatError(
            "more experts a token than there are", where=text.where, expected=f"at most {experts}", found=per_token
        )
    heads = text.whole("num_attention_heads")
    kda = linear if linear is not None and has_kda else Fields({}, text.where)
    declared = [fields.inner("quantization_config") for fields in (text, outer) if fields is not None]
    quantizations = [fields for fields in declared if fields is not None]
    if len(quantizations) == 2 and quantizations[0].values != quantizations[1].values:
        raise FormatError("two different quantization_config objects", where=text.where)
    return TextConfig(
        where=text.where,
        vocab_size=text.whole("vocab_size"),
        hidden_size=text.whole("hidden_size"),
        dense_width=text.whole("intermediate_size"),
        hidden_layers=layers,
        attention=attention,
        heads=heads,
        q_lora_rank=text.whole_or_none("q_lora_rank"),
        kv_lora_rank=text.whole("kv_lora_rank", default=None if has_mla else 0),
        nope_dim=text.whole("qk_nope_head_dim", default=None if has_mla else 0),
        rope_dim=text.whole("qk_rope_head_dim", low=0, default=None if has_mla else 0),
        value_dim=text.whole("v_head_dim", default=None if has_mla else 0),
        mla_gate=text.flag("mla_use_output_gate"),
        kda_heads=kda.whole("num_heads", default=None if has_kda else 0),
        kda_dim=kda.whole("head_dim", default=None if has_kda else 0),
        conv_width=kda.whole("short_conv_kernel_size", default=None if has_kda else 0),
        full_rank_gate=kda.flag("use_full_rank_gate"),
        residual_blocks=text.whole_or_none("attn_res_block_size"),
        experts=experts,
        experts_per_token=per_token,
        shared_experts=text.whole_or_none("num_shared_experts", "n_shared_experts", low=0, high=MAX_EXPERTS) or 0,
        expert_width=text.whole("moe_intermediate_size", default=None if experts else 1),
        first_dense=text.whole("first_k_dense_replace", low=0, default=0),
        moe_frequency=text.whole("moe_layer_freq", default=1),
        latent_size=text.whole_or_none("routed_expert_hidden_size"),
        latent_norm=text.flag("latent_moe_use_norm"),
        tied_embeddings=any(fields.flag("tie_word_embeddings") for fields in (text, outer) if fields is not None),
        dtype=_dense_dtype(text, outer),
        quantization=read_quantization(quantizations[0] if quantizations else None),
        arithmetic=_arithmetic(text, linear or Fields({}, text.where), experts, per_token),
    )


def _arithmetic(text: Fields, linear: Fields, experts: int, per_token: int) -> Arithmetic:
    activation = text.choice("hidden_act", "silu", "situ")
    beta = text.number_or_none("activation_situ_beta", above=0)
    if activation == "situ" and beta is None:
        raise FormatError("activation_situ_beta is absent, yet hidden_act is situ", where=text.where)
    groups = text.whole("num_expert_group", high=MAX_EXPERTS, default=1)
    kept = text.whole("topk_group", high=groups, default=1)
    if experts % groups:
        raise FormatError(
            "num_expert_group does not divide the experts",
            where=text.where,
            expected=f"a divisor of {experts}",
            found=groups,
        )
    grouped = text.flag("use_grouped_topk", default=True)
    if grouped and experts and kept * (experts // groups) < per_token:
        raise FormatError(
            "topk_group leaves fewer experts than a token uses",
            where=text.where,
            expected=f"at least {per_token}",
            found=kept * (experts // groups),
        )
    return Arithmetic(
        activation=activation,
        situ_beta=beta,
        situ_linear_beta=text.number_or_none("activation_situ_linear_beta", above=0),
        norm_epsilon=text.number("rms_norm_eps", above=0, default=1e-6),
        scoring=text.choice("moe_router_activation_func", "sigmoid", "softmax"),
        renormalize=text.flag("moe_renormalize", default=True),
        routed_scale=text.number("routed_scaling_factor", above=0, default=1.0),
        grouped=grouped,
        expert_groups=groups,
        groups_per_token=kept,
        decay_bound=linear.number_or_none("gate_lower_bound"),
    )


def _dense_dtype(text: Fields, outer: Fields | None) -> str:
    name = text.text("dtype", "torch_dtype") or (outer.text("dtype", "torch_dtype") if outer else None) or "bfloat16"
    if name.removeprefix("torch.") not in _DTYPES:
        raise FormatError(
            "dtype is none of dense weights", where=text.where, expected=", ".join(_DTYPES), found=repr(name)[:80]
        )
    return _DTYPES[name.removeprefix("torch.")]


def _attention_kinds(linear: Fields | None, layers: int) -> tuple[str, ...]:
    """``kda`` or ``mla`` for each layer, from two lists that count from one and together name every layer once."""
    if linear is None:
        return ("mla",) * layers
    kda = linear.wholes("kda_layers", low=1, high=layers, most=layers)
    full = linear.wholes("full_attn_layers", low=1, high=layers, most=layers)
    counts = Counter(kda + full)
    odd = [layer for layer in range(1, layers + 1) if counts[layer] != 1]
    if odd:
        raise FormatError(
            "kda_layers and full_attn_layers do not name every layer once",
            where=linear.where,
            expected=f"1 to {layers}, each in one of the lists",
            found=f"layers named never or twice: {', '.join(map(str, odd[:10]))}",
        )
    linear_layers = frozenset(kda)
    return tuple("kda" if layer in linear_layers else "mla" for layer in range(1, layers + 1))
